"""Quantization of the key and value cache: which layers feed it, and the rules of its scales.

    scale_k = scale_v = max(scale_k, scale_v)     within one attention module, for the patterns of kv_cache_group
    scale   = max(scale, min_kv_scale)

The quantizer is the output quantizer of the layer that makes keys or values, so that its scale is stored as
`k_proj.output_scale`, which runtimes read. Before RoPE it acts there; with kv_cache_post_rope it acts in the attention
function instead (quark.torch.layers.attention), on what a cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from quark.core.granularity import PerTensor
from quark.core.patterns import first_match, matches_any, require_matches
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_tensor
from quark.torch.layers.base import QuantLayer
from quark.torch.layers.fake_quant import Extras, FakeQuantize

ELEMENTS = ("fp8_e4m3", "int8")
"""What a cache may hold."""


class CacheQuantize(FakeQuantize):
    """The quantizer of keys or values that acts in the attention function: its layer's output passes as it is."""

    def forward(self, x: torch.Tensor, extras: Extras | None = None) -> torch.Tensor:
        return x

    def cached(self, x: torch.Tensor) -> torch.Tensor:
        """What the cache gives back for x."""
        return super().forward(x)


def check_cache_config(config: QConfig) -> None:
    """Raise ConfigError for options of a cache that is not quantized, NotSupportedError for other kinds of specs."""
    if not config.kv_cache_quant_config:
        for name in ("kv_cache_group", "kv_cache_post_rope", "min_kv_scale"):
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
            raise ConfigError(f"{where} is None; it says how the cache is quantized, for one Int8PerTensorSpec().")
        require_static(spec, where, ELEMENTS)
    if config.softmax_quant_spec is not None:
        spec = lower_tensor(config.softmax_quant_spec)
        assert spec is not None
        require_static(spec, "softmax_quant_spec", (*ELEMENTS, "uint8"))


def require_static(spec: TensorSpec, where: str, elements: tuple[str, ...]) -> None:
    """Raise NotSupportedError unless the tensor has one calibrated scale and one of the element types."""
    plain = isinstance(spec.granularity, PerTensor) and not spec.dynamic and spec.scale_spec is spec.code_spec is None
    if not plain or spec.dtype.name not in elements or not (spec.symmetric or where == "softmax_quant_spec"):
        raise NotSupportedError(
            f"{where} is {spec}; runtimes know one static symmetric scale. Possible: {', '.join(elements)} per tensor."
        )


def with_cache(spec: LayerSpec, config: QConfig, name: str) -> LayerSpec:
    """The spec of a linear layer with the output that its place in the cache asks for."""
    cache = first_match(name, config.kv_cache_quant_config)
    return spec if cache is None else replace(spec, output=lower_tensor(cache.output_tensors))


def feeds_cache(config: QConfig, name: str) -> bool:
    """Whether the layer makes keys or values of a quantized cache."""
    return matches_any(name, config.kv_cache_quant_config)


def cached_after_rope(config: QConfig, layers: Mapping[str, QuantLayer]) -> dict[str, QuantLayer]:
    """The layers whose keys or values are quantized in the attention function, after RoPE."""
    if not config.kv_cache_post_rope:
        return {}
    return {name: layer for name, layer in layers.items() if feeds_cache(config, name)}


def require_cache_patterns(config: QConfig, layers: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for a pattern of the cache that matches no linear layer, or a group outside the cache."""
    linear = [name for name, module in layers.items() if isinstance(module, nn.Linear)]
    require_matches(config.kv_cache_quant_config, linear, "kv_cache_quant_config")
    require_matches(config.kv_cache_group, [name for name in linear if feeds_cache(config, name)], "kv_cache_group")


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


def holds(name: str) -> str:
    """What a layer of this name makes for the cache: "k", "v", or "kv" where one layer makes both."""
    leaf = re.sub(r"proj|query", "", name.rpartition(".")[2].lower())
    key, value = "k" in leaf, "v" in leaf
    return "kv" if key == value else "k" if key else "v"
