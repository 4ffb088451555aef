"""A quantized model becomes a float one, with the values that its codes stand for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.layers import ROLES
from quark.torch.layers.base import EXTRA_SUFFIXES, take_over_forward
from quark.torch.layers.low_rank import undo_branch
from quark.torch.layers.replace import quantized_layers, set_submodule
from quark.torch.model.blocks.offloading import with_weights

_NOTED = (
    "quant_config",
    "quant_plan",
    "quark_quantized",
    "quant_format",
    "save_pretrained",
    "hf_quantizer",
    "decoded_layers",
)
"""Attributes that loading and quantizing leave on a model."""


@with_weights
def dequantize_layers(model: nn.Module) -> nn.Module:
    """Put float layers in the place of quantized ones, in place; inputs are no longer quantized either.

    Raises:
        NotSupportedError: A layer whose output is quantized, as for a KV cache, or whose input is rotated.
    """
    layers = quantized_layers(model)
    for name, layer in layers.items():
        if layer.spec.output is not None or any("rotation" in buffer for buffer, _ in layer.named_buffers()):
            raise NotSupportedError(
                f"{name}: models whose outputs, KV cache or rotated inputs are quantized cannot be made float again."
            )
    with torch.no_grad():
        for name, layer in layers.items():
            weight, bias = layer.quantized("weight", layer.weight).clone(), layer.quantized_bias()  # type: ignore[arg-type]
            module: nn.Module = layer.float_class.__new__(layer.float_class)
            module.__dict__.update({key: copy.copy(value) for key, value in layer.__dict__.items() if key != "spec"})
            for role in ROLES:
                del module._modules[f"{role}_quantizer"]
                for suffix in EXTRA_SUFFIXES:
                    module._buffers.pop(f"{role}_{suffix}", None)
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                module._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
            take_over_forward(module, layer)
            undo_branch(module)
            set_submodule(model, name, module)
    for noted in _NOTED:
        model.__dict__.pop(noted, None)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.__dict__.pop("quantization_config", None)
    return model
