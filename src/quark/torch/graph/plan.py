"""The plan of graph mode: which operator gets which spec.

A layer goes by the name of its module ("stem.0"), as in eager mode, however often it is called. Any other operator
goes by the module that it is in and its name in the graph ("encoder.add_1").

Of sums, concatenations and pools those between convolutions are quantized. Such an operator follows what it reads: it
is quantized where every tensor comes from a convolution that is quantized, from an output that the config quantizes, or
from another such operator; through operators that only move values, and the activations that are fused into a layer.
All else stays in float, unless the config names the operator.

So the chain of a convolutional network stays in integers, where runtimes gain by it, and the residual stream of a
transformer stays in float: linear layers are as fast with a float output, and 8 bits for a whole tensor lose there what
every block after it reads. It is the rule of the ONNX flow for `ort_x64` (`follows`, `float_output`), but for
parameters: a class token or a table of positions that is added or appended belongs to a stream, and does not follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import fx, nn

from quark.core.names.patterns import matches_any, require_matches
from quark.core.spec import LayerSpec
from quark.errors import ConfigError
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import lower_layer
from quark.torch.config.selectors import patterns_of, required_patterns, selected_names
from quark.torch.graph.batch_norm import foldable
from quark.torch.graph.operators import (
    ACTIVATIONS,
    DEQUANT_STUB,
    MOVING_OPERATORS,
    QUANT_STUB,
    SOFTMAX,
    Kind,
    activations_of,
    is_call,
    is_float,
    kind_of,
    parameter_of,
    source_of,
    target_name,
)
from quark.torch.layers.attention.cache_rules import feeds_cache
from quark.torch.layers.shapes import check_shapes
from quark.torch.plan import Plan, layer_config, require_layers, require_types


@dataclass(frozen=True)
class QuantizableOperator:
    """An operator that can be quantized, or a layer with all of its calls.

    Attributes:
        name: In the plan.
        kind: Row of the operator.
        nodes: Its calls.
    """

    name: str
    kind: Kind
    nodes: list[fx.Node]

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight (a fake tensor: shape and dtype only), or None."""
        node = parameter_of(self.nodes[0], self.kind.weight)
        return None if node is None else node.meta["val"]


@dataclass(frozen=True, repr=False)
class GraphPlan(Plan):
    """A Plan whose layers are operators of a graph.

    Attributes:
        operators: Name -> operator, of everything that could be quantized.
        reasons: Name of an operator that stays in float -> why.
    """

    operators: dict[str, QuantizableOperator] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def weight_shape(self, model: nn.Module, name: str) -> str:
        weight = self.operators[name].weight if name in self.operators else None
        return "-" if weight is None else str(tuple(weight.shape))

    def float_label(self, name: str) -> str:
        return f"float ({self.reasons[name]})" if name in self.reasons else "float"


def make_graph_plan(config: QConfig, model: fx.GraphModule) -> GraphPlan:
    """Decide what happens to each operator: exclude > layer_quant_config > layer_type_quant_config > global.

    Args:
        config: The user's config; it is not changed.
        model: What `torch.export.export(...).module()` made.

    Raises:
        ConfigError: A pattern or type matches nothing, or nothing is left to quantize.
        ShapeError: A granularity does not fit a weight; names the layer.
    """
    operators, reasons = _find_operators(model), _unsupported(model)
    inside = region(model.graph)
    for name, operator in operators.items():
        why = _stays_float(operator, inside)
        if why:
            reasons[name] = why
    operators = {name: operator for name, operator in operators.items() if name not in reasons}
    names = {*operators, *reasons, *(name for name, _ in model.named_modules())}
    require_matches(required_patterns(config.exclude), names, "exclude")
    require_layers(required_patterns(config.exclude), names, {*operators, *reasons})
    require_matches(config.layer_quant_config, operators, "layer_quant_config")
    present = {operator.kind.module for operator in operators.values() if operator.kind.module is not None}
    require_types(config, present, "no operator of this graph")
    specs, named = _choose_specs(config, model, operators)
    floats = _lone_followers(operators, {name: spec for name, spec in specs.items() if spec != LayerSpec()}, named)
    layers, excluded = {}, []
    for name, spec in specs.items():
        operator = operators[name]
        if spec == LayerSpec() or name in floats:
            excluded.append(name)
            continue
        _check_shape(operator, spec)
        layers[name] = spec
    if not layers and not config.kv_cache_quant_config:
        raise _nothing_to_quantize(operators, reasons)
    return GraphPlan(layers, tuple(excluded), tuple(reasons), operators=operators, reasons={**reasons, **floats})


def _choose_specs(
    config: QConfig, model: fx.GraphModule, operators: dict[str, QuantizableOperator]
) -> tuple[dict[str, LayerSpec], set[str]]:
    """The spec of each operator, an empty one of what stays in float; and those that get another than all others."""
    patterns, selected = patterns_of(config.exclude), _selected(config, model, operators)
    specs, named = {}, set()
    for name, operator in operators.items():
        chosen = None
        if name not in selected and not matches_any(name, patterns):
            chosen = layer_config(config, name, operator.kind.module, operator.kind.only_named)
        specs[name] = _lowered(chosen, operator)
        if feeds_cache(config, name):  # its output is quantized where attention reads it
            specs[name] = replace(specs[name], output=None)
        if chosen is not config.global_quant_config:
            named.add(name)
    return specs, named


def _check_shape(operator: QuantizableOperator, spec: LayerSpec) -> None:
    """Raise ShapeError, naming the operator, where a granularity does not fit its weight."""
    weight, kind = operator.weight, operator.kind.name
    features = weight.shape[1] if weight is not None and kind == "linear" else None
    check_shapes(operator.name, kind, None if weight is None else tuple(weight.shape), features, spec)


def _nothing_to_quantize(operators: Mapping[str, QuantizableOperator], reasons: Mapping[str, str]) -> ConfigError:
    kinds = sorted({operator.kind.name for operator in operators.values()})
    return ConfigError(
        f"Nothing to quantize: of {len(operators)} operators that can be ({', '.join(kinds) or 'none'}), all are "
        f"excluded or without a config. Others in the graph: {', '.join(sorted(set(reasons.values()))) or 'none'}."
    )


def _find_operators(model: fx.GraphModule) -> dict[str, QuantizableOperator]:
    """Everything that graph mode can quantize, in the order of the graph."""
    operators: dict[str, QuantizableOperator] = {}
    modules = {name for name, _ in model.named_modules()}
    for node in model.graph.nodes:
        kind = kind_of(node)
        if kind is None or not is_float(node) or not (activations_of(node) or parameter_of(node, kind.weight)):
            continue
        name = _layer_name(node, kind)
        if name is None or (name in operators and operators[name].kind.name != kind.name):
            stack = list(node.meta.get("nn_module_stack", {}).values())
            name = f"{stack[-1][0]}.{node.name}".lstrip(".") if stack else node.name
            name = f"{name}_" if name in modules else name
        operators.setdefault(name, QuantizableOperator(name, kind, [])).nodes.append(node)
    return operators


def _unsupported(model: fx.GraphModule) -> dict[str, str]:
    """Operators without a row that give float tensors: name -> what they are."""
    reasons = {}
    for node in model.graph.nodes:
        if (
            node.op != "call_function"
            or kind_of(node)
            or is_call(node, *MOVING_OPERATORS, *ACTIVATIONS, QUANT_STUB, DEQUANT_STUB)
        ):
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            reasons[node.name] = f"a graph of its own: {node.target}"
        elif is_float(node) and isinstance(node.target, torch._ops.OpOverload) and foldable(node) is None:
            reasons[node.name] = target_name(node)
    return reasons


def _layer_name(node: fx.Node, kind: Kind) -> str | None:
    """The module that this operator is the whole of, or that holds its `weight`; else None."""
    weight, stack = parameter_of(node, kind.weight), list(node.meta.get("nn_module_stack", {}).values())
    if weight is None:
        return None
    path, module = stack[-1] if stack else ("", "")
    type_name = module if isinstance(module, str) else f"{module.__module__}.{module.__qualname__}"
    if kind.module is not None and type_name == f"{kind.module.__module__}.{kind.module.__qualname__}":
        return str(path)
    parent, _, leaf = str(weight.target).rpartition(".")
    return parent if leaf == "weight" and parent else None


def _stays_float(operator: QuantizableOperator, inside: set[fx.Node]) -> str | None:
    """Why an operator with a row is not quantized, or None."""
    if operator.kind.name == "add" and all(_only_softmax_reads(node) for node in operator.nodes):
        return "the mask before a softmax"
    if not all(node in inside for node in operator.nodes):
        return "outside QuantStub and DeQuantStub"
    written = [t.name for n in operator.nodes for t in activations_of(n) if any(map(_writes, source_of(t).users))]
    return f"{written[0]} is written in place" if written else None


def _only_softmax_reads(node: fx.Node) -> bool:
    return bool(node.users) and all(is_call(reader, *SOFTMAX) for reader in node.users)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def region(graph: fx.Graph) -> set[fx.Node]:
    """The nodes to quantize: all, or those after a QuantStub and before a DeQuantStub where there is one."""
    if not any(is_call(node, QUANT_STUB) for node in graph.nodes):
        return set(graph.nodes)
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        after = any(source in inside for source in node.all_input_nodes)
        if is_call(node, QUANT_STUB) or (after and not is_call(node, DEQUANT_STUB)):
            inside.add(node)
    return inside


def _lowered(config: QLayerConfig | None, operator: QuantizableOperator) -> LayerSpec:
    """The spec of a operator, without what it does not have."""
    spec = lower_layer(config, per_token=operator.kind.name == "linear")
    if operator.weight is None:
        spec = replace(spec, weight=None)
    if all(parameter_of(node, operator.kind.bias) is None for node in operator.nodes):
        spec = replace(spec, bias=None)
    return replace(spec, input=None) if not activations_of(operator.nodes[0]) else spec


def _selected(config: QConfig, model: fx.GraphModule, operators: dict[str, QuantizableOperator]) -> set[str]:
    """Names that the selectors of `exclude` stand for. A graph has no classes: the head is a linear layer at the top
    of the model with as many rows as an embedding.
    """
    selected = selected_names([entry for entry in config.exclude if entry != "@output_head"], model)
    if "@output_head" in config.exclude:
        weights = {name: operator.weight for name, operator in operators.items() if operator.weight is not None}
        tables = {len(weights[name]) for name in weights if operators[name].kind.name == "embedding"}
        top = [name for name in weights if "." not in name and operators[name].kind.name == "linear"]
        selected |= {name for name in top if len(weights[name]) in tables}
    return selected


# Followers ------------------------------------------------------------------------------------------------------------


class Quantizable(Protocol):
    """A row of the table of operators as the plan reads it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def nodes(self) -> list[fx.Node]: ...


def _lone_followers(
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
