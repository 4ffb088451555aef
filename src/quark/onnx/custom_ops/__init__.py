"""Operators beyond ONNX, domain com.amd.quark: as ONNX functions in the file, and as a library that is compiled."""

from quark.onnx.custom_ops.library import get_library_path
from quark.onnx_functions import (
    ATTRIBUTES,
    BLOCK_OPSET,
    DOMAIN,
    LINEAR_TYPES,
    MINIMUM_IR,
    VERSION,
    Operator,
    block,
    function,
    linear,
)

__all__ = [
    "ATTRIBUTES",
    "BLOCK_OPSET",
    "DOMAIN",
    "LINEAR_TYPES",
    "MINIMUM_IR",
    "VERSION",
    "Operator",
    "block",
    "function",
    "get_library_path",
    "linear",
]
