"""Lets a body read constants that its Loop or Scan hands from step to step unchanged, as TensorFlow writes them.

    Loop(M, cond, ..., W, ...) { (..., w, ...) -> (..., w, ...) }     becomes     Loop(M, cond, ...) { ... W ... }

So the body has weights, where it had inputs that nothing said are the same in each step.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import is_op, own_values
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx_ops.saving import SMALL

_BEFORE_STATES = {"Loop": (2, 1), "Scan": (0, 0)}
"""Op type -> inputs of node and body before the states, and outputs of the body before them."""


def hoist_constants(model: ir.Model) -> int:
    """Take the large constants out of the states of each Loop and Scan of a graph; return how many."""
    return sum(_hoist(node) for node in list(model.graph) if is_op(node, *_BEFORE_STATES))


def _is_large(value: ir.Value) -> bool:
    return is_constant(value) and constant(value).nbytes >= SMALL


def _hoist(node: ir.Node) -> int:
    """Take the large constants out of the states of one node; another takes its place."""
    body = node.attributes["body"].as_graph()
    first, first_output = _BEFORE_STATES[node.op_type]
    inside = [value for part in (body, *body.subgraphs()) for value in own_values(part)]
    gone = []
    states = len(node.inputs) - first - node.attributes.get_int("num_scan_inputs", 0)
    for state in range(states):
        source, inner = node.inputs[first + state], body.inputs[first + state]
        if source is None or _before_identities(body.outputs[first_output + state]) is not inner:
            continue
        # Of a name that the body has too, it would read its own; an output of the model has a name that is asked for.
        hidden = any(value.name == source.name for value in inside if value is not inner)
        if not hidden and not node.outputs[state].is_graph_output() and _is_large(source):
            gone.append(state)
    if not gone:
        return 0
    for state in reversed(gone):
        source, inner = node.inputs[first + state], body.inputs[first + state]
        assert source is not None
        body.outputs.pop(first_output + state)
        inner.replace_all_uses_with(source)
        body.inputs.pop(first + state)
        node.outputs[state].replace_all_uses_with(source)
    _replace(node, {first + state for state in gone}, set(gone))
    return len(gone)


def _replace(node: ir.Node, inputs: set[int], outputs: set[int]) -> None:
    """Put a node in the place of one, without some of its inputs and outputs."""
    graph = node.graph
    assert graph is not None
    left = [value for index, value in enumerate(node.outputs) if index not in outputs]
    made = ir.Node(
        node.domain,
        node.op_type,
        [value for index, value in enumerate(node.inputs) if index not in inputs],
        list(node.attributes.values()),
        num_outputs=len(left),
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    made.meta.update(node.meta)
    graph.insert_before(node, made)
    for old, new in zip(left, made.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _before_identities(value: ir.Value) -> ir.Value:
    """Return the value that a chain of Identity passes on."""
    node = value.producer()
    while node is not None and is_op(node, "Identity") and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value
