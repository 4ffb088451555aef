"""Address of the tensor specs."""

from quark.onnx.config.enums import CalibMethod as CalibMethod
from quark.onnx.config.enums import QuantGranularity as QuantGranularity
from quark.onnx.config.enums import ScaleType as ScaleType
from quark.onnx.config.layer_config import *
from quark.onnx.config.tensor_specs import *
