"""Folds BatchNormalization into the convolution or linear layer before it.

    f = gamma / sqrt(var + eps)        W' = W * f        b' = (b - mean) * f + beta

Computed in float64. Not folded: a layer whose output or whose weight anything else reads (its values would change
there), a norm without running statistics, and a linear layer on more than two axes (the norm is along another axis).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quark.torch.graph.operators import BATCH_NORM, is_call, kind_of, parameter_of

_FOLDS_INTO = ("conv1d", "conv2d", "conv_transpose2d", "linear")
_EPS_AT = 7


def fold_batch_norms(model: fx.GraphModule) -> int:
    """Fold every BatchNormalization that can be; return how many were. Parameters are replaced, never written to."""
    folded = 0
    for norm in list(model.graph.nodes):
        layer = foldable(norm)
        if layer is None:
            continue
        _fold(model, layer, norm)
        norm.replace_all_uses_with(layer)
        model.graph.erase_node(norm)
        folded += 1
    for node in reversed(list(model.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            model.graph.erase_node(node)
    model.delete_all_unused_submodules()
    return folded


def foldable(norm: fx.Node) -> fx.Node | None:
    """The layer that a BatchNormalization folds into, or None."""
    if not is_call(norm, BATCH_NORM) or any(parameter_of(norm, i) is None for i in (3, 4)):
        return None
    layer = norm.args[0]
    kind = kind_of(layer) if isinstance(layer, fx.Node) else None
    if kind is None or kind.name not in _FOLDS_INTO or len(layer.users) != 1:  # type: ignore[union-attr]
        return None
    weight = parameter_of(layer, 1)  # type: ignore[arg-type]
    if weight is None or len(weight.users) != 1:
        return None
    if len(layer.args) > 2 and layer.args[2] is not None and parameter_of(layer, 2) is None:  # type: ignore[union-attr,arg-type]
        return None
    return None if kind.name == "linear" and layer.meta["val"].ndim != 2 else layer  # type: ignore[union-attr,return-value]


def _fold(model: fx.GraphModule, layer: fx.Node, norm: fx.Node) -> None:
    gamma, beta, mean, variance = (_value(model, parameter_of(norm, i)) for i in (1, 2, 3, 4))
    factor = (1.0 if gamma is None else gamma) / torch.sqrt(variance + norm.args[_EPS_AT])
    weight_node, bias_node = parameter_of(layer, 1), parameter_of(layer, 2)
    assert weight_node is not None
    weight = attribute(model, str(weight_node.target))
    bias = _value(model, bias_node)
    shifted = ((0.0 if bias is None else bias) - mean) * factor + (0.0 if beta is None else beta)
    put(model, str(weight_node.target), _like(weight.double() * _along_outputs(factor, weight, layer), weight))
    stem = str(weight_node.target).removesuffix("weight")
    shared = bias_node is not None and len(bias_node.users) > 1
    name = f"{stem}folded_bias" if shared else f"{stem}bias" if bias_node is None else str(bias_node.target)
    put(model, name, _like(shifted, weight))
    if bias_node is None or shared:
        with model.graph.inserting_after(weight_node):
            bias_node = model.graph.get_attr(name)
        bias_node.meta["val"] = shifted
        layer.args = (*layer.args[:2], bias_node, *layer.args[3:])


def _along_outputs(factor: torch.Tensor, weight: torch.Tensor, layer: fx.Node) -> torch.Tensor:
    """The factors, shaped to multiply a weight along its output channels."""
    if kind_of(layer).name != "conv_transpose2d":  # type: ignore[union-attr]
        return factor.reshape(-1, *[1] * (weight.ndim - 1))
    # (in, out / groups, kH, kW): the rows of each group of inputs have the outputs of that group.
    groups = int(layer.args[6]) if len(layer.args) > 6 else 1  # type: ignore[arg-type]
    rows = factor.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
    return rows.reshape(*rows.shape, 1, 1)


def _value(model: fx.GraphModule, node: fx.Node | None) -> Any:
    return None if node is None else attribute(model, str(node.target)).detach().double()


def _like(value: torch.Tensor, weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().to(weight.dtype), weight.requires_grad)


def attribute(model: nn.Module, name: str) -> Any:
    """Return the attribute of a model at a dotted name."""
    parent, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(parent), leaf)


def put(model: nn.Module, name: str, value: nn.Parameter) -> None:
    """Set a parameter by its dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)
