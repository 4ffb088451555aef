"""Quantized layers in the place of float ones: finds them in a model, and puts them there."""

from __future__ import annotations

from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import ConfigError
from quark.torch.layers import QuantLayer, layer_class


def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """Full name -> quantized layer.

    Raises:
        ConfigError: Layers hold their codes in the layout of a kernel, which only `accelerate` knows to undo.
    """
    refuse_packed(model)
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def refuse_packed(model: nn.Module) -> None:
    """Raise ConfigError where layers hold their codes in the layout of a kernel."""
    if any(getattr(module, "is_packed", False) for module in model.modules()):
        raise ConfigError(
            "The layers of this model were packed for the kernels of this machine by accelerate. Possible: "
            "disable_native_inference(model), which makes frozen layers of them, and then this."
        )


def replace_layer(model: nn.Module, name: str, spec: LayerSpec) -> QuantLayer:
    """Put a quantized layer, which shares the parameters of the float one, where the layer of that name is."""
    module = model.get_submodule(name)
    quantized = layer_class(module)
    assert quantized is not None, f"{name}: {type(module).__name__} has no quantized class"
    layer = quantized.from_float(module, spec)
    set_submodule(model, name, layer)
    parents = [model.get_submodule(".".join(name.split(".")[:depth])) for depth in range(name.count(".") + 1)]
    if any(isinstance(parent, nn.TransformerEncoderLayer) for parent in parents):
        # In inference torch reads the weights in it itself, past the quantizers, unless a module in it has a hook.
        layer.register_forward_pre_hook(_be_called)
    return layer


def _be_called(module: nn.Module, inputs: object) -> None:
    """A hook that does nothing."""


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
