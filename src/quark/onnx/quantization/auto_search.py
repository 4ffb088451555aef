"""Address: search over configs, not in this version."""

from quark.onnx.later import AutoSearch, AutoSearchPro, SearchSpace

__all__ = ["AutoSearch", "AutoSearchPro", "SearchSpace"]
