"""Address of the extended operators."""

from quark.onnx.custom_ops import *
