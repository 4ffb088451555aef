"""The operators of `quark.onnx_ops` as a library that is compiled."""

from quark.onnx.custom_ops.library import get_library_path

__all__ = ["get_library_path"]
