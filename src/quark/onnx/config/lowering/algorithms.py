"""Lowering of the algorithms: those of `algo_config`, and those that extra options or legacy flags ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

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
    asked = _asked(options, flags)
    kept = [_merged(algorithm, options) for algorithm in given]
    classes = {type(algorithm) for algorithm in kept}
    return (*(algorithm for algorithm in asked if type(algorithm) not in classes), *kept)


def _asked(options: Mapping[str, Any], flags: Mapping[str, bool]) -> list[AlgoConfig]:
    found: list[AlgoConfig] = []
    for kind, flag in ((CLEConfig, ""), (SmoothQuantConfig, "include_sq"), (QuarotConfig, "include_rotation")):
        changed = {key: options[key] for key in kind.keys.values() if _changed(options, key)}
        if flags.get(flag) or (changed and not (kind is CLEConfig and flags.get("include_cle") is False)):
            found.append(kind.from_options(changed))
    if value_of(options, "BiasCorrection"):
        found.append(BiasCorrectionConfig())
    nbits = value_of(options, "UseMatMulNBits") and value_of(options, "MatMulNBitsParams").get("Algorithm") == "GPTQ"
    if value_of(options, "UseGPTQ") or nbits:
        found.append(GPTQConfig.from_options(value_of(options, "GPTQParams")))
    if flags.get("include_fast_ft", bool(value_of(options, "FastFinetune"))):
        found.append(_finetune(value_of(options, "FastFinetune")))
    if flags.get("include_auto_mp", bool(value_of(options, "AutoMixprecision"))):
        found.append(AutoMixprecisionConfig.from_options(value_of(options, "AutoMixprecision")))
    return found


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
    target = target_layers(configs[0].target_layer_config)
    if isinstance(target, Mapping):
        entries: list[tuple[Any, Any]] = [(own, tuple(names)) for own, names in target.items()]
    else:
        entries = [(own, None) for own in (target if isinstance(target, (list, tuple)) else [target])]
    named = [name for _, names in entries for name in names or ()]
    if len(configs) > 1 or not entries or len(named) > len(set(named)) or [names for _, names in entries].count(()) > 1:
        raise ConfigError(
            "AutoMixprecisionConfig: one config, with at least one target_layer_config, each node in one of them at "
            f"most, and one that maps to [] at most. Got {len(configs)} configs and targets for {entries}."
        )
    for own, _ in entries:
        if not isinstance(own, QLayerConfig):
            raise ConfigError(
                "AutoMixprecisionConfig.target_layer_config: expected a QLayerConfig, a list of them or "
                f"{{QLayerConfig: [node names]}}, got {own!r}."
            )
    if value_of(options, "QuantizeBias"):
        return entries
    return [(replace(own, bias=None), names) for own, names in entries]


def _changed(options: Mapping[str, Any], key: str) -> bool:
    return key in options and options[key] != OPTIONS[key].default
