"""Address of the table of extra options, under its older name."""

from quark.onnx.options import OPTIONS as QCONFIG_ALL_PARAMS

__all__ = ["QCONFIG_ALL_PARAMS"]
