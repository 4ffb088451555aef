"""Address of the quantizer."""

from quark.onnx.quantizer import ModelQuantizer as ModelQuantizer
