"""Search spaces: values to choose from, by name, and every combination of them.

Two forms. That of AutoSearchPro is flat, `{"activation": ["Int8Spec"], "activation_params": {"symmetric": [True],
"only_if": "activation"}}`: a group with `only_if` counts where its condition holds. That of AutoSearch has the fields
of QuantizationConfig, and within `extra_options` and `FastFinetune` the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import product
from typing import Any

from quark.errors import ConfigError
from quark.onnx.config.enums import CalibrationMethod

Config = dict[str, Any]
CONDITION = "only_if"


def generate_all_configs(search_space: Mapping[str, Any]) -> list[Config]:
    """Every combination of a flat space, in the order of its lists; the last list changes fastest.

    Raises:
        ConfigError: A value is of another form, or a range, which has no end of values.
    """
    check_space(search_space)
    lists = {name: values for name, values in search_space.items() if isinstance(values, list)}
    configs: list[Config] = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    for name, group in search_space.items():
        if isinstance(group, dict):
            configs = [
                {**config, **({name: chosen} if chosen else {})}
                for config in configs
                for chosen in _group(group, config)
            ]
    return [deepcopy(config) for config in configs]


def _group(group: Mapping[str, Any], config: Config) -> list[Config]:
    """The combinations of a group for a config; an empty one where its condition does not hold."""
    if not holds(group[CONDITION], config):
        return [{}]
    lists = {name: values for name, values in group.items() if name != CONDITION}
    for name, values in lists.items():
        if is_range(values):
            raise ConfigError(f"{name}: {values} is a range. Possible in a grid: a list of values.")
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def holds(condition: Any, config: Config) -> bool:
    """Whether a config has a value under a name, or those of a dict."""
    if isinstance(condition, str):
        return config.get(condition) is not None
    return all(config.get(name) == value for name, value in condition.items())


def is_range(values: Any) -> bool:
    """Whether these are numbers between two ends: {"type": "float" or "int", "low": ..., "high": ...}."""
    return isinstance(values, dict) and values.get("type") in ("float", "int")


def check_space(search_space: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is neither a list of values nor a group of lists and ranges with `only_if`."""
    for name, values in search_space.items():
        if isinstance(values, list) and values:
            continue
        if not isinstance(values, dict):
            raise ConfigError(
                f"search_space[{name!r}]: {values!r}; possible: a list of values, or a dict with {CONDITION}."
            )
        if not isinstance(values.get(CONDITION), (str, dict)):
            raise ConfigError(f"search_space[{name!r}] needs {CONDITION}: a name, or a dict from name to value.")
        for inner, choices in values.items():
            listed = isinstance(choices, list) and choices
            if inner != CONDITION and not listed and not (is_range(choices) and {"low", "high"} <= choices.keys()):
                raise ConfigError(
                    f"search_space[{name!r}][{inner!r}]: {choices!r}; possible: a list of values, or "
                    '{"type": "int" or "float", "low": ..., "high": ...}.'
                )


# The form of AutoSearch -----------------------------------------------------------------------------------------------


EFFECTIVE: Mapping[str, tuple[str, Any]] = {
    "CalibMovingAverage": ("calibrate_method", CalibrationMethod.MinMax),
    "CalibMovingAverageConstant": ("CalibMovingAverage", True),
    "Percentile": ("calibrate_method", CalibrationMethod.Percentile),
    "SmoothAlpha": ("include_sq", True),
    "FastFinetune": ("include_fast_ft", True),
}
"""Option -> what must have which value for it to have an effect."""


class SearchSpace:
    """The configurations of a space in the form of AutoSearch.

    Args:
        conf: Field of QuantizationConfig -> values; "extra_options" -> option -> values, and of "FastFinetune" its
            parameters -> values.
        logger: Not needed: what happens is logged as everywhere.

    Raises:
        ConfigError: A value is no list.
    """

    def __init__(self, conf: Mapping[str, Any], logger: Any = None) -> None:
        options = conf.get("extra_options", {})
        tuning = options.get("FastFinetune", {})
        self._fields = _lists({name: values for name, values in conf.items() if name != "extra_options"})
        self._options = _lists({name: values for name, values in options.items() if name != "FastFinetune"})
        self._tuning = _lists(tuning)

    def get_all_configs(self) -> list[Config]:
        """Every combination, without options that have no effect in it, and each once."""
        configs = []
        seen = set()
        for fields in _combinations(self._fields):
            for options in _combinations({n: v for n, v in self._options.items() if _counts(n, fields)}):
                options = {n: v for n, v in options.items() if _counts(n, {**fields, **options})}
                tuned = self._tuning if self._tuning and _counts("FastFinetune", fields) else {}
                for tuning in _combinations(tuned):
                    chosen = {**options, **({"FastFinetune": tuning} if tuning else {})}
                    config = {**fields, **({"extra_options": chosen} if chosen else {})}
                    if repr(config) not in seen:
                        seen.add(repr(config))
                        configs.append(deepcopy(config))
        return configs


def _counts(option: str, config: Mapping[str, Any]) -> bool:
    """Whether an option may have an effect; yes where what decides that is not in the space."""
    name, needed = EFFECTIVE.get(option, ("", None))
    if option == "CalibMovingAverageConstant" and not _counts("CalibMovingAverage", config):
        return False
    return name not in config or config[name] == needed


def _lists(space: Mapping[str, Any]) -> dict[str, list[Any]]:
    for name, values in space.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"search_space: {name!r} is {values!r}; possible: a list of values.")
    return dict(space)


def _combinations(space: Mapping[str, list[Any]]) -> Iterable[Config]:
    return (dict(zip(space, values, strict=True)) for values in product(*space.values()))
