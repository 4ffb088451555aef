"""Conv1D of transformers (GPT-2) to nn.Linear: y = x W + b with W (in, out) is a linear layer of weight W^T."""

from __future__ import annotations

from torch import nn

from quark.base.libraries.transformers import is_conv1d
from quark.torch.layers.replace import set_submodule
from quark.torch.model.passes.base import Wanted, linear_of


def conv1d_to_linear(model: nn.Module, wanted: Wanted) -> dict[str, nn.Module]:
    """Replace the Conv1D layers that are to be quantized; the weights are views of the old ones."""
    layers = {name: module for name, module in model.named_modules() if is_conv1d(module) and wanted(name)}
    for name, layer in layers.items():
        set_submodule(model, name, as_linear(layer))
    return layers


def as_linear(conv: nn.Module) -> nn.Linear:
    """The linear layer of a Conv1D; its weight is a view."""
    weight, bias = conv.weight, conv.bias
    assert isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter)
    linear = linear_of(weight.detach().t(), bias, weight.requires_grad).train(conv.training)
    linear.stands_for = type(conv).__name__  # type: ignore[assignment]
    return linear
