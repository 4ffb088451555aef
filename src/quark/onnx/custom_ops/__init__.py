"""The operators of `quark.onnx_ops` as a library that is compiled."""

from quark.onnx.custom_ops.library import get_library_path
from quark.onnx_ops import DOMAIN as _COP_DOMAIN
from quark.onnx_ops import VERSION as _COP_VERSION

__all__ = ["_COP_DOMAIN", "_COP_VERSION", "get_library_path"]
