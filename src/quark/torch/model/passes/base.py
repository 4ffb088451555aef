"""The form of a pass, and common parts of several of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Wanted = Callable[[str], bool]
"""A function that returns True where the linear layer of a full name is to be quantized."""

Pass = Callable[[nn.Module, Wanted], dict[str, nn.Module]]
"""Changes a model in place; returns the modules that it replaced, by name. It raises before it changes anything."""


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, requires_grad: bool) -> nn.Linear:
    """A linear layer around tensors that are there: nothing is allocated or initialised.

    Args:
        weight: (out_features, in_features).
        bias: (out_features,) or None; a parameter stays the same object.
        requires_grad: Of the new parameters.
    """
    layer = nn.Linear.__new__(nn.Linear)  # its own would draw a weight: half of the time of a plan of ten thousand
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad)
    own = bias is None or isinstance(bias, nn.Parameter)
    layer.register_parameter("bias", bias if own else nn.Parameter(bias, requires_grad))  # type: ignore[arg-type]
    return layer
