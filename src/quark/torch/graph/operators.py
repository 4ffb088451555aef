"""The aten operators that graph mode knows, as tables. A new operator is a row.

An operator is quantized (_OPERATOR_KINDS), or moves values without changing them (MOVING_OPERATORS), or is fused into
the one before it (ACTIVATIONS); whatever else computes stays in float, and the plan names it.

Operators that write into their input (`x += y`, ReLU(inplace=True)) are replaced by those that return a new tensor.
Every later reader of the input reads the result instead. An input that others see by another name (an argument or
buffer of the model, a view, a tensor with views) stays written in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn


@dataclass(frozen=True)
class Kind:
    """How an operator is quantized; positions count its arguments.

    Attributes:
        name: Of the operator in tables and messages.
        module: Class of torch.nn that `layer_type_quant_config` means it by.
        inputs: Positions of the activations; a list of tensors counts as all of its members.
        weight, bias: Positions of the parameters.
        same_scale: What shares one scale: "inputs", "all" (inputs and output), or None.
        only_named: Whether the global config leaves it alone. A table lookup gains nothing; products, differences
            and means are the inside of norms and gates, which lose more than they gain.
        integer_output: Whether runtimes gain by an output in integers; that of a linear layer stays in float.
        follows: Whether the global config quantizes it only after such outputs; see `followers`.
    """

    name: str
    module: type[nn.Module] | None = None
    inputs: tuple[int, ...] = (0,)
    weight: int | None = None
    bias: int | None = None
    same_scale: str | None = None
    only_named: bool = False
    integer_output: bool = False
    follows: bool = False


_OPERATOR_KINDS: dict[str, Kind] = {
    "aten.linear.default": Kind("linear", nn.Linear, weight=1, bias=2),
    "aten.conv1d.default": Kind("conv1d", nn.Conv1d, weight=1, bias=2, integer_output=True),
    "aten.conv2d.default": Kind("conv2d", nn.Conv2d, weight=1, bias=2, integer_output=True),
    "aten.conv2d.padding": Kind("conv2d", nn.Conv2d, weight=1, bias=2, integer_output=True),
    "aten.conv_transpose2d.input": Kind("conv_transpose2d", nn.ConvTranspose2d, weight=1, bias=2, integer_output=True),
    "aten.embedding.default": Kind("embedding", nn.Embedding, inputs=(), weight=0, only_named=True),
    "aten.matmul.default": Kind("matmul", inputs=(0, 1)),
    "aten.bmm.default": Kind("matmul", inputs=(0, 1)),
    "aten.add.Tensor": Kind("add", inputs=(0, 1), same_scale="inputs", follows=True),
    "aten.sub.Tensor": Kind("sub", inputs=(0, 1), same_scale="inputs", only_named=True),
    "aten.mul.Tensor": Kind("mul", inputs=(0, 1), only_named=True),
    "aten.cat.default": Kind("cat", same_scale="all", follows=True),
    "aten.stack.default": Kind("stack", same_scale="all", follows=True),
    "aten.max_pool2d.default": Kind("max_pool2d", nn.MaxPool2d, same_scale="all", follows=True),
    "aten.avg_pool2d.default": Kind("avg_pool2d", nn.AvgPool2d, same_scale="all", follows=True),
    "aten.adaptive_avg_pool2d.default": Kind(
        "adaptive_avg_pool2d", nn.AdaptiveAvgPool2d, same_scale="all", follows=True
    ),
    "aten.mean.dim": Kind("mean", same_scale="all", only_named=True),
    "aten.upsample_nearest2d.vec": Kind("upsample", nn.Upsample, same_scale="all", follows=True),
}

_MOVING = (
    *("flatten.using_ints", "view.default", "reshape.default", "unflatten.int", "permute.default", "transpose.int"),
    *("t.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int"),
    *("expand.default", "contiguous.default", "clone.default", "detach.default", "alias.default", "dropout.default"),
    *("pixel_shuffle.default", "pixel_unshuffle.default"),
)
MOVING_OPERATORS = frozenset(f"aten.{name}" for name in _MOVING)
"""Operators whose output holds values of their first argument: one scale serves both sides."""

ACTIVATIONS = frozenset(f"aten.{name}.default" for name in ("relu", "relu6", "hardtanh", "clamp"))
"""Operators that a runtime fuses into the one before them: an output is quantized after them."""

SOFTMAX = ("aten.softmax.int", "aten._softmax.default")
BATCH_NORM, DROPOUT = "aten.batch_norm.default", "aten.dropout.default"
QUANT_STUB, DEQUANT_STUB = "quark_quant.QuantStub.default", "quark_quant.DeQuantStub.default"


def target_name(node: fx.Node) -> str:
    """Name of what a node calls, such as "aten.conv2d.default"."""
    return str(node.target)


def kind_of(node: fx.Node) -> Kind | None:
    """The row of a node, or None where it is not quantized."""
    return _OPERATOR_KINDS.get(target_name(node)) if node.op == "call_function" else None


def is_call(node: object, *targets: str) -> bool:
    """Return True where a node calls one of the operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) in targets


def parameter_of(node: fx.Node, position: int | None) -> fx.Node | None:
    """The get_attr node at a position of the arguments, or None."""
    argument = node.args[position] if position is not None and position < len(node.args) else None
    return argument if isinstance(argument, fx.Node) and argument.op == "get_attr" else None


def activations_of(node: fx.Node) -> list[fx.Node]:
    """The float tensors that a quantized operator reads as activations; a weight that is computed is one of them."""
    kind = kind_of(node)
    assert kind is not None
    positions = [*kind.inputs]
    if kind.weight is not None and parameter_of(node, kind.weight) is None:
        positions.append(kind.weight)
    tensors: list[fx.Node] = []
    for value in (node.args[position] for position in positions):
        members = value if isinstance(value, (list, tuple)) else [value]
        tensors += [m for m in members if isinstance(m, fx.Node) and is_float(m)]
    return tensors


def is_float(node: fx.Node) -> bool:
    """Return True where a node gives a floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def source_of(node: fx.Node) -> fx.Node:
    """Where the values of a tensor come from: back through the operators that only move them."""
    while is_call(node, *MOVING_OPERATORS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def fused_end(node: fx.Node) -> fx.Node:
    """Where the output of an operator is quantized: after the activation that alone reads it."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and is_call(readers[0], *ACTIVATIONS) else node


# Operators that write in place ----------------------------------------------------------------------------------------


def remove_inplace(model: fx.GraphModule) -> None:
    """Rewrite the graph; the outputs stay the same to the bit."""
    position = {node: i for i, node in enumerate(model.graph.nodes)}
    for node in list(model.graph.nodes):
        target, written = functional(node), node.args[0] if node.args else None
        if target is None or not isinstance(written, fx.Node) or written.op != "call_function":
            continue
        if is_call(written, *MOVING_OPERATORS) or any(is_call(reader, *MOVING_OPERATORS) for reader in written.users):
            continue
        node.target = target
        for reader in list(written.users):
            if position[reader] > position[node]:
                reader.replace_input_with(written, node)


def functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that returns what an operator like `aten.add_.Tensor` writes; None where the name says otherwise."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    library, name, overload = target_name(node).split(".")
    if library != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, overload, None)
