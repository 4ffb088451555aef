r"""Scopes: node names, patterns and subgraphs, resolved to nodes. What matches nothing is `unmatched`.

    /head/Gemm          the node of that name, whatever characters it has
    */attn/*            a glob, as the names of layers of folders have
    re:/layer\d+/.*     a regular expression of the whole name
    ^/layer.*           the documented one of the start of a name

They speak of the model that the user knows: `prepare` resolves them to names before the passes change the graph. A
node that takes the place of another stands for it (`edit.STANDS_FOR`); one that a pass removes is simply gone. Nodes of
one name, as exporters write them, have been told apart (`model_file.name_nodes`), which no scope could do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from quark.core.names.patterns import Scope, Subgraph, matches, require_matches, unmatched
from quark.errors import ConfigError, did_you_mean
from quark.onnx.graph.edit import STANDS_FOR
from quark.onnx.graph.model_file import SHARED_NAME


def nodes_of(scopes: Iterable[Scope], model: ir.Model, where: str, bodies: bool = False) -> set[ir.Node]:
    """The nodes that the scopes name.

    Args:
        scopes: Names, patterns, subgraphs.
        model: The model.
        where: What names them, for the message.
        bodies: Whether the nodes within bodies count too.

    Raises:
        ConfigError: A scope matches no node; names the nearest.
    """
    nodes = _by_name(model, bodies)
    found: set[ir.Node] = set()
    scopes = list(scopes)
    names = [scope for scope in scopes if isinstance(scope, str) and _is_name(scope)]
    require_names([name for name in names if name in nodes or not _is_glob(name)], model, where, bodies)
    for scope in scopes:
        if isinstance(scope, frozenset):
            found |= {node for name, node in nodes.items() if {name, node.meta.get(STANDS_FOR)} & scope}
        elif isinstance(scope, str):
            found |= _matching(scope, nodes, where)
        else:
            for name in (*scope[0], *scope[1]):
                if name not in nodes:
                    raise ConfigError(_absent(name, nodes, where))
            found |= _between(scope, nodes, where)
    return found


def _matching(scope: str, nodes: dict[str, ir.Node], where: str) -> set[ir.Node]:
    """The nodes of a name, or of a pattern that is said to match none."""
    if scope in nodes or (_is_name(scope) and not _is_glob(scope)):
        return {node for name, node in nodes.items() if name == scope}
    documented = not scope.startswith("re:") and not _is_name(scope)
    pattern = f"re:{scope}{'' if scope.endswith('$') else '.*'}" if documented else scope
    require_matches([pattern], nodes, where)
    return {node for name, node in nodes.items() if matches(name, pattern)}


def _by_name(model: ir.Model, bodies: bool) -> dict[str, ir.Node]:
    """The nodes of a model, with those of its bodies or without."""
    return {node.name or "": node for node in (model.graph.all_nodes() if bodies else model.graph)}


def require_names(
    names: Iterable[str], model: ir.Model, where: str, bodies: bool = False, strict: bool = False
) -> None:
    """Say `unmatched` of each name that no node has, with the nearest. Raises ConfigError for one of several nodes."""
    nodes = _by_name(model, bodies)
    shared = {str(node.meta[SHARED_NAME]) for node in nodes.values() if SHARED_NAME in node.meta}
    for name in names:
        if name in shared:
            raise ConfigError(f"{where}: several nodes have the name {name!r}. Give them names of their own first.")
        if name not in nodes:
            unmatched(_absent(name, nodes, where), strict)


def _absent(name: str, nodes: Collection[str], where: str) -> str:
    return f"{where}: no node has the name {name!r}. {did_you_mean(name, nodes)}"


def _is_name(scope: str) -> bool:
    """Return True where a scope is the name of a node: documented regular expressions start with ^ and hold ".*"."""
    return not scope.startswith("re:") and not (scope.startswith("^") and ".*" in scope)


def _is_glob(scope: str) -> bool:
    """Return True for what stands for several names, unless a node has that very name."""
    return any(sign in scope for sign in "*?[")


def outside(first: Iterable[str], last: Iterable[str], model: ir.Model) -> set[ir.Node]:
    """The nodes before any of `first`, and those after any of `last`; these themselves are none of them.

    Raises:
        ConfigError: A name is that of no node; names the nearest.
    """
    nodes = {node.name or "": node for node in model.graph}
    found: set[ir.Node] = set()
    for names, where, forward in ((first, "InputNodes", False), (last, "OutputNodes", True)):
        require_names(names := list(names), model, where, strict=True)
        named = {nodes[name] for name in names}
        found |= _reach(named, forward) - named
    return found


def _between(scope: Subgraph, nodes: dict[str, ir.Node], where: str) -> set[ir.Node]:
    starts, ends = scope
    after = _reach({nodes[name] for name in starts}, forward=True)
    before = _reach({nodes[name] for name in ends}, forward=False)
    if not after & before:
        raise ConfigError(
            f"{where}: nothing lies between {', '.join(sorted(starts))} and {', '.join(sorted(ends))}. "
            "Possible: starts that come before their ends."
        )
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
