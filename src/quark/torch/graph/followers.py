"""Which sums, concatenations and pools are quantized: those between convolutions.

Such an operator follows what it reads: it is quantized where every tensor comes from a convolution that is quantized,
from an output that the config quantizes, or from another such operator; through operators that only move values, and
the activations that are fused into a layer. All else stays in float, unless the config names the operator.

So the chain of a convolutional network stays in integers, where runtimes gain by it, and the residual stream of a
transformer stays in float: linear layers are as fast with a float output, and 8 bits for a whole tensor lose there what
every block behind it reads. It is the rule of the ONNX flow for `ort_x64` (`follows`, `float_output`), but for
parameters: a class token or a table of positions that is added or appended belongs to a stream, and does not follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import fx

from quark.core.spec import LayerSpec
from quark.torch.graph.batch_norm import foldable
from quark.torch.graph.operators import (
    ACTIVATIONS,
    MOVING_OPERATORS,
    QUANT_STUB,
    Kind,
    activations_of,
    is_call,
)


class Quantizable(Protocol):
    """What is read of an operator of the plan."""

    @property
    def kind(self) -> Kind: ...

    @property
    def nodes(self) -> list[fx.Node]: ...


def lone_followers(
    operators: Mapping[str, Quantizable], specs: Mapping[str, LayerSpec], named: Collection[str]
) -> dict[str, str]:
    """Followers that do not follow a quantized operator.

    Args:
        operators: Name -> operator, in the order of the graph.
        specs: Name -> spec of those that the config asks for.
        named: Names of those that it asks for by themselves.

    Returns:
        Name -> why it stays in float.
    """
    quantized = {
        node
        for name, spec in specs.items()
        for node in operators[name].nodes
        if spec.output is not None or (operators[name].kind.integer_output and spec.input is not None)
    }
    floats: dict[str, str] = {}
    for name in specs:
        operator = operators[name]
        if not operator.kind.follows:
            continue
        sources = [_source(tensor) for node in operator.nodes for tensor in activations_of(node)]
        float_source = next((s for s in sources if s not in quantized and not is_call(s, QUANT_STUB)), None)
        if float_source is None or name in named:
            quantized.update(operator.nodes)
        else:
            floats[name] = f"reads {float_source.name} in float"
    return floats


def _source(node: fx.Node) -> fx.Node:
    """The operator that computed a tensor, apart from what moves it and what is fused into a layer."""
    while is_call(node, *MOVING_OPERATORS, *ACTIVATIONS) or foldable(node) is not None:
        node = node.all_input_nodes[0]
    return node
