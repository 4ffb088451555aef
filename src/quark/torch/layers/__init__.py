"""The layers that quark replaces. A new one is a file here and a line below."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quark.torch.layers.base import ROLES, QuantLayer
from quark.torch.layers.conv2d import QuantConv2d
from quark.torch.layers.conv_transpose2d import QuantConvTranspose2d
from quark.torch.layers.embedding import QuantEmbedding, embedding_class, lookup_factor
from quark.torch.layers.embedding_bag import QuantEmbeddingBag
from quark.torch.layers.linear import QuantLinear

_CLASSES: tuple[type[QuantLayer], ...] = (
    QuantLinear,
    QuantConv2d,
    QuantConvTranspose2d,
    QuantEmbedding,
    QuantEmbeddingBag,
)

LAYERS: dict[type[nn.Module], type[QuantLayer]] = {cls.float_class: cls for cls in _CLASSES}
"""Float class -> quantized class."""

ONLY_WHEN_NAMED: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
"""Layers that the global config leaves alone: a table lookup gains nothing from quantized activations, and a small
error in it reaches every layer. A name or type entry quantizes them."""


def layer_class(module: nn.Module) -> type[QuantLayer] | None:
    """The quantized class for a float module, or None. A subclass with a forward of its own is replaced if it is a
    linear layer (FalconLinear), or scales the rows of a table (Gemma); else what it computes is not known.
    """
    if isinstance(module, nn.Embedding) and not isinstance(module, QuantLayer):
        table: Any = type(module)
        return None if lookup_factor(module) is None else embedding_class(table, QuantEmbedding)
    for float_class, quantized in LAYERS.items():
        if isinstance(module, float_class) and not isinstance(module, QuantLayer):
            plain = type(module).forward is float_class.forward or _computes_linear(module)
            # MultiheadAttention reads this layer's weight without calling it.
            called = type(module) is not nn.modules.linear.NonDynamicallyQuantizableLinear
            return quantized if plain and called else None
    return None


def _computes_linear(module: nn.Module) -> bool:
    """Return True where a subclass of Linear computes x W^T + b: tried on a small copy, as weights may be on meta."""
    names = {name for name, parameter in module.named_parameters() if parameter is not None}
    if not isinstance(module, nn.Linear) or not names <= {"weight", "bias"} or any(True for _ in module.buffers()):
        return False
    small = copy.copy(module)
    # No random numbers: the user's generator stays where it is.
    values = torch.linspace(1, 7, 46, dtype=torch.float64, device="cpu").square().sin()
    x, weight = values[:30].view(2, 5, 3), values[30:42].view(4, 3)
    bias = values[42:] if "bias" in names else None
    small.__dict__.update(in_features=3, out_features=4, _forward_pre_hooks={}, _forward_hooks={})
    small._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.no_grad():
            return bool(torch.allclose(type(small).forward(small, x), nn.functional.linear(x, weight, bias), rtol=1e-9))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return False  # it reads something else


__all__ = ["LAYERS", "ONLY_WHEN_NAMED", "ROLES", "QuantLayer", "layer_class"]
