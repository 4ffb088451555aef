"""Quantization of the key and value cache: which layers feed it, and the rules of its scales.

    scale_k = scale_v = max(scale_k, scale_v)     within one attention module, for the patterns of kv_cache_group
    scale   = max(scale, min_kv_scale)

One scale for keys and one for values, or one for each of their heads (`HEADS`).

The quantizer is the output quantizer of the layer that makes keys or values, so that its scale is stored as
`k_proj.output_scale`, which runtimes read. It acts on what a cache holds (`cache_view`); with kv_cache_post_rope=False,
on what the layer gives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quark.base.libraries.transformers import LATENT, caches_latents, transformers_version
from quark.core.granularity import HEADS, PerTensor
from quark.core.names.patterns import first_match, matches, matches_any, require_matches
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_tensor
from quark.torch.layers.attention.cache_view import ARGUMENTS, cache_owner, feeding_layers
from quark.torch.layers.attention.heads import is_latent
from quark.torch.layers.base import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize

ELEMENTS = ("fp8_e4m3", "int8")
"""The element types that a cache may have."""


def check_cache_config(config: QConfig) -> None:
    """Raise ConfigError for options of a cache that is not quantized, NotSupportedError for other kinds of specs."""
    if not config.kv_cache_quant_config:
        for name in ("kv_cache_group", "min_kv_scale"):
            if getattr(config, name):
                raise ConfigError(
                    f"QConfig.{name} has no meaning without kv_cache_quant_config: no cache is quantized."
                )
    if config.min_kv_scale < 0:
        raise ConfigError(f"QConfig.min_kv_scale must not be negative, got {config.min_kv_scale}.")
    for pattern, layer in config.kv_cache_quant_config.items():
        where = f"kv_cache_quant_config[{pattern!r}].output_tensors"
        spec = lower_tensor(layer.output_tensors)
        if spec is None:
            raise ConfigError(
                f"{where} is None. It must say how the cache is quantized, for example Int8PerTensorSpec()."
            )
        by_head = spec.granularity == HEADS
        if by_head and not config.kv_cache_post_rope:
            raise NotSupportedError(
                f"{where} has a scale for each head, which what a layer gives has not. Possible: "
                "kv_cache_post_rope=True, which quantizes what a cache stores; or one scale for the tensor."
            )
        _require_static(replace(spec, granularity=PerTensor()) if by_head else spec, where, ELEMENTS)
    if config.softmax_quant_spec is not None:
        spec = lower_tensor(config.softmax_quant_spec)
        assert spec is not None
        _require_static(spec, "softmax_quant_spec", (*ELEMENTS, "uint8"))


def _require_static(spec: TensorSpec, where: str, elements: tuple[str, ...]) -> None:
    """Raise NotSupportedError unless the tensor has one calibrated scale and one of the element types."""
    plain = isinstance(spec.granularity, PerTensor) and not spec.dynamic and spec.scale_spec is spec.code_spec is None
    if not plain or spec.dtype.name not in elements or not (spec.symmetric or where == "softmax_quant_spec"):
        heads = "" if where == "softmax_quant_spec" else ", or with a scale for each head (per channel, ch_axis=-3)"
        raise NotSupportedError(
            f"{where} is {spec}; runtimes know one static symmetric scale. Possible: {', '.join(elements)} per tensor"
            f"{heads}."
        )


def with_cache(spec: LayerSpec, config: QConfig, name: str, feeding: Container[str]) -> LayerSpec:
    """The spec of a linear layer with the output that its place in the cache asks for.

    Args:
        spec: What the config says of the layer otherwise.
        config: Of the model.
        name: Of the layer.
        feeding: From `cache_feeding`.
    """
    cache = first_match(name, config.kv_cache_quant_config)
    if cache is None:
        return spec
    # The patterns of the cache stand among those of layers, too, where readers of checkpoints look for them.
    return replace(spec, output=lower_tensor(cache.output_tensors) if name in feeding else None)


def feeds_cache(config: QConfig, name: str) -> bool:
    """Return True where the config names the layer as one that makes keys or values of a quantized cache."""
    return matches_any(name, config.kv_cache_quant_config)


def named_layers(config: QConfig, names: Iterable[str]) -> list[str]:
    """Those of the names that the config means as layers that make keys or values of a quantized cache.

    A pattern "*k_proj" is about the whole part of a name: in a module that has a `k_proj`, it does not mean `sink_proj`
    or `relative_k_proj`.
    """
    matched = {name: next(p for p in config.kv_cache_quant_config if matches(name, p))
               for name in names if feeds_cache(config, name)}  # fmt: skip
    return [name for name, pattern in matched.items() if not _only_ends_so(name, pattern, matched)]


def _only_ends_so(name: str, pattern: str, matched: Container[str]) -> bool:
    """Return True where a name ends in the middle of a part as a pattern does, beside a layer of just that name."""
    called = pattern.removeprefix("*")
    if called == pattern or f".{name}".endswith(f".{called.lstrip('.')}"):
        return False
    parent = name.rsplit(".", called.count(".") + 1)[0]
    return f"{parent}.{called}" in matched


def cache_feeding(config: QConfig, model: nn.Module) -> frozenset[str]:
    """The layers whose output quantizers are those of a cache: of those that the config names, the ones whose keys or
    values a model stores. Before RoPE, all.
    """
    if not config.kv_cache_quant_config:
        return frozenset()
    named = named_layers(config, [name for name, _ in model.named_modules()])
    return feeding_layers(model, named) if config.kv_cache_post_rope else frozenset(named)


def cached_layers(config: QConfig, layers: Mapping[str, QuantLayer]) -> list[str]:
    """The quantized layers whose quantizer acts on the way into a cache."""
    if not config.kv_cache_post_rope:
        return []
    return [name for name, layer in layers.items() if feeds_cache(config, name) and layer.quantizer("output")]


def require_cache_patterns(config: QConfig, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise for a pattern of the cache that stands for no layer of a cache.

    Args:
        config: Of the model.
        model: The model.
        layers: Its layers that can be quantized, by their names.

    Raises:
        ConfigError: It matches no linear layer or none whose keys or values are stored, or a group lies outside.
        NotSupportedError: It matches layers only whose modules take no cache, or one that holds other tensors here
            than in runtimes.
    """
    linear = [name for name, module in layers.items() if isinstance(module, nn.Linear)]
    # A cache that stays in float would be another result than the one that was asked for.
    require_matches(config.kv_cache_quant_config, linear, "kv_cache_quant_config", strict=True)
    feeds = [name for name in linear if feeds_cache(config, name)]
    require_matches(config.kv_cache_group, feeds, "kv_cache_group", strict=True)
    feeding, modules = cache_feeding(config, model), dict(model.named_modules())
    if config.kv_cache_post_rope and not caches_latents():
        _refuse_latent(model, modules, feeding)
    for pattern in config.kv_cache_quant_config:
        matched = [name for name in linear if matches(name, pattern)]
        if any(name in feeding for name in matched):
            continue
        if all(cache_owner(modules, name) is None for name in matched):
            parent = type(modules[matched[0].rpartition(".")[0]]).__name__
            raise NotSupportedError(
                f"kv_cache_quant_config: {matched[0]} is in a {parent}, whose forward takes no cache "
                f"({', '.join(ARGUMENTS)}). Possible: kv_cache_post_rope=False, which quantizes what the layer gives."
            )
        raise ConfigError(
            f"kv_cache_quant_config: {pattern!r} matches layers of encoders only ({matched[0]}), whose keys and values "
            "are in no cache. Possible: the names of a decoder's layers."
        )


def _refuse_latent(model: nn.Module, modules: Mapping[str, nn.Module], feeding: Iterable[str]) -> None:
    """Raise NotSupportedError for a layer of latent attention, whose scales would be those of other tensors."""
    find_text: Any = getattr(getattr(model, "config", None), "get_text_config", None)
    text = find_text(decoder=True) if find_text else None
    for name in sorted(feeding):
        owner = cache_owner(modules, name)
        if owner is not None and is_latent(modules[owner], name.removeprefix(f"{owner}."), text):
            raise NotSupportedError(
                f"kv_cache_quant_config: {name} is of latent attention, whose caches in transformers "
                f"{transformers_version()} hold keys and values, and in runtimes what these are made of: their scales "
                f"differ. Possible: transformers {LATENT} or newer; kv_cache_post_rope=False; or quant_mode "
                "fx_graph_mode."
            )


def share_cache_ranges(config: QConfig, quantizers: Mapping[str, FakeQuantize]) -> None:
    """Give the members of `kv_cache_group` in one attention module the range that covers all of them.

    Args:
        config: Of the model.
        quantizers: Full name of the tensor ("...k_proj.output") -> its quantizer, which has observed.
    """
    families: dict[str, list[FakeQuantize]] = {}
    for name, quantizer in quantizers.items():
        layer, _, role = name.rpartition(".")
        if role == "output" and feeds_cache(config, layer) and matches_any(layer, config.kv_cache_group):
            families.setdefault(layer.rpartition(".")[0], []).append(quantizer)
    for members in families.values():
        FakeQuantize.share_observed(members)


def floor_cache_scales(config: QConfig, quantizers: Mapping[str, FakeQuantize]) -> None:
    """Raise the scales of the cache to `min_kv_scale`; they are symmetric, so no zero point changes."""
    for name, quantizer in quantizers.items():
        layer, _, role = name.rpartition(".")
        if role == "output" and feeds_cache(config, layer) and quantizer.scale is not None:
            quantizer.scale = quantizer.scale.clamp(min=config.min_kv_scale)
