"""Whether the source of a server says what a row of a table does, in the files that the row names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from benchmarks.facts.float_layers import pairs_in
from benchmarks.facts.source_tree import Source, SourceFile, SourceTree, built_of
from quark.goals.expert_names import ExpertNames
from quark.goals.fused_layers import FusedLayers

DEFAULT = frozenset({"gate_proj", "up_proj", "down_proj"})
"""What the experts' layer of vLLM looks for where a model names nothing (`ckpt_names` of FusedMoEFactory)."""
EXPERTS_ARE = "FusedMoE"
"""How the classes of vLLM begin that hold all experts of a block."""


def confirms_fused(tree: SourceTree, row: FusedLayers) -> bool:
    """Whether one of the files loads all members into the fused layer; of layers kept apart, whether they have them."""
    files = [file for path in row.source for file in tree.at(path)]
    wanted = {_last(member) for member in row.members}
    if not row.fused:
        return any(wanted <= words_in(file) for file in files)
    least = max(2, len(wanted) - 1) if row.whole else 2  # one may have another name there (Beam's gate)
    return any(len(wanted & _members(file).get(_last(row.fused), set())) >= least for file in files)


def confirms_experts(tree: SourceTree, row: ExpertNames) -> bool:
    """Whether the classes of the file have experts in this place of a block, and look for their layers so."""
    file = next(tree.at(row.source), None)
    if file is None:
        return False
    parts = list(dict.fromkeys(part for each in file.classes.values() for part in built_of(each)))
    attributes = {attribute for part in parts for attribute, _ in part.assigned}
    names = _expert_leaves(parts, tree.package)
    # Where a program has a branch of its own for experts of some formats, what it looks for is in its text.
    found = set(row.leaves) in names or (bool(row.quark) and set(row.leaves) <= words_in(file))
    return found and set(row.place.split(".")) <= attributes


def words_in(file: SourceFile) -> set[str]:
    """The attributes of a file, and the parts of its strings."""
    found = {node.attr for node in ast.walk(file.body) if isinstance(node, ast.Attribute)}
    strings = (node.value for node in ast.walk(file.body) if isinstance(node, ast.Constant))
    return found.union(*(text.split(".") for text in strings if isinstance(text, str)))


def _expert_leaves(parts: Iterable[Source], package: str) -> list[set[str]]:
    """What is looked for of an expert: of each layer of experts, and of each mapping that a model makes."""
    found = []
    for part in parts:
        for call in (node for node in ast.walk(part.tree) if isinstance(node, ast.Call)):
            given = {each.arg: each.value for each in call.keywords}
            named = [value for name, value in given.items() if name and name.startswith("ckpt_") and "name" in name]
            if named:
                found.append({each for value in named for each in _strings(value)})
            elif package == "vllm" and ast.unparse(call.func).rpartition(".")[2].startswith(EXPERTS_ARE):
                found.append(set(DEFAULT))
    return found


def _strings(value: ast.expr) -> list[str]:
    return [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _members(file: SourceFile) -> dict[str, set[str]]:
    members: dict[str, set[str]] = defaultdict(set)
    for whole, member in pairs_in(file):
        members[_last(whole)].add(_last(member))
    return members


def _last(name: str) -> str:
    return name.strip(".").rpartition(".")[2]
