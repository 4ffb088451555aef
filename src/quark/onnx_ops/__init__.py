"""Operators beyond ONNX, domain com.amd.quark, as ONNX functions in the file: what both flows write.

A package of its own between the flows and `core`: `core` knows no file format, and the flows do not import each other.
"""

from quark.onnx_ops.live import live
from quark.onnx_ops.operators import (
    ATTRIBUTES,
    BFP_FORMATS,
    BLOCK_OPSET,
    DOMAIN,
    LINEAR_TYPES,
    MINIMUM_IR,
    MX_ELEMENTS,
    VERSION,
    Operator,
    block,
    function,
    linear,
)

__all__ = [
    "ATTRIBUTES",
    "BFP_FORMATS",
    "BLOCK_OPSET",
    "DOMAIN",
    "LINEAR_TYPES",
    "MINIMUM_IR",
    "MX_ELEMENTS",
    "VERSION",
    "Operator",
    "block",
    "function",
    "linear",
    "live",
]
