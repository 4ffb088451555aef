"""What a pass is, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Wanted = Callable[[str], bool]
"""Whether the linear layer of this full name is to be quantized."""

Pass = Callable[[nn.Module, Wanted], dict[str, nn.Module]]
"""Changes a model in place; returns the modules that it replaced, by name. It raises before it changes anything."""


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, requires_grad: bool) -> nn.Linear:
    """A linear layer around tensors that are there: nothing is allocated or initialised.

    Args:
        weight: (out_features, in_features).
        bias: (out_features,) or None; a parameter stays the same object.
        requires_grad: Of the new parameters.
    """
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad)
    if bias is not None:
        layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad)
    return layer
