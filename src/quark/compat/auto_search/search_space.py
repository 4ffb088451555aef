"""Search spaces: values to choose from, by name, and every combination of them.

Two forms. That of AutoSearchPro is flat, `{"activation": ["Int8Spec"], "activation_params": {"symmetric": [True],
"only_if": "activation"}}`: a group with `only_if` counts where its condition holds. That of AutoSearch has the fields
of QuantizationConfig, and within `extra_options` and `FastFinetune` the options.

Samplers say what a search tries next, given what it has seen. A configuration is drawn name by name. TPE (Bergstra et
al. 2011): of the trials so far, the best quarter are good and the rest are bad. Each value is drawn by how often good
trials have it, and of some such draws the one with the largest ratio good : bad is taken. Numbers of a range are seen
through normal curves around those of the trials.

What a flat space gives, `qconfig_of` makes a QConfig of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from itertools import product
from typing import Any

import numpy as np

from quark.errors import ConfigError, did_you_mean
from quark.onnx.config import tensor_specs
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, AlgoConfig, CLEConfig
from quark.onnx.config.config import QConfig
from quark.onnx.config.enums import CalibMethod, CalibrationMethod, QuantGranularity, ScaleType
from quark.onnx.config.layer_config import QLayerConfig
from quark.onnx.config.tensor_specs import QTensorConfig

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
        if _is_range(values):
            raise ConfigError(f"{name}: {values} is a range. Possible in a grid: a list of values.")
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def holds(condition: Any, config: Config) -> bool:
    """Return True where a config has a value under a name, or those of a dict."""
    if isinstance(condition, str):
        return config.get(condition) is not None
    return all(config.get(name) == value for name, value in condition.items())


def _is_range(values: Any) -> bool:
    """Return True for numbers between two ends: {"type": "float" or "int", "low": ..., "high": ...}."""
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
            if inner != CONDITION and not listed and not (_is_range(choices) and {"low", "high"} <= choices.keys()):
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
    """Return True where an option may have an effect, also where what decides that is not in the space."""
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


# Named searches ------------------------------------------------------------------------------------------------------


GPU = "cuda:0"
"""Where the named searches learn the rounding; "optim_device" and "infer_device" are lists that can be changed."""


def _tuning(name: str, low: float, high: float, most: int, **others: list[Any]) -> dict[str, Any]:
    """The ranges of a learned rounding."""
    return {
        "num_iterations": {"type": "int", "low": 3000, "high": most, "step": 3000},
        "learning_rate": {"type": "float", "low": low, "high": high, "log": True},
        **others,
        "only_if": {"algorithms": name},
    }


def _space(activation: str, weight: str, params: dict[str, Any], **others: list[Any]) -> dict[str, Any]:
    on_gpu: dict[str, list[Any]] = {
        "optim_device": [GPU],
        "infer_device": [GPU],
        "batch_size": [2],
        "early_stop": [True],
    }
    return {
        "activation": [activation],
        "activation_params": {"symmetric": [True, False], **params, "only_if": "activation"},
        "weight": [weight],
        "weight_params": {"symmetric": [True], "quant_granularity": ["Tensor"], "only_if": "weight"},
        "cle_algo": ["cle", None],
        "cle_params": {"cle_steps": [-1, 1], "only_if": {"cle_algo": "cle"}},
        "algorithms": ["adaround", "adaquant"],
        "adaquant_params": _tuning("adaquant", 1e-6, 1e-4, 20000, data_size=[1000], **on_gpu),
        "adaround_params": _tuning("adaround", 1e-2, 1e-1, 20000),
        "specific_layer_config": [None],
        "layer_type_config": [None],
        "exclude": [None],
        "use_external_data_format": [False],
        "OptimizeModel": [True],
        **others,
    }


def _advanced() -> dict[str, Any]:
    methods = {"calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"]}
    space = _space("Int8Spec", "Int8Spec", {**methods, "scale_type": ["Float32"], "quant_granularity": ["Tensor"]})
    on_gpu: dict[str, list[Any]] = {
        "optim_device": [GPU],
        "infer_device": [GPU],
        "batch_size": [2],
        "early_stop": [True],
    }
    return space | {
        "weight_params": {"symmetric": [True], "calibration_method": ["MinMax", "MinMSE"], "only_if": "weight"},
        "adaquant_params": _tuning("adaquant", 1e-6, 1e-3, 30000, data_size=[3000], **on_gpu),
        "adaround_params": _tuning("adaround", 1e-2, 1e-1, 30000, data_size=[3000], **on_gpu),
    }


def _xint8() -> dict[str, Any]:
    space = _space("XInt8Spec", "XInt8Spec", {"calibration_method": ["MinMSE"]})
    space["activation_params"]["symmetric"] = [True]
    return space


ALIGNED = {"AlignSlice": [False], "FoldRelu": [True], "AlignConcat": [True]}
SPACES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "ADVANCED_SEARCH": _advanced,
    "XINT8_SEARCH": _xint8,
    "A8W8_SEARCH": lambda: _space(
        "Int8Spec",
        "Int8Spec",
        {"calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"]},
        **ALIGNED,
        PercentileCandidates=[[99.99, 99.999, 99.9999], [99.0, 99.9, 99.99, 99.999, 99.9999]],
    ),
    "A16W8_SEARCH": lambda: _space(
        "Int16Spec",
        "Int8Spec",
        {"calibration_method": ["MinMax", "Percentile"]},
        **ALIGNED,
        AlignEltwiseQuantType=[True],
    ),
}


def default_search() -> dict[str, Any]:
    """Return the settings of a search, but for the space, where its config says nothing."""
    return {
        "n_trials": 20,
        "n_jobs": 1,
        "output_dir": "./output",
        "temp_dir": "./temp_dir",
        "search_algo": "TPE",
        "search_evaluator": None,
        "search_metric": None,
        "direction": "minimize",
        "base_framework": "onnx",
        "study_storage_db": "auto_search.db",
        "load_study_if_exists": True,
        "study_name": "AutoSearch",
        "model_input": None,
        "calib_data_reader": None,
        "eval_data_reader": None,
        "two_stage_search": True,
        "plot_results": False,
    }


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """A new config of AutoSearchPro: "ADVANCED_SEARCH", "XINT8_SEARCH", "A8W8_SEARCH" or "A16W8_SEARCH".

    Raises:
        ConfigError: There is none of this name.
    """
    if config_name not in SPACES:
        raise ConfigError(f"There is no search {config_name!r}. {did_you_mean(config_name, SPACES)}")
    return {"search_space": SPACES[config_name](), **default_search()}


# Samplers ------------------------------------------------------------------------------------------------------------


SEED = 42
STARTUP = 10
"""SearchTrials of TPE that are drawn at random."""
DRAWS = 24
"""Draws of TPE for each name, of which one is taken."""
GOOD = 0.25
"""Share of the trials that are good."""

Draw = Callable[[str, Any], Any]


def configuration(search_space: Mapping[str, Any], draw: Draw) -> Config:
    """A config of a flat space, each value drawn by (name, values); a group that does not count is left out."""
    config: Config = {}
    for name, values in search_space.items():
        if isinstance(values, list):
            config[name] = draw(name, values)
    for name, group in search_space.items():
        if isinstance(group, dict) and holds(group[CONDITION], config):
            chosen = {inner: draw(f"{name}.{inner}", v) for inner, v in group.items() if inner != CONDITION}
            if chosen:
                config[name] = chosen
    return config


class RandomSampler:
    """Draws every value as often as any other. The same seed gives the same draws.

    Args:
        search_space: A flat space.
        seed: Of the draws.
    """

    def __init__(self, search_space: Mapping[str, Any], seed: int = SEED) -> None:
        self.space, self.random = search_space, np.random.default_rng(seed)

    def suggest(self, trials: Sequence[tuple[Config, float]]) -> Config:
        """The next config, given those so far with their scores, of which less is better."""
        return configuration(self.space, lambda name, values: self._draw(values))

    def _draw(self, values: Any) -> Any:
        if not _is_range(values):
            return values[int(self.random.integers(len(values)))]
        low, high = _scaled(values["low"], values), _scaled(values["high"], values)
        return _number(float(self.random.uniform(low, high)), values)


class TPESampler(RandomSampler):
    """Draws what good trials have and bad ones have not; the first trials are random."""

    def suggest(self, trials: Sequence[tuple[Config, float]]) -> Config:
        """The next config, given those so far with their scores, of which less is better."""
        if len(trials) < STARTUP:
            return super().suggest(trials)
        ranked = [config for config, _ in sorted(trials, key=lambda trial: trial[1])]
        count = max(1, math.ceil(GOOD * len(ranked)))
        good, bad = ranked[:count], ranked[count:]
        return configuration(self.space, lambda name, values: self._best(values, _seen(name, good), _seen(name, bad)))

    def _best(self, values: Any, good: list[Any], bad: list[Any]) -> Any:
        if _is_range(values):
            return self._best_number(values, good, bad)
        counts = [np.array([1.0 + seen.count(value) for value in values]) for seen in (good, bad)]
        shares = [count / count.sum() for count in counts]
        draws = self.random.choice(len(values), DRAWS, p=shares[0])
        return values[int(max(draws, key=lambda index: shares[0][index] / shares[1][index]))]

    def _best_number(self, values: Mapping[str, Any], good: list[Any], bad: list[Any]) -> Any:
        low, high = _scaled(values["low"], values), _scaled(values["high"], values)
        if not good or not high > low:
            return self._draw(values)
        centres = [np.array([_scaled(value, values) for value in seen]) for seen in (good, bad)]
        width = (high - low) / 5
        draws = np.clip(self.random.choice(centres[0], DRAWS) + self.random.normal(0, width, DRAWS), low, high)
        # The mean of normal curves around the values seen, and of an even one over the whole range.
        curves = [np.exp(-0.5 * ((draws[:, None] - centre) / width) ** 2).sum(1) for centre in centres]
        even, unit = 1 / (high - low), width * math.sqrt(2 * math.pi)
        ratio = [(curve / unit + even) / (len(centre) + 1) for curve, centre in zip(curves, centres, strict=True)]
        return _number(float(draws[int(np.argmax(ratio[0] / ratio[1]))]), values)


SAMPLERS: Mapping[str, type[RandomSampler]] = {"TPE": TPESampler, "Random": RandomSampler}


def _seen(name: str, trials: Sequence[Config]) -> list[Any]:
    """The values that trials have under "name" or "group.name"; one that has none is left out."""
    group, _, inner = name.rpartition(".")
    configs = [trial.get(group, {}) for trial in trials] if group else list(trials)
    return [config[inner] for config in configs if inner in config]


def _scaled(value: float, values: Mapping[str, Any]) -> float:
    return math.log(value) if values.get("log") else float(value)


def _number(scaled: float, values: Mapping[str, Any]) -> Any:
    """A number of a range, from its scale, on its steps."""
    value = math.exp(scaled) if values.get("log") else scaled
    low, high = values["low"], values["high"]
    step = values.get("step", 1 if values["type"] == "int" else None)
    if step:
        value = low + round((min(value, high) - low) / step) * step
        value -= step if value > high else 0
    value = min(max(value, low), high)
    return int(value) if values["type"] == "int" else float(value)


# QConfigs -------------------------------------------------------------------------------------------------------------


SPECS: Mapping[str, type[QTensorConfig]] = {
    name: getattr(tensor_specs, name) for name in tensor_specs.__all__ if name.endswith("Spec")
}
ENUMS: Mapping[str, type[Enum]] = {
    "calibration_method": CalibMethod,
    "scale_type": ScaleType,
    "quant_granularity": QuantGranularity,
}
ALGORITHMS: Mapping[str, type[AlgoConfig]] = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
JOINT = "NumIterLR"
"""A parameter that stands for two: [num_iterations, learning_rate]."""


def qconfig_of(params: Mapping[str, Any]) -> QConfig:
    """The QConfig of one choice of a flat space; names that are no parts of it are extra options.

    Raises:
        ConfigError: A name or value is unknown.
    """
    rest = dict(params)
    weight = _spec(rest.pop("weight", None), rest.pop("weight_params", {}), "weight")
    activation = _spec(rest.pop("activation", None), rest.pop("activation_params", {}), "activation")
    tuning = {name: rest.pop(f"{name}_params", {}) for name in ALGORITHMS}
    algorithms: list[AlgoConfig] = []
    equalize, equalizing = rest.pop("cle_algo", None), rest.pop("cle_params", {})
    if equalize not in (None, "cle"):
        raise ConfigError(f"cle_algo: {equalize!r}; possible: 'cle' or None.")
    if equalize == "cle":
        algorithms.append(CLEConfig(**equalizing))
    learned = rest.pop("algorithms", None)
    if learned is not None:
        if learned not in ALGORITHMS:
            raise ConfigError(f"algorithms: {learned!r}. {did_you_mean(learned, ALGORITHMS)}")
        values = dict(tuning[learned])
        if JOINT in values:
            values["num_iterations"], values["learning_rate"] = joint(values.pop(JOINT))
        algorithms.append(ALGORITHMS[learned](**values))
    exclude = rest.pop("exclude", None)
    return QConfig(
        QLayerConfig(input_tensors=activation, weight=weight),
        specific_layer_config=rest.pop("specific_layer_config", None),
        layer_type_config=rest.pop("layer_type_config", None),
        exclude=exclude if exclude is None or isinstance(exclude, list) else [exclude],
        algo_config=algorithms,
        use_external_data_format=rest.pop("use_external_data_format", False),
        extra_options=rest,
    )


def _spec(name: Any, params: Mapping[str, Any], where: str) -> QTensorConfig | None:
    if name is None:
        return None
    if name not in SPECS:
        raise ConfigError(f"{where}: {name!r}. {did_you_mean(str(name), SPECS)}")
    values = dict(params)
    for field, kind in ENUMS.items():
        value = values.get(field)
        if isinstance(value, str):
            if value not in kind.__members__:
                raise ConfigError(f"{where}_params.{field}: {value!r}. {did_you_mean(value, kind.__members__)}")
            values[field] = kind[value]
    return SPECS[name](**values)


def joint(value: Any) -> tuple[Any, Any]:
    """Iterations and learning rate of a pair. Raises ConfigError for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(f"{JOINT}: {value!r}; possible: [iterations, learning rate].")
    return value[0], value[1]
