"""Algorithm configs by their names: from the command line, from dicts and from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quark.base.checked import as_dict, known_keys
from quark.base.json_objects import plain_json
from quark.core.names.registry import Registry
from quark.errors import ConfigError, FormatError
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    DistillationConfig,
    EqualizeConfig,
    GPTAQConfig,
    GPTQConfig,
    ImatrixConfig,
    ImportanceScaleConfig,
    PreQuantOptConfig,
    QronosConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

__all__ = ["load_pre_optimization_config_from_file", "load_quant_algo_config_from_file"]


@dataclass
class UnknownAlgoConfig(AlgoConfig):
    """An algorithm of a checkpoint for which this version has no class; kept as it came."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The dict that it was read from."""
        return dict(self.settings)


ALGO_CONFIGS: Registry[type[AlgoConfig]] = Registry("algorithm")
for _class in (
    SmoothQuantConfig, AWQConfig, AutoSmoothQuantConfig, EqualizeConfig, GPTQConfig, GPTAQConfig, QronosConfig,
    ImportanceScaleConfig, ImatrixConfig, RotationConfig, QuaRotConfig, AutoRoundConfig, SVDQuantConfig,
    DistillationConfig,
):  # fmt: skip
    ALGO_CONFIGS.register(_class.name, _class)
ALGO_CONFIGS.register("smoothquant", SmoothQuantConfig)


WITH_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "qronos": {"desc_act": False, "static_groups": False, "group_aware_order": True},
}
"""Fields of algorithms that are asked for by a word, unless it says one of them: better than the defaults of a config,
which are the documented ones. Scales of groups that are found when their columns are reached take a tenth off what
weights of 2 and 3 bits lose."""

BY_NAME: dict[str, Callable[..., AlgoConfig]] = {
    "smooth": AutoSmoothQuantConfig,
    "smoothquant": AutoSmoothQuantConfig,
    "qronos": partial(QronosConfig, **WITH_OTHERS["qronos"]),
    "autoround": partial(AutoRoundConfig, iters=160, lr=1 / 160, minmax_lr=1 / 160, batch_size=2, fisher="auto"),
}
"""Configs of algorithms that are asked for by name alone, where their defaults are not the best. SmoothQuant's one
alpha for all layers, and its default of 1 above all, makes some models much worse; the search leaves those layers
alone. AutoRound by its documented steps, of 8 batches, takes three times as long and leaves more."""


def fields_of_words(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an algorithm of a word, such as "qronos:fisher=true", with those that a word has unsaid."""
    unsaid = WITH_OTHERS.get(name, {})
    return {"keep_better": True, **({} if unsaid.keys() & said.keys() else unsaid), **said}


def algo_config_by_name(name: str) -> AlgoConfig:
    """The config of an algorithm that is named and not written out. Raises ConfigError for an unknown name."""
    return (BY_NAME.get(name) or ALGO_CONFIGS[name])(keep_better=True)


def algo_config_from_dict(data: Mapping[str, Any]) -> AlgoConfig:
    """The config of an algorithm from its dict; the class follows from "name".

    Raises ConfigError for an unknown name or field.
    """
    if "name" not in as_dict(data, "algo_config"):
        raise ConfigError(f"An algorithm needs a 'name', one of: {', '.join(ALGO_CONFIGS)}. Got {dict(data)!r}.")
    cls = ALGO_CONFIGS[data["name"]]
    return cls(**known_keys(data, cls))


def recorded_algo_config(data: Mapping[str, Any]) -> AlgoConfig:
    """The config of an algorithm from its record in a checkpoint, which another version may have written.

    The algorithm has run already, so nothing depends on it when the checkpoint is loaded: only no dict is an error.
    """
    data = as_dict(data, "algo_config")
    try:
        return algo_config_from_dict(data)
    except ConfigError:
        return UnknownAlgoConfig(str(data.get("name", "")), dict(data))


def load_quant_algo_config_from_file(file_path: str | Path) -> AlgoConfig:
    """Read one algorithm config from a JSON file such as `{"name": "awq", "scaling_layers": [...]}`.

    Raises:
        FormatError: the file is not a JSON object.
        ConfigError: unknown algorithm or field.
    """
    try:
        data = plain_json(Path(file_path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{file_path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise FormatError(f"{file_path} holds a {type(data).__name__}, not one JSON object with a 'name'.")
    return algo_config_from_dict(data)


def load_pre_optimization_config_from_file(file_path: str | Path) -> PreQuantOptConfig:
    """Read the config of what runs before quantization (smooth, rotation, quarot) from a JSON file."""
    config = load_quant_algo_config_from_file(file_path)
    if not isinstance(config, PreQuantOptConfig):
        raise ConfigError(f"{file_path} describes {type(config).__name__}, which is no pre-quantization optimization.")
    return config
