"""Classes and functions of ONNX Runtime's quantizer that have a documented name here."""

from onnxruntime.quantization.calibrate import CalibraterBase, MinMaxCalibrater
from onnxruntime.quantization.quant_utils import write_calibration_table

__all__ = ["CalibraterBase", "MinMaxCalibrater", "write_calibration_table"]
