"""Layers of a model that a server makes one of: one matrix of layers that read one tensor, one kernel of experts.

vLLM and SGLang do; transformers keeps such layers apart. Which ones they are is said by a table of facts
(`quark.goals.fused_layers`), by the names that the layers have. Of layers whose names it does not know, those of one
module that read one tensor in a forward: so vLLM does it with models that it takes from transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark.base.libraries.transformers import is_transformers_model
from quark.goals.fused_layers import PROGRAMS, VLLM, fused_siblings
from quark.torch.calibration.experts import EXPERT
from quark.torch.config.selectors import routers
from quark.torch.model.batches import evaluating, forward_batch
from quark.torch.model.dataflow import Trace
from quark.torch.model.meta_model import meta_copy
from quark.torch.model.outside_reads import example
from quark.torch.model.passes import UnfusedExperts
from quark.torch.model.record_forward import record

EXPERTS = "experts"
"""The group of all layers of a mixture."""


@dataclass(frozen=True)
class FusedGroup:
    """Layers that a server makes one of.

    Attributes:
        layers: Full names, at least two.
        fused: What they become, for messages: the name of the matrix, EXPERTS, or nothing where it has no name.
    """

    layers: tuple[str, ...]
    fused: str


Siblings = tuple[str, tuple[str, ...]]
"""Full name of a module, and the last names of its linear layers."""


def fused_groups(model: nn.Module, programs: Sequence[str] = PROGRAMS) -> list[FusedGroup]:
    """The layers of a model that must have one scheme: of each matrix, and all of a mixture of experts.

    Args:
        model: On any device, its experts taken apart where one of them is to be quantized; quantized layers are
            linear layers, too.
        programs: The servers, as the table of facts names them; what one of them makes one of is equal for all.
    """
    mixtures = mixtures_of(_linears(model))
    inside = {layer for layers in mixtures.values() for layer in layers}
    matrices = [group for group in fused_matrices(model, programs) if group.layers[0] not in inside]
    return matrices + [FusedGroup(tuple(layers), EXPERTS) for layers in mixtures.values() if len(layers) > 1]


def fused_matrices(model: nn.Module, programs: Sequence[str] = PROGRAMS) -> list[FusedGroup]:
    """The layers of a model, as `fused_groups` takes it, of which one matrix is made; gate and up of each expert."""
    linears = _linears(model)
    groups, unknown = by_table(linears, architectures(model), programs)
    single = [(module, leaves) for module, leaves in unknown if EXPERT.fullmatch(f"{module}.x") is None]
    known = {layer for group in groups for layer in group.layers}
    for block, experts in model.named_modules():
        if isinstance(experts, UnfusedExperts) and (gate := experts.names[0]) is not None:
            leaves = (gate, experts.names[1])
            pairs = (_group(f"{block}.{number}", leaves, "gate and up") for number, _ in experts.named_children())
            groups += [pair for pair in pairs if known.isdisjoint(pair.layers)]
    if single and is_transformers_model(model):
        groups += _by_dataflow(model, single)
    return united(groups, linears)


def mixtures_of(layers: Iterable[str]) -> dict[str, list[str]]:
    """Name of each block of experts -> its layers, by their names."""
    mixtures: dict[str, list[str]] = {}
    for layer in layers:
        expert = EXPERT.fullmatch(layer)
        if expert:
            mixtures.setdefault(expert["block"], []).append(layer)
    return mixtures


def by_table(
    layers: Iterable[str], known_as: Collection[str], programs: Sequence[str] = PROGRAMS
) -> tuple[list[FusedGroup], list[Siblings]]:
    """The groups that the table of facts names, and the modules of which the flow of data decides.

    Args:
        layers: Full names of linear layers.
        known_as: The architectures of the model.
        programs: Whose rows. Groups of several of them may have layers in common; see `united`.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        module, _, leaf = layer.rpartition(".")
        modules[module].append(leaf)
    groups: list[FusedGroup] = []
    unknown, seen = [], {}
    for module, leaves in modules.items():
        key = (module.rpartition(".")[2], tuple(leaves))
        if key not in seen:  # of a mixture there are thousands
            seen[key] = {program: fused_siblings(*key, known_as, program) for program in programs}
        if VLLM in seen[key] and seen[key][VLLM] is None and len(leaves) > 1:
            unknown.append((module, tuple(leaves)))
        found = [row for rows in seen[key].values() for row in rows or ()]
        groups += [_group(module, members, row.fused) for row, members in found if row.fused]
    return groups, unknown


def united(groups: Iterable[FusedGroup], layers: Iterable[str]) -> list[FusedGroup]:
    """Groups, of which those that have a layer in common are one.

    Args:
        groups: Their layers are among the next ones.
        layers: Full names, in the order of the result.
    """
    of_layer: dict[str, set[str]] = {}
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for group in groups:
        names[group.layers[0]][group.fused] = None
        whole = set(group.layers).union(*(of_layer.get(layer, ()) for layer in group.layers))
        of_layer.update(dict.fromkeys(whole, whole))
    found: dict[int, list[str]] = defaultdict(list)
    for layer in layers:
        if layer in of_layer:
            found[id(of_layer[layer])].append(layer)
    return [
        FusedGroup(
            tuple(members), " or ".join(dict.fromkeys(name for layer in members for name in names[layer] if name))
        )
        for members in found.values()
    ]


def architectures(model: Any) -> set[str]:
    """Return the names of the class of a model in config.json, and its own."""
    config = getattr(model, "config", None)
    return {type(model).__name__, *(getattr(config, "architectures", None) or ())}


def sibling_groups(model: nn.Module, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The groups of siblings that share a global scale, with those added that some server makes one matrix of.

    Args:
        model: As `fused_groups` takes it.
        groups: Last names of siblings that share; none: nothing shares.

    Returns:
        Last names. Groups that have a name in common are one.
    """
    if not groups:
        return []
    shared: list[list[str]] = [list(group) for group in groups]
    matrices = fused_matrices(model)
    for leaves in dict.fromkeys(map(_leaves, matrices)):
        common = [group for group in shared if not set(group).isdisjoint(leaves)]
        rest = [group for group in shared if group not in common]
        shared = [*rest, list(dict.fromkeys(name for group in [*common, leaves] for name in group))]
    return shared


def _group(module: str, leaves: Iterable[str], fused: str) -> FusedGroup:
    prefix = f"{module}." if module else ""
    return FusedGroup(tuple(prefix + leaf for leaf in leaves), fused)


def _leaves(group: FusedGroup) -> tuple[str, ...]:
    return tuple(layer.rpartition(".")[2] for layer in group.layers)


def _linears(model: nn.Module) -> list[str]:
    """Linear layers, without those that choose experts, which no server makes a part of another."""
    apart = routers(model)
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in apart]


def _trace(model: Any) -> Trace | None:
    """A forward on the meta device; None for a model that a dummy input does not suit."""
    with suppress(Exception):
        meta = meta_copy(model)
        batch = example(meta)

        def run() -> None:
            with suppress(Exception):  # a mixture cannot route without values; what ran before it is known
                forward_batch(meta, batch, torch.device("meta"))

        with evaluating(meta):
            return record(meta, run)
    return None


def _by_dataflow(model: Any, modules: Collection[Siblings]) -> list[FusedGroup]:
    """The layers of each module that read one tensor; of a module that no forward reaches, as in others of its class.

    The forward runs on a model without weights, so that every flow, whatever holds its weights, gets the same.
    """
    trace = _trace(model)
    found = {} if trace is None else {siblings: _reading_one(trace, siblings) for siblings in modules}
    kinds = {siblings: (type(model.get_submodule(siblings[0])), siblings[1]) for siblings in found}
    forms: dict[Any, set[Any]] = defaultdict(set)
    for siblings, parts in found.items():
        if parts is not None:
            forms[kinds[siblings]].add(parts)
    groups = []
    for siblings, parts in found.items():
        known = forms[kinds[siblings]]
        form = parts if parts is not None else next(iter(known)) if len(known) == 1 else ()
        groups += [_group(siblings[0], leaves, "") for leaves in form]
    return groups


def _reading_one(trace: Trace, siblings: Siblings) -> tuple[tuple[str, ...], ...] | None:
    """The sets of siblings that read one tensor; None where the forward does not come to all of them."""
    names = _group(*siblings, "").layers
    if any(name not in trace.calls for name in names):
        return None
    groups = (dict.fromkeys(name.rpartition(".")[2] for name in group) for group in trace.groups(names))
    return tuple(tuple(group) for group in groups if len(group) > 1)
