"""Which nodes are quantized, and with which specs: exclude > by name > by type > global."""

from __future__ import annotations

import onnx_ir as ir

from quark.core.spec import LayerSpec
from quark.errors import ConfigError, did_you_mean
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import KNOWN_DOMAINS
from quark.onnx.graph.scopes import nodes_of, require_names
from quark.onnx.operators import NEVER, ON_REQUEST, RULES, SIMULATED, STORES
from quark.onnx.placement.kept_codes import kept_nodes
from quark.onnx.placement.placement import FACTOR


def select_nodes(model: ir.Model, settings: Settings) -> dict[ir.Node, LayerSpec]:
    """The nodes that are quantized, in the order of the graph, each with its specs.

    Raises:
        ConfigError: An op type, a name or a pattern that nothing in the model has.
    """
    nodes = {node.name or "": node for node in model.graph}
    types = _op_types(model, settings)
    if not settings.specs.is_body:
        bodies = settings.specs.bodies
        require_names(settings.specs.nodes, model, "NodesToQuantize", bodies)
        require_names(settings.qdq.float_outputs, model, "NodesToExcludeOutputQuantization", bodies)
    excluded = nodes_of(settings.specs.exclude, model, "exclude") | kept_nodes(model.graph)
    named = [(nodes_of(scopes, model, "specific_layer_config"), layer) for scopes, layer in settings.specs.by_name]
    selected: dict[ir.Node, LayerSpec] = {}
    for name, node in nodes.items():
        if FACTOR in node.meta:
            producer = node.inputs[0].producer() if node.inputs[0] is not None else None
            if producer is not None and producer in selected:
                selected[node] = selected[producer]
            continue
        if _op_type(node) not in types or node in excluded:
            continue
        if settings.specs.nodes and name not in settings.specs.nodes:
            continue
        layer = _layer_of(node, settings, named)
        if layer is not None:
            selected[node] = layer
    return selected


def _layer_of(
    node: ir.Node, settings: Settings, named: list[tuple[set[ir.Node], LayerSpec | None]]
) -> LayerSpec | None:
    """The specs of a node: of the first name that matches, else of the last op type, else the global ones."""
    for members, layer in named:
        if node in members:
            return layer
    for op_types, layer in reversed(settings.specs.by_type):
        if _op_type(node) in op_types:
            return layer
    return settings.specs.layer


def _op_type(node: ir.Node) -> str | None:
    """The op type that the rules and the config know a node by; None for an operator of another domain."""
    return node.op_type if node.domain in KNOWN_DOMAINS else SIMULATED.get(node.op_type)


def _op_types(model: ir.Model, settings: Settings) -> set[str]:
    """The op types to quantize. Raises ConfigError for one that never is, or that neither model nor rules have."""
    present = {op_type for node in model.graph if (op_type := _op_type(node)) is not None}
    requested = {*settings.specs.op_types, *settings.specs.extra_op_types}
    named = {name for names, _ in settings.specs.by_type for name in names}
    rules, never = ({**RULES, **STORES}, NEVER - set(STORES)) if settings.specs.weights_apart else (RULES, NEVER)
    if requested & never:
        raise ConfigError(f"{', '.join(sorted(requested & never))} cannot be quantized; they stay in float.")
    known = {*RULES, *ON_REQUEST, *present}
    inner = {node.op_type for node in model.graph.all_nodes()} if settings.specs.bodies else set[str]()
    unknown = set[str]() if settings.specs.is_body else (requested | named) - known - inner - NEVER
    for name in sorted(unknown):
        raise ConfigError(f"There is no op type {name!r} in the model, nor a rule for it. {did_you_mean(name, known)}")
    return (
        present - never
        if settings.specs.all_op_types
        else {*(settings.specs.op_types or rules), *settings.specs.extra_op_types}
    )
