"""The layers that quark replaces. A new one is a file here and a line below."""

from __future__ import annotations

from torch import nn

from quark.torch.layers.base import ROLES, QuantLayer
from quark.torch.layers.conv2d import QuantConv2d
from quark.torch.layers.conv_transpose2d import QuantConvTranspose2d
from quark.torch.layers.embedding import QuantEmbedding
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
    """The quantized class for a float module, or None. A subclass with a forward of its own is not replaced: what
    it computes is not known.
    """
    for float_class, quantized in LAYERS.items():
        if isinstance(module, float_class) and not isinstance(module, QuantLayer):
            plain = type(module).forward is float_class.forward
            # MultiheadAttention reads this layer's weight without calling it.
            called = type(module) is not nn.modules.linear.NonDynamicallyQuantizableLinear
            return quantized if plain and called else None
    return None


__all__ = ["LAYERS", "ONLY_WHEN_NAMED", "ROLES", "QuantLayer", "layer_class"]
