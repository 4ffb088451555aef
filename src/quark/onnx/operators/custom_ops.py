"""Address of the extended operators."""

from quark.onnx_ops.library import *
