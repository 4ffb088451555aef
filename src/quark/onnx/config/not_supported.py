"""Documented names whose features are not part of this version: using one says so."""

from __future__ import annotations

from typing import Any, NoReturn

from quark.errors import NotSupportedError

__all__ = [
    "AutoSearch",
    "AutoSearchPro",
    "SearchSpace",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "dump_model",
    "generate_all_configs",
    "get_auto_search_config",
]


def _later(name: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotSupportedError(f"{name} is not part of this version; {instead}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not in this version; {instead}."
    return refuse


_SEARCH = "quantize with the configs that you want to compare, from one statistics file"
AutoSearch = _later("AutoSearch", _SEARCH)
AutoSearchPro = _later("AutoSearchPro", _SEARCH)
SearchSpace = _later("SearchSpace", _SEARCH)
generate_all_configs = _later("generate_all_configs", _SEARCH)
get_auto_search_config = _later("get_auto_search_config", _SEARCH)
create_calibrator_power_of_two = _later("create_calibrator_power_of_two", "ModelQuantizer calibrates")
create_calibrator_float_scale = _later("create_calibrator_float_scale", "ModelQuantizer calibrates")
dump_model = _later("dump_model", "use `quark evaluate`, which compares every layer with the float model")
