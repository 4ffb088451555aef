"""Lowering of the algorithms: those of `algo_config`, and those that extra options or legacy flags ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from quark.base.log import logger
from quark.errors import ConfigError, did_you_mean
from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.config.extra_options import OPTIONS, value_of
from quark.onnx.config.layer_config import QLayerConfig, target_layers

FINETUNE = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
_PREFERRED: Mapping[str, Mapping[str, Any]] = {
    "accuracy": {"early_stop": False, "update_bias": True, "output_qdq": True},
    "speed": {"early_stop": True, "mem_opt_level": 0},
    "resource_efficiency": {"mem_opt_level": 2, "num_workers": 1},
}
"""QuantizationPreference -> parameters of AdaRound and AdaQuant."""


def lower_algorithms(
    given: Iterable[AlgoConfig], options: Mapping[str, Any], flags: Mapping[str, bool]
) -> tuple[AlgoConfig, ...]:
    """The algorithms in their order.

    An option that says something about an algorithm wins over the config in `given`; one that differs from its
    default asks for the algorithm.

    Args:
        given: Algorithm configs.
        options: Extra options, checked.
        flags: The legacy include_cle, include_sq, include_rotation, include_fast_ft and include_auto_mp; empty for
            QConfig.

    Raises:
        ConfigError: an entry of an option is unknown or wrong.
    """
    configured = [_merged(algorithm, options) for algorithm in given]
    classes = {type(algorithm) for algorithm in configured}
    by_options = [algorithm for algorithm in _of_options(options, flags) if type(algorithm) not in classes]
    return (*by_options, *configured)


def with_preference(algorithm: AlgoConfig, options: Mapping[str, Any]) -> AlgoConfig:
    """A copy of the config, with what QuantizationPreference changes, whatever it had."""
    preference = value_of(options, "QuantizationPreference")
    if preference is None or not isinstance(algorithm, tuple(FINETUNE.values())):
        return algorithm
    preferred = dict(_PREFERRED[preference])
    if preferred.get("update_bias") and isinstance(algorithm, AdaRoundConfig):
        del preferred["update_bias"]  # it learns how weights round, and nothing else
    changed = {name: value for name, value in preferred.items() if getattr(algorithm, name) != value}
    if changed:
        entries = ", ".join(f"{name}={value}" for name, value in changed.items())
        logger.info(f"QuantizationPreference={preference!r}: {algorithm.name} has {entries}.")
    return replace(algorithm, **changed)


def _of_options(options: Mapping[str, Any], flags: Mapping[str, bool]) -> list[AlgoConfig]:
    """The algorithms that options or legacy flags ask for."""
    algorithms: list[AlgoConfig] = []
    for kind, flag in ((CLEConfig, ""), (SmoothQuantConfig, "include_sq"), (QuarotConfig, "include_rotation")):
        changed = {
            key: options[key] for key in kind.keys.values() if key in options and options[key] != OPTIONS[key].default
        }
        switched_off = kind is CLEConfig and flags.get("include_cle") is False
        if flags.get(flag) or (changed and not switched_off):
            algorithms.append(kind.from_options(changed))
    if value_of(options, "BiasCorrection"):
        algorithms.append(BiasCorrectionConfig())
    nbits = value_of(options, "UseMatMulNBits") and value_of(options, "MatMulNBitsParams").get("Algorithm") == "GPTQ"
    if value_of(options, "UseGPTQ") or nbits:
        algorithms.append(GPTQConfig.from_options(value_of(options, "GPTQParams")))
    if flags.get("include_fast_ft", bool(value_of(options, "FastFinetune"))):
        algorithms.append(_finetune(value_of(options, "FastFinetune")))
    if flags.get("include_auto_mp", bool(value_of(options, "AutoMixprecision"))):
        algorithms.append(AutoMixprecisionConfig.from_options(value_of(options, "AutoMixprecision")))
    return algorithms


def _finetune(entries: Mapping[str, Any]) -> AlgoConfig:
    name = str(entries.get("OptimAlgorithm", "adaround"))
    if name not in FINETUNE:
        raise ConfigError(f"FastFinetune.OptimAlgorithm: {name!r}. {did_you_mean(name, FINETUNE)}")
    kind: type[AlgoConfig] = FINETUNE[name]
    return kind.from_options(entries)


def _merged(algorithm: AlgoConfig, options: Mapping[str, Any]) -> AlgoConfig:
    """A copy of the config, with what the options say about it."""
    given = value_of(options, algorithm.nest) if algorithm.nest in OPTIONS else options
    if given is not options and given.get("OptimAlgorithm", algorithm.name) != algorithm.name:
        return replace(algorithm)
    names = {name: given[key] for name, key in algorithm.keys.items() if key in given}
    return replace(algorithm, **names)


def targets(
    algorithms: Iterable[AlgoConfig], options: Mapping[str, Any]
) -> list[tuple[QLayerConfig, tuple[str, ...] | None]]:
    """The targets of mixed precision, each with the names that are given to it; None for any.

    Raises:
        ConfigError: they are of another form, or two of them compete.
    """
    configs = [algorithm for algorithm in algorithms if isinstance(algorithm, AutoMixprecisionConfig)]
    if not configs:
        return []
    entries = _entries(target_layers(configs[0].target_layer_config))
    given = [names for _, names in entries]
    named = list(chain.from_iterable(filter(None, given)))
    if len(configs) > 1 or not entries or len(named) > len(set(named)) or given.count(()) > 1:
        raise ConfigError(
            "AutoMixprecisionConfig: one config, with at least one target_layer_config, each node in one of them at "
            f"most, and one that maps to [] at most. Got {len(configs)} configs and targets for {entries}."
        )
    for layer, _ in entries:
        if not isinstance(layer, QLayerConfig):
            raise ConfigError(
                "AutoMixprecisionConfig.target_layer_config: expected a QLayerConfig, a list of them or "
                f"{{QLayerConfig: [node names]}}, got {layer!r}."
            )
    if value_of(options, "QuantizeBias"):
        return entries
    return [(replace(layer, bias=None), names) for layer, names in entries]


def _entries(target: Any) -> list[tuple[Any, tuple[str, ...] | None]]:
    """A target, several, or several with names, as pairs."""
    if isinstance(target, Mapping):
        return [(layer, tuple(names)) for layer, names in target.items()]
    return [(layer, None) for layer in (target if isinstance(target, (list, tuple)) else [target])]
