"""A quantized model becomes a float one, with the values that its codes stand for."""

from __future__ import annotations

import copy

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.layers import ROLES, QuantLayer
from quark.torch.layers.base import EXTRA_SUFFIXES, take_over_forward
from quark.torch.layers.low_rank import undo_branch
from quark.torch.layers.replace import quantized_layers, set_submodule
from quark.torch.layers.stored_codes.model import forget_answers
from quark.torch.model.blocks.offloading import with_weights

_NOTED = (
    "quant_config",
    "quant_plan",
    "quark_quantized",
    "quant_format",
    "save_pretrained",
    "hf_quantizer",
    "decoded_layers",
    "dequantize",
    "quantization_method",
    "is_quantized",
)
"""Attributes that loading and quantizing leave on a model."""


@with_weights
def dequantize(model: nn.Module) -> nn.Module:
    """Put float layers in the place of quantized ones, in place; inputs are no longer quantized either.

    Args:
        model: Loaded from a quantized folder, or quantized in this session, frozen or not. Adapters of PEFT on it stay,
            and are then on float layers.

    Returns:
        The same model. Its layers are those of the float model, with the values that the codes stand for, in the dtype
        that the model computes in.

    Raises:
        ConfigError: The layers were packed by `accelerate`.
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
            set_submodule(model, name, _float_layer(layer))
    for module in model.modules():  # adapters of PEFT may stand around the model that was loaded
        _forget_notes(module)
    return model


def _float_layer(layer: QuantLayer) -> nn.Module:
    """The layer of the float class, which shares hooks and flags with a quantized one."""
    values = {"weight": layer.quantized_weight().clone(), "bias": layer.quantized_bias()}
    module: nn.Module = layer.float_class.__new__(layer.float_class)
    module.__dict__.update({key: copy.copy(value) for key, value in layer.__dict__.items() if key != "spec"})
    for role in ROLES:
        del module._modules[f"{role}_quantizer"]
        for suffix in EXTRA_SUFFIXES:
            module._buffers.pop(f"{role}_{suffix}", None)
    for leaf, value in values.items():
        module._buffers.pop(leaf, None)  # where codes lie that are no parameters
        module._parameters[leaf] = None if value is None else nn.Parameter(value)
    take_over_forward(module, layer)
    undo_branch(module)
    return module


def _forget_notes(module: nn.Module) -> None:
    """Take from a module, and from its config, what says that it is quantized."""
    for noted in _NOTED:
        module.__dict__.pop(noted, None)
    forget_answers(module)
    fields = getattr(module.__dict__.get("config"), "__dict__", {})
    for field in ("quantization_config", "_is_quantized"):
        fields.pop(field, None)
    stored = module.__dict__.get("_internal_dict")  # the config of a network of diffusers
    if isinstance(stored, dict) and "quantization_config" in stored:
        left = {name: value for name, value in stored.items() if name != "quantization_config"}
        module.__dict__["_internal_dict"] = type(stored)(left)
