"""Scopes: node names, regular expressions and subgraphs, resolved to nodes. What matches nothing is an error.

They speak of the model that the user knows: `prepare` resolves them to names before the passes change the graph. A
node that takes the place of another stands for it (`edit.STANDS_FOR`); one that a pass removes is simply gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from quark.core.patterns import Scope, Subgraph, matches, require_matches
from quark.onnx.graph.edit import STANDS_FOR


def nodes_of(scopes: Iterable[Scope], model: ir.Model, where: str) -> set[ir.Node]:
    """The nodes that the scopes name.

    Raises:
        ConfigError: A scope matches no node; names the nearest.
    """
    nodes = {node.name or "": node for node in model.graph}
    found: set[ir.Node] = set()
    for scope in scopes:
        if isinstance(scope, frozenset):
            found |= {node for name, node in nodes.items() if {name, node.meta.get(STANDS_FOR)} & scope}
        elif isinstance(scope, str):
            pattern = _pattern(scope)
            require_matches([pattern], nodes, where)
            found |= {node for name, node in nodes.items() if matches(name, pattern)}
        else:
            found |= _between(scope, nodes, where)
    return found


def _pattern(scope: str) -> str:
    """A scope as a pattern of core.patterns: documented regular expressions start with ^ and hold ".*"."""
    if scope.startswith("re:"):
        return scope
    if scope.startswith("^") and ".*" in scope:
        return "re:" + scope + ("" if scope.endswith("$") else ".*")
    return "re:" + re.escape(scope)


def _between(scope: Subgraph, nodes: dict[str, ir.Node], where: str) -> set[ir.Node]:
    starts, ends = scope
    for name in (*starts, *ends):
        require_matches(["re:" + re.escape(name)], nodes, where)
    after = _reach({nodes[name] for name in starts}, forward=True)
    before = _reach({nodes[name] for name in ends}, forward=False)
    return after & before


def _reach(start: set[ir.Node], forward: bool) -> set[ir.Node]:
    seen, todo = set(start), list(start)
    while todo:
        node = todo.pop()
        for other in node.successors() if forward else node.predecessors():
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen
