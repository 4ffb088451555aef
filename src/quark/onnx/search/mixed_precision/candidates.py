"""Candidates, which change their precision as one: a layer, or a group of layers from a file of subgraphs.

The file: {"quantized": false, "num_subgraphs": 1, "subgraphs": [
    {"name": "head", "description": "", "start_nodes": ["conv1"], "end_nodes": ["fc"]}]}
A subgraph is every node on a path from a start to an end; only `name` and the two lists are needed.

How far the outputs move when one candidate alone changes is its sensitivity, measured once and kept in a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.base.files import atomic_file
from quark.base.json_objects import plain_json
from quark.base.progress import progress
from quark.core.dtypes import MICRO_EXPONENT
from quark.core.granularity import PerGroup
from quark.core.names.patterns import Subgraph
from quark.core.spec import LayerSpec
from quark.errors import ConfigError, FormatError, NothingQualifiesError, did_you_mean
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import fingerprint
from quark.onnx.config.algo_configs import AutoMixprecisionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.scopes import nodes_of
from quark.onnx.placement.place import place
from quark.onnx_ops.saving import weight_bytes

_UNGROUPED = "__ungrouped__"
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
    """Return the specs that all layers are tried with; or those of nodes by name, and that of the rest."""
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
    kept = _kept_nodes(model, config, settings)
    names = [node.name or "" for node in model.graph if node.name in quantized and node not in kept]
    included = {node.name or "" for node in nodes_of(config.include_layers or (), model, "include_layers")}
    _require(included, names, "include_layers", model)
    return [name for name in names if name in included] if config.include_layers else names


def _kept_nodes(model: ir.Model, config: AutoMixprecisionConfig, settings: Settings) -> set[ir.Node]:
    """The nodes that stay as they are; one that the config gives specs of its own keeps them."""
    kept = nodes_of(config.exclude_layers or (), model, "exclude_layers")
    for scopes, _ in settings.specs.by_name:
        kept |= nodes_of(scopes, model, "specific_layer_config")
    kept |= {node for node in model.graph if node.op_type not in config.target_op_type}
    if config.no_input_qdq_shared:
        kept |= {
            node
            for node in model.graph
            if not (bool(node.inputs) and node.inputs[0] is not None and (len(node.inputs[0].uses()) == 1))
        }
    return kept


def _require(names: Any, nodes: Any, where: str, model: ir.Model) -> None:
    """Raise ConfigError for a name that is no candidate."""
    present = {node.name or "": node.op_type for node in model.graph}
    for name in sorted(set(names) - set(nodes)):
        why = f"a {present[name]} that takes no part" if name in present else "no node of the model"
        raise ConfigError(f"AutoMixprecisionConfig.{where}: {name!r} is {why}. {did_you_mean(name, nodes)}")


def _grouped(model: ir.Model, nodes: list[str], path: str) -> list[tuple[str, list[str]]]:
    """(name, members) of each subgraph with candidates, and of what is in none."""
    groups, owner = [], dict[str, str]()
    for name, scope in _read_subgraphs(path):
        inside = {node.name for node in nodes_of([scope], model, f"{path}: {name}")}
        members = [node for node in nodes if node in inside]
        for node in members:
            if owner.setdefault(node, name) != name:
                raise ConfigError(f"{path}: {node} lies in two subgraphs, {owner[node]} and {name}.")
        groups.append((name, members))
    groups.append((_UNGROUPED, [node for node in nodes if node not in owner]))
    return [(name, members) for name, members in groups if members]


def _read_subgraphs(path: str) -> list[tuple[str, Subgraph]]:
    """(name, scope) of each subgraph of a file."""
    try:
        data = plain_json(Path(path).read_text(encoding="utf-8"))
        found = [(str(e["name"]), (tuple(e["start_nodes"]), tuple(e["end_nodes"]))) for e in data["subgraphs"]]
        count = data.get("num_subgraphs", len(found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"subgraph_json: {path} is no file of subgraphs: {type(error).__name__}: {error}.") from None
    names = [name for name, _ in found]
    if count != len(found) or len(set(names)) < len(names) or _UNGROUPED in names:
        raise FormatError(f"subgraph_json: {path} declares {count} subgraphs and holds {', '.join(names) or 'none'}.")
    return found


def stored_bytes(model: ir.Model, settings: Settings) -> float:
    """Bytes of all constants of the quantized model, without scales.

    A block format counts with its shared exponents; a constant that is read under two types counts twice.
    """
    placement = place(model.clone(), settings)
    coded: dict[tuple[str, str], float] = {}
    for (node, index), spec in placement.weights.items():
        value = node.inputs[index]
        shared = 8 / spec.granularity.size if spec.is_block and isinstance(spec.granularity, PerGroup) else 0.0
        bits = spec.dtype.bits + shared + (0.5 if spec.dtype.name in MICRO_EXPONENT else 0.0)
        coded[getattr(value, "name", None) or "", str(spec.dtype)] = constant(value).size * bits / 8
    initializers = model.graph.initializers
    floats = {name: initializers[name].const_value for name, _ in coded if name in initializers}
    return weight_bytes(model) - sum(tensor.nbytes for tensor in floats.values() if tensor) + sum(coded.values())


# Sensitivity ---------------------------------------------------------------------------------------------------------


FORMAT = "quark sensitivity 1"


@dataclass(frozen=True)
class Sensitivity:
    """The effect of one candidate.

    Attributes:
        candidate: Alone at another precision.
        scores: The distance under each of its options.
        enabled: Whether the user, in the file, lets it change.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    enabled: bool = True

    @property
    def best(self) -> int:
        """Index of the option that does least."""
        return self.scores.index(min(self.scores))

    @property
    def score(self) -> float:
        """The least distance."""
        return self.scores[self.best]

    @property
    def option(self) -> Option:
        """The option that does least."""
        return self.candidate.options[self.best]


class Cache:
    """A JSON file of scores; written whole after each candidate. No path: nothing is kept.

    Args:
        path: The file.
        key: Of everything that scores depend on; see `cache_key`.

    Raises:
        FormatError: The file is none of this version.
        ConfigError: It was measured under another key.
    """

    def __init__(self, path: str | None, key: str) -> None:
        self._path, self._key = path, key
        self._entries: dict[str, Mapping[str, Any]] = {}
        if path is None or not Path(path).exists():
            return
        try:
            data = plain_json(Path(path).read_text(encoding="utf-8"))
            name, kept = data["format"], data["cache_key"]
            self._entries = {str(entry["name"]): entry for entry in data["results"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"sensitivity_cache_file: {path}: {type(error).__name__}: {error}.") from None
        if name != FORMAT or kept != key:
            raise ConfigError(
                f"sensitivity_cache_file: {path} was measured on another model, on other data or under other settings. "
                "Possible: another file name, or remove the file."
            )

    def get(self, candidate: Candidate) -> Sensitivity | None:
        """Return the sensitivity that the file has for a candidate; None where it has none."""
        entry = self._entries.get(candidate.name)
        if entry is None or len(entry["all_config_scores"]) != len(candidate.options):
            return None
        return Sensitivity(candidate, tuple(map(float, entry["all_config_scores"])), bool(entry.get("enabled", True)))

    def add(self, found: Sensitivity) -> None:
        """Keep what was measured."""
        name = found.candidate.name
        self._entries[name] = {
            "name": name,
            "candidate_nodes": found.candidate.nodes,
            "score": found.score,
            "all_config_scores": list(found.scores),
            "best_config_index": found.best,
            "enabled": found.enabled,
        }
        if self._path is not None:
            text = json.dumps({"format": FORMAT, "cache_key": self._key, "results": list(self._entries.values())})
            with atomic_file(self._path) as temporary:
                temporary.write_text(text, encoding="utf-8")


def analyse(
    candidates: Sequence[Candidate], score: Callable[[Option], float], cache: Cache, workers: int
) -> list[Sensitivity]:
    """The sensitivity of every candidate, least first; of equal ones, the first in the graph."""
    known = {candidate.name: cache.get(candidate) for candidate in candidates}
    left = [candidate for candidate in candidates if known[candidate.name] is None]

    def measure(candidate: Candidate) -> Sensitivity:
        return Sensitivity(candidate, tuple(score(option) for option in candidate.options))

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(measure, candidate) for candidate in left]
        try:
            for done in progress(as_completed(running), "sensitivity", len(running)):
                found = done.result()
                known[found.candidate.name] = found
                cache.add(found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted((found for found in known.values() if found is not None), key=lambda found: found.score)


def table(ranked: Sequence[Sensitivity]) -> str:
    """The candidates, least sensitive first, as lines of text."""
    width = max(len("layer"), *(len(found.candidate.name) for found in ranked))
    lines = [f"{'rank':>4}  {'layer':{width}}  {'distance':>12}  {'nodes':>5}  becomes"]
    for rank, found in enumerate(ranked, 1):
        parts = [[("A", spec.input), ("W", spec.weight)] for _, spec in found.option]
        kinds = dict.fromkeys(
            " ".join(f"{name}:{part.dtype}" for name, part in each if part is not None) for each in parts
        )
        shown = ", ".join(kinds) + ("" if found.enabled else " (disabled)")
        nodes = len(found.candidate.nodes)
        lines.append(f"{rank:>4}  {found.candidate.name:{width}}  {found.score:>12.6g}  {nodes:>5}  {shown}")
    return "\n".join(lines)


def cache_key(model: ir.Model, settings: Settings, data: Samples, parts: Sequence[Any]) -> str:
    """A hash of everything that scores depend on: the model, the samples, the settings and further parts."""
    kept = replace(
        settings, calibration=replace(settings.calibration, statistics=None), algorithms=(), external_data=False
    )
    digest = hashlib.sha256(repr((fingerprint(model), _repeatable(kept), _repeatable(list(parts)))).encode())
    for sample in data:
        for name, array in sorted(sample.items()):
            digest.update(repr((name, str(array.dtype), array.shape)).encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _repeatable(value: Any) -> Any:
    """A value whose repr is the same in every process: sets are sorted, functions are their code."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _repeatable(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(_repeatable, value)))
    if isinstance(value, (list, tuple)):
        return [_repeatable(entry) for entry in value]
    if callable(value):
        code = getattr(value, "__code__", None)
        return getattr(value, "__qualname__", type(value).__qualname__), code.co_code if code is not None else b""
    return value
