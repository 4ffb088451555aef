"""Address: the extended operators."""

from quark.onnx.custom_ops import get_library_path

__all__ = ["get_library_path"]
