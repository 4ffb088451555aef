"""Address: the functional interface."""

from quark.onnx.quantizer import *
