"""The probabilities of attention, quantized.

    y = Q(softmax(q K^T)) V

transformers lets a model name the function that its attention modules call. A model that needs this one calls
"quark_eager": a function registered beside the others that quantizes what the quantizer of the module says, and leaves
the rest to the function it wraps. Nothing global is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.base.libraries.transformers import attention_of, names_attention, register_attention, set_attention
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.torch.config.selectors import NON_TEXT
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_view import quantize_caches
from quark.torch.layers.fake_quant import FakeQuantize, Mode

NAME = "quark_eager"
"""Of our function among those of transformers: probabilities exist in eager attention only."""
_PROBABILITIES = "prob_output_quantizer"
"""Child of an attention module; its scale is stored as `self_attn.prob_output_scale`."""


def quantize_attention(
    model: nn.Module, cached: Sequence[str], probabilities: Mapping[str, TensorSpec]
) -> Callable[[], None]:
    """Make the model's attention modules quantize what they store in a cache, and probabilities.

    Args:
        model: A transformers model, on any device.
        cached: Names of the quantized layers whose outputs are quantized as a cache holds them.
        probabilities: Name of an attention module -> spec of its probabilities.

    Returns:
        The function that undoes it.

    Raises:
        NotSupportedError: An attention module that calls no attention function by name, or takes no cache.
    """
    modules = {name: model.get_submodule(name) for name in probabilities}
    _require_interface(modules)
    forget_caches = quantize_caches(model, cached)
    for name, spec in probabilities.items():
        quantizer = FakeQuantize(spec)
        quantizer.mode = Mode.off  # until it has a scale
        modules[name].add_module(_PROBABILITIES, quantizer)
    restore = _call_ours(modules)

    def undo() -> None:
        restore()
        forget_caches()
        for name in probabilities:
            modules[name]._modules.pop(_PROBABILITIES, None)

    return undo


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the text model that are called attention, the innermost where they are nested."""
    named = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Attention")}
    return {
        name: module
        for name, module in named.items()
        if not any(other.startswith(f"{name}.") for other in named) and not NON_TEXT.search(name)
    }


def attention_quantizers(model: nn.Module, name: str = "") -> dict[str, FakeQuantize]:
    """Full name of the tensor ("...self_attn.prob_output") -> its quantizer: those that belong to no layer.

    Args:
        model: A model, or a module in it.
        name: The full name of that module.
    """
    quantizers = {}
    for parent, module in model.named_modules(prefix=name):
        for child, quantizer in () if isinstance(module, QuantLayer) else module._modules.items():
            if isinstance(quantizer, FakeQuantize):
                quantizers[f"{parent}.{child.removesuffix('_quantizer')}"] = quantizer
    return quantizers


def forget_ranges(module: nn.Module) -> None:
    """Let what acts inside attention wait for its range, as `quantize_attention` has made it."""
    for quantizer in attention_quantizers(module).values():
        quantizer.forget()
        quantizer.mode = Mode.off


def _require_interface(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        named = names_attention(getattr(module, "config", None))
        if not named or not hasattr(sys.modules[type(module).__module__], "eager_attention_forward"):
            raise NotSupportedError(
                f"{name or 'The model'} ({type(module).__name__}) does not call transformers' attention functions, in "
                "which probabilities are quantized. Possible: softmax_quant_spec=None."
            )


def _call_ours(modules: dict[str, nn.Module]) -> Callable[[], None]:
    """Let the configs of the modules name our function; return what undoes it."""
    configs: dict[int, Any] = {id(module.config): module.config for module in modules.values()}
    before = [(config, attention_of(config)) for config in configs.values()]
    for config, _ in before:
        register_attention(NAME, _attention)
        set_attention(config, NAME)

    def restore() -> None:
        for config, name in before:
            set_attention(config, name)

    return restore


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function as transformers calls it."""
    # Every modeling file has an eager function of its own: a soft cap or a sink may be part of it.
    function = sys.modules[type(module).__module__].eager_attention_forward
    output, weights = function(module, query, key, value, *args, **kwargs)
    quantizer = module._modules.get(_PROBABILITIES)
    if not isinstance(quantizer, FakeQuantize) or quantizer.mode is Mode.off:
        return output, weights
    if quantizer.mode is Mode.observe:
        _prove(module, weights, value, output)
    quantized = quantizer(weights)
    return _mixed(quantized, value), quantized


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
