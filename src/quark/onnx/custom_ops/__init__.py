"""Address of the extended operators and of their compiled library."""

from quark.onnx_ops.library import *
from quark.onnx_ops.library import __all__ as __all__
