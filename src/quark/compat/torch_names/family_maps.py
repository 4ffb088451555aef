"""The documented maps of algorithm configs by family of models: what `LLMTemplate.get(family)` shows, as dicts.

The lists of a map need not fit a model: an algorithm finds in the model what it can scale or solve.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.errors import ConfigError, did_you_mean
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.config.families import EXCLUDED, with_shown


def _map(config: type[AlgoConfig]) -> Mapping[str, AlgoConfig]:
    return {family: with_shown(config(), family) for family in EXCLUDED}


AWQ_MAP = _map(AWQConfig)
GPTQ_MAP = _map(GPTQConfig)
GPTAQ_MAP = _map(GPTAQConfig)
QRONOS_MAP = _map(QronosConfig)
SQ_MAP = _map(SmoothQuantConfig)
AUTOSMOOTHQUANT_MAP = _map(AutoSmoothQuantConfig)
ROTATION_MAP = _map(RotationConfig)
ALGORITHM_CONFIG_MAPS: dict[str, Mapping[str, AlgoConfig]] = {
    "awq": AWQ_MAP,
    "gptq": GPTQ_MAP,
    "gptaq": GPTAQ_MAP,
    "qronos": QRONOS_MAP,
    "smoothquant": SQ_MAP,
    "autosmoothquant": AUTOSMOOTHQUANT_MAP,
    "rotation": ROTATION_MAP,
}
"""Algorithm -> family -> config."""


def get_supported_algorithm_types() -> list[str]:
    """The algorithms that have a map."""
    return list(ALGORITHM_CONFIG_MAPS)


def get_algo_config(algo_type: str, model_type: str) -> AlgoConfig | None:
    """The config of an algorithm for a family; None for a family without one.

    Raises:
        ConfigError: An unknown algorithm; the nearest names are listed.
    """
    name = algo_type.lower()
    if name not in ALGORITHM_CONFIG_MAPS:
        raise ConfigError(f"Unsupported algorithm type {algo_type!r}. {did_you_mean(name, ALGORITHM_CONFIG_MAPS)}")
    return ALGORITHM_CONFIG_MAPS[name].get(model_type)
