"""Address of the named searches."""

from quark.onnx.auto_search.named_searches import get_auto_search_config as get_auto_search_config
