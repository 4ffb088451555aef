"""Automatic search: quantizes a model with many configurations on one calibration, and finds the best."""

from quark.compat.auto_search.auto_search import AutoSearch, AutoSearchConfig
from quark.compat.auto_search.auto_search_pro import AutoSearchPro
from quark.compat.auto_search.search_space import SearchSpace, generate_all_configs, get_auto_search_config

__all__ = [
    "AutoSearch", "AutoSearchConfig", "AutoSearchPro", "SearchSpace", "generate_all_configs", "get_auto_search_config",
]  # fmt: skip
