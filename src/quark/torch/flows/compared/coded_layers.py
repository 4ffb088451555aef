"""The layers of a model whose weights come from codes, and the values that they compute with."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch.layers import QuantLayer
from quark.torch.layers.replace import quantized_layers


def coded_layers(model: Any) -> dict[str, Any]:
    """Layers whose weights come from codes, by name: quantized ones, or float ones that were decoded when loaded."""
    return quantized_layers(model) or {name: model.get_submodule(name) for name in getattr(model, "decoded_layers", ())}


def decoded_weight(layer: Any) -> Any:
    """The values that a layer of `coded_layers` computes with."""
    return layer.quantized_weight() if isinstance(layer, QuantLayer) else layer.weight


def unrotated_weight(layer: Any) -> Any:
    """The values that a layer computes with, as they are without the rotation of its input that runs with the model."""
    rotation, decoded = getattr(layer, "online_rotation", None), decoded_weight(layer)
    return decoded if rotation is None else rotation.undo(decoded.float())


def rotated_input(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """An input of a layer as its quantizer reads it: rotated, where that runs with the model."""
    rotation = getattr(layer, "online_rotation", None)
    return x if rotation is None else rotation.apply(x)
