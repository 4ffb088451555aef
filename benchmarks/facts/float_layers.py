"""Which linear layers and embeddings of its models a server builds without a quantization, read from its source.

A layer that is built with `quant_config=None`, without one, or as an `nn.Linear`, has a place for a float weight only.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

from benchmarks.facts.source_tree import Source, SourceFile, SourceTree, built_of
from quark.goals.float_layers import ANY

QUANTIZES = "quant_config"
EMBEDDINGS = ("Embedding", "VocabParallelEmbedding")
PREDICTORS = ("MultiTokenPredictorLayer", "MTPLayer")
"""How classes end that predict a further token."""


def architectures(tree: SourceTree) -> dict[str, list[Source]]:
    """Name of an architecture, as config.json has it -> the classes that a server has for it, one for each platform."""
    registry = next(tree.at("model_executor/models/registry.py"), None)
    return _entry_classes(tree) if registry is None else _registered(tree, registry)


def _entry_classes(tree: SourceTree) -> dict[str, list[Source]]:
    """Of SGLang: each file of models has `EntryClass`, a class or a list of them, with the names of config.json."""
    found: dict[str, list[Source]] = {}
    for file in tree.at("srt/models"):
        for node in file.body.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                for name in (each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)):
                    found.setdefault(name, []).extend(file.classes_named(name))
    return found


def _registered(tree: SourceTree, registry: SourceFile) -> dict[str, list[Source]]:
    """Of vLLM: its registry has `architecture: (module, class)`."""
    found: dict[str, list[Source]] = {}
    for node in ast.walk(registry.body):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            pair = [each.value for each in value.elts if isinstance(each, ast.Constant)] if _is_pair(value) else []
            if not isinstance(key, ast.Constant) or len(pair) != 2:
                continue
            module = pair[0] if "." in pair[0] else f"{tree.package}.model_executor.models.{pair[0]}"
            file = tree.file_of(module)
            classes = file.classes_named(pair[1]) if file is not None else []
            if classes:
                found.setdefault(str(key.value), []).extend(classes)
    return found


def float_layers(model: Source) -> dict[str, Source]:
    """The layers of a model that are built without a quantization: `module.layer` by their last names -> their class.

    A layer alone where nothing says what its module is called, and `quant_config=None` is said of it. What some other
    part of the model builds quantized under the same names (attention of its text, and of its tower) is left out, but
    for layers that become one in some branch: in float each branch loads them.
    """
    parts = built_of(model)
    stacked, places = _stacked(parts), _places(parts)
    found: dict[str, Source] = {}
    quantized: set[str] = set()
    forced: set[str] = set()
    for part in parts:
        linear = _linear_in(part)
        joined = {member for leaf, how in linear.items() if not how for member in _joined(leaf, linear)}
        for leaf, how in linear.items():
            for member in stacked.get(leaf, (leaf,)):
                names = [f"{place}.{member}" for place in sorted(places.get(part, ())) if not place.startswith("is_")]
                alone = [member] if how is not None and not names else []
                if member in joined:
                    forced.update(names)
                if how and member not in joined:
                    quantized.update(names, [member])
                else:
                    found.update(dict.fromkeys([*names, *alone], part))
    return {name: part for name, part in found.items() if name in forced or name not in quantized}


def rows(tree: SourceTree) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Layer -> the architectures whose models build it in float, and the files that do, sorted.

    Layers of models that predict further tokens are of every architecture: a folder has them beside its own.
    """
    models: dict[str, set[str]] = defaultdict(set)
    files: dict[str, set[str]] = defaultdict(set)
    for architecture, classes in architectures(tree).items():
        predicts = "MTP" in architecture
        for name, part in [item for each in classes for item in float_layers(each).items()]:
            own = predicts and part.name.endswith(PREDICTORS) and "embed" not in _last(name)  # which models have, too
            layer = _last(name) if own else name
            models[layer].add(ANY if layer != name else architecture)
            files[layer].add(part.file.path.as_posix())
    return {
        layer: ((ANY,) if ANY in models[layer] else tuple(sorted(models[layer])), tuple(sorted(files[layer])))
        for layer in sorted(models)
    }


def _is_pair(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple) and len(node.elts) == 2


def _linear_in(part: Source) -> dict[str, bool | None]:
    """The attributes of a class that are linear layers or embeddings -> whether some branch of its code quantizes them.

    None where nothing is said of it, so that they are float because the layers of vLLM are.
    """
    branches: dict[str, list[bool | None]] = defaultdict(list)
    for attribute, call in part.assigned:
        if isinstance(call, ast.Call) and _is_layer(ast.unparse(call.func).rpartition(".")[2]):
            branches[attribute].append(_quantized(call))
    return {
        attribute: True if True in each else False if False in each else None for attribute, each in branches.items()
    }


def _joined(leaf: str, attributes: Iterable[str]) -> list[str]:
    """The attributes of a class that one of its branches has as one layer, named as both: `wk_weights_proj`."""
    return next(([a, b] for a in attributes for b in attributes if leaf == f"{a}_{b}"), [])


def _is_layer(kind: str) -> bool:
    return kind.endswith("Linear") or kind in EMBEDDINGS


def _quantized(call: ast.Call) -> bool | None:
    if ast.unparse(call.func).startswith(("nn.", "torch.nn.")):
        return None
    if any(each.arg is None for each in call.keywords) or any(QUANTIZES in ast.unparse(each) for each in call.args):
        return True
    given = next((each.value for each in call.keywords if each.arg == QUANTIZES), None)
    return None if given is None else not (isinstance(given, ast.Constant) and given.value is None)


def _places(parts: Iterable[Source]) -> dict[Source, set[str]]:
    """Class -> the attributes of other classes that are made of it, or of a class that is one."""
    places: dict[Source, set[str]] = defaultdict(set)
    for part in parts:
        chosen = _chosen(part)
        for attribute, value in part.assigned:
            asked = {id(node) for call in ast.walk(value) if _is_question(call) for node in ast.walk(call)}
            names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name) and id(node) not in asked}
            for name in names.union(*(chosen.get(name, ()) for name in names)):
                for found in part.file.classes_named(name):
                    for each in _ancestry(found):
                        places[each].add(attribute)
    return places


def _chosen(part: Source) -> dict[str, list[str]]:
    """Variable -> the names that it is one of: `indexer_cls = IndexerKPool if ... else Indexer`."""
    return {
        target.id: [each.id for each in (node.value.body, node.value.orelse) if isinstance(each, ast.Name)]
        for node in ast.walk(part.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_question(node: ast.AST) -> bool:
    """Whether something is asked what it is, and not made."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"


def _ancestry(part: Source) -> list[Source]:
    found, waiting = {part: None}, [part]
    while waiting:
        new = [base for base in waiting.pop().bases if base not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


def _stacked(parts: Iterable[Source]) -> dict[str, tuple[str, ...]]:
    """Layer -> the layers of a folder that are loaded into it, by their last names, as the files of a model say."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for file in dict.fromkeys(part.file for part in parts):
        for whole, member in pairs_in(file):
            found[_last(whole)][_last(member)] = None
    return {whole: tuple(members) for whole, members in found.items()}


@cache
def pairs_in(file: SourceFile) -> list[tuple[str, str]]:
    """(layer, part of it) of the tables of a file: rows of three, and lists of parts."""
    found: list[tuple[Any, Any]] = []
    looped = {id(node.iter) for node in ast.walk(file.body) if isinstance(node, ast.For | ast.comprehension)}
    for node in ast.walk(file.body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            found += _listed(node.targets[0].slice, node.value)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and id(node) not in looped:
            row = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            found += [(row[0], row[1])] if len(row) == 3 else []
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                found += _listed(key, value)
    return [(whole, member) for whole, member in found if isinstance(whole, str) and isinstance(member, str)]


def _listed(key: ast.expr | None, value: ast.expr) -> list[tuple[Any, Any]]:
    if not isinstance(key, ast.Constant) or not isinstance(value, ast.List):
        return []
    return [(key.value, each.value) for each in value.elts if isinstance(each, ast.Constant)]


def _last(name: str) -> str:
    return name.strip(".").rpartition(".")[2]
