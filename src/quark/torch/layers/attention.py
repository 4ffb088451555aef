"""Quantization inside attention: keys and values after RoPE, and the probabilities.

    y = Q(softmax(q K^T)) V    with K, V = Q(K), Q(V) where the cache is quantized after RoPE

transformers lets a model name the function that its attention modules call. A model that needs one of these calls
"quark_eager", "quark_sdpa", ...: a function registered beside the others that quantizes what the quantizers of the
module say and leaves the rest to the function it wraps. Nothing global is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quark.core.patterns import matches_any
from quark.errors import NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_tensor
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.kv_cache import CacheQuantize, feeds_cache, holds

PREFIX = "quark_"
PROBABILITIES = "prob_output_quantizer"
"""Child of an attention module; its scale is stored as `self_attn.prob_output_scale`."""


def quantize_attention(
    model: nn.Module, config: QConfig, layers: Mapping[str, QuantLayer], attention: Mapping[str, nn.Module]
) -> Callable[[], None]:
    """Make the model's attention modules quantize what the config asks for.

    Args:
        model: A transformers model, on any device.
        config: Of the model.
        layers: Its quantized layers by name; those that feed the cache have an output quantizer.
        attention: Its attention modules by name.

    Returns:
        The function that undoes it.

    Raises:
        NotSupportedError: An attention module that calls no attention function by name, or none at all.
    """
    cached = {n: layer for n, layer in layers.items() if config.kv_cache_post_rope and feeds_cache(config, n)}
    weighed: dict[str, nn.Module] = {}
    if config.softmax_quant_spec is not None:
        patterns = [pattern for pattern in config.exclude if not pattern.startswith("@")]
        weighed = {n: m for n, m in attention.items() if not matches_any(n, patterns)}
        if not weighed:
            raise NotSupportedError(f"softmax_quant_spec: {type(model).__name__} has no attention module.")
    parents = {name.rpartition(".")[0] for name in cached}
    places = weighed | {name: model.get_submodule(name) for name in sorted(parents)}
    _require_interface(places)
    for layer in cached.values():
        quantizer = layer.quantizer("output")
        assert isinstance(quantizer, FakeQuantize)
        quantizer.__class__ = CacheQuantize
    spec = lower_tensor(config.softmax_quant_spec)
    for module in weighed.values():
        assert spec is not None
        quantizer = FakeQuantize(spec)
        quantizer.mode = Mode.off  # until it has a scale
        module.add_module(PROBABILITIES, quantizer)
    restore = _call_ours(places, eager=bool(weighed))

    def undo() -> None:
        restore()
        for module in weighed.values():
            module._modules.pop(PROBABILITIES, None)

    return undo


def probability_quantizers(model: nn.Module) -> dict[str, FakeQuantize]:
    """Full name of the tensor ("...self_attn.prob_output") -> the quantizer of the probabilities."""
    quantizers = {}
    for name, module in model.named_modules():
        quantizer = module._modules.get(PROBABILITIES)
        if isinstance(quantizer, FakeQuantize):
            quantizers[f"{name}.prob_output"] = quantizer
    return quantizers


def _require_interface(places: dict[str, nn.Module]) -> None:
    for name, module in places.items():
        named = hasattr(getattr(module, "config", None), "_attn_implementation")
        if not named or not hasattr(sys.modules[type(module).__module__], "eager_attention_forward"):
            raise NotSupportedError(
                f"{name or 'The model'} ({type(module).__name__}) does not call transformers' attention functions, in "
                "which keys after RoPE and probabilities are quantized. Possible: kv_cache_post_rope=False, "
                "softmax_quant_spec=None."
            )


def _call_ours(places: dict[str, nn.Module], eager: bool) -> Callable[[], None]:
    """Let the configs of the modules name our function; return what undoes it."""
    configs: dict[int, Any] = {id(module.config): module.config for module in places.values()}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in before:
        base = "eager" if eager else (name or "eager").removeprefix(PREFIX)
        config._attn_implementation = _registered(base)

    def restore() -> None:
        for config, name in before:
            config._attn_implementation = name

    return restore


def _registered(base: str) -> str:
    """The name of our function around the attention function `base`."""
    modeling, masking = sys.modules["transformers.modeling_utils"], sys.modules["transformers.masking_utils"]
    functions, masks = modeling.ALL_ATTENTION_FUNCTIONS, masking.ALL_MASK_ATTENTION_FUNCTIONS
    name = PREFIX + base
    if name not in functions:
        functions.register(name, _attention_function(base, functions))
        masks.register(name, masks[base])
    return name


def _attention_function(base: str, functions: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        key, value = _cached(module, key, value)
        # Every modeling file has an eager function of its own: a soft cap or a sink may be part of it.
        function = functions[base] if base != "eager" else sys.modules[type(module).__module__].eager_attention_forward
        output, weights = function(module, query, key, value, *args, **kwargs)
        quantizer = module._modules.get(PROBABILITIES)
        if not isinstance(quantizer, FakeQuantize) or quantizer.mode is Mode.off:
            return output, weights
        if quantizer.mode is Mode.observe:
            _prove(module, weights, value, output)
        quantized = quantizer(weights)
        return _mixed(quantized, value), quantized

    return attention


def _cached(module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a quantized cache holds them; a static scale makes twice quantized once quantized."""
    for name, layer in module.named_children():
        quantizer = layer.quantizer("output") if isinstance(layer, QuantLayer) else None
        if isinstance(quantizer, CacheQuantize):
            key = quantizer.cached(key) if "k" in holds(name) else key
            value = quantizer.cached(value) if "v" in holds(name) else value
    return key, value


def _mixed(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The output of attention: weights (batch, heads, queries, keys), value (batch, key-value heads, keys, size)."""
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    return torch.matmul(weights.to(value.dtype), value).transpose(1, 2).contiguous()


def _prove(module: nn.Module, weights: torch.Tensor | None, value: torch.Tensor, output: torch.Tensor) -> None:
    """Raise NotSupportedError unless the output is the probabilities times the values."""
    if weights is None or weights.ndim != 4:
        raise NotSupportedError(f"{type(module).__name__} gives no attention probabilities that could be quantized.")
    ours = _mixed(weights, value)
    tolerance = 4 * torch.finfo(output.dtype).eps * value.shape[-2]
    if ours.shape != output.shape or (ours - output).abs().max() > tolerance * value.abs().max():
        raise NotSupportedError(
            f"{type(module).__name__}: its output is not its attention probabilities times the values, so that "
            "they cannot be quantized from outside. Possible: exclude the module, or attention_scheme=None."
        )
