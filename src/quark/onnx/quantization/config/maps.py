"""Address of the table of extra options, under its older name."""

from quark.onnx.config.extra_options import OPTIONS as QCONFIG_ALL_PARAMS

__all__ = ["QCONFIG_ALL_PARAMS"]
