"""What may change its precision together: a layer, or a group of layers from a file of subgraphs.

The file: {"quantized": false, "num_subgraphs": 1, "subgraphs": [
    {"name": "head", "description": "", "start_nodes": ["conv1"], "end_nodes": ["fc"]}]}
A subgraph is every node on a path from a start to an end; only `name` and the two lists are needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.core.patterns import Subgraph
from quark.core.spec import LayerSpec
from quark.errors import ConfigError, FormatError, NothingQualifiesError, did_you_mean
from quark.onnx.config.algo_configs import AutoMixprecisionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.scopes import nodes_of
from quark.onnx.placement.place import place

UNGROUPED = "__ungrouped__"
Option = tuple[tuple[str, LayerSpec], ...]
"""(node name, specs) of every node of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """Layers that change together.

    Attributes:
        name: Of the node, or of the subgraph.
        options: What they can become.
    """

    name: str
    options: tuple[Option, ...]

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return [name for name, _ in self.options[0]]


def with_options(settings: Settings, options: Sequence[Option]) -> Settings:
    """The settings with these nodes at these specs."""
    by_spec: dict[LayerSpec, list[str]] = {}
    for name, spec in (entry for option in options for entry in option):
        by_spec.setdefault(spec, []).append(name)
    changed = tuple(((frozenset(names),), spec) for spec, names in by_spec.items())
    specs = replace(settings.specs, by_name=(*changed, *settings.specs.by_name))
    return replace(settings, specs=specs)


def find_candidates(model: ir.Model, config: AutoMixprecisionConfig, settings: Settings) -> list[Candidate]:
    """The candidates, in the order of the graph.

    Raises:
        ConfigError: A name is not there or no candidate.
        NothingQualifiesError: No layer takes part.
        FormatError: The file of subgraphs is none.
    """
    targets, own, rest = _becomes(settings)
    nodes = _eligible(model, config, settings)
    _require(own, nodes, "target_layer_config", model)
    if not targets and rest is None:
        nodes = [name for name in nodes if name in own]
    groups = [(name, [name]) for name in nodes]
    if config.subgraph_json is not None:
        groups = _grouped(model, nodes, config.subgraph_json)
    found = []
    for name, members in groups:
        options = [tuple((node, spec) for node in members) for spec in targets]
        mapped = {node: own.get(node, rest) for node in members}
        found.append(
            Candidate(name, tuple(options or [tuple((n, spec) for n, spec in mapped.items() if spec is not None)]))
        )
    if not found:
        raise NothingQualifiesError(
            f"AutoMixprecisionConfig: no layer qualifies: no quantized {' or '.join(config.target_op_type)} that "
            "include_layers, exclude_layers, specific_layer_config and no_input_qdq_shared leave."
        )
    return found


def _becomes(settings: Settings) -> tuple[list[LayerSpec], dict[str, LayerSpec], LayerSpec | None]:
    """What a layer can become: the specs that all are tried with; or that of a node by name, and that of the rest."""
    targets, own, rest = list[LayerSpec](), dict[str, LayerSpec](), None
    for spec, names in settings.specs.mixed:
        if names is None:
            targets.append(spec)
        elif names:
            own |= dict.fromkeys(names, spec)
        else:
            rest = rest or spec
    return targets, own, rest


def _eligible(model: ir.Model, config: AutoMixprecisionConfig, settings: Settings) -> list[str]:
    """Names of the nodes that take part."""
    quantized = {node.name for node in place(model.clone(), settings).nodes}
    kept = _kept(model, config, settings)
    names = [node.name or "" for node in model.graph if node.name in quantized and node not in kept]
    included = {node.name or "" for node in nodes_of(config.include_layers or (), model, "include_layers")}
    _require(included, names, "include_layers", model)
    return [name for name in names if name in included] if config.include_layers else names


def _kept(model: ir.Model, config: AutoMixprecisionConfig, settings: Settings) -> set[ir.Node]:
    """The nodes that stay as they are; one that the config gives specs of its own keeps them."""
    kept = nodes_of(config.exclude_layers or (), model, "exclude_layers")
    for scopes, _ in settings.specs.by_name:
        kept |= nodes_of(scopes, model, "specific_layer_config")
    kept |= {node for node in model.graph if node.op_type not in config.target_op_type}
    if config.no_input_qdq_shared:
        kept |= {node for node in model.graph if not _reads_alone(node)}
    return kept


def _reads_alone(node: ir.Node) -> bool:
    """Whether nothing else reads the first input of a node."""
    return bool(node.inputs) and node.inputs[0] is not None and len(node.inputs[0].uses()) == 1


def _require(names: Any, nodes: Any, where: str, model: ir.Model) -> None:
    """Raise ConfigError for a name that is no candidate."""
    present = {node.name or "": node.op_type for node in model.graph}
    for name in sorted(set(names) - set(nodes)):
        why = f"a {present[name]} that takes no part" if name in present else "no node of the model"
        raise ConfigError(f"AutoMixprecisionConfig.{where}: {name!r} is {why}. {did_you_mean(name, nodes)}")


def _grouped(model: ir.Model, nodes: list[str], path: str) -> list[tuple[str, list[str]]]:
    """(name, members) of each subgraph with candidates, and of what is in none."""
    groups, owner = [], dict[str, str]()
    for name, scope in _read(path):
        inside = {node.name for node in nodes_of([scope], model, f"{path}: {name}")}
        members = [node for node in nodes if node in inside]
        for node in members:
            if owner.setdefault(node, name) != name:
                raise ConfigError(f"{path}: {node} lies in two subgraphs, {owner[node]} and {name}.")
        groups.append((name, members))
    groups.append((UNGROUPED, [node for node in nodes if node not in owner]))
    return [(name, members) for name, members in groups if members]


def _read(path: str) -> list[tuple[str, Subgraph]]:
    """(name, scope) of each subgraph of a file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [(str(e["name"]), (tuple(e["start_nodes"]), tuple(e["end_nodes"]))) for e in data["subgraphs"]]
        count = data.get("num_subgraphs", len(found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"subgraph_json: {path} is no file of subgraphs: {type(error).__name__}: {error}.") from None
    names = [name for name, _ in found]
    if count != len(found) or len(set(names)) < len(names) or UNGROUPED in names:
        raise FormatError(f"subgraph_json: {path} declares {count} subgraphs and holds {', '.join(names) or 'none'}.")
    return found
