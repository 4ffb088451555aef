"""Parts of a plan that a format or its readers cannot hold: told before the first forward, without weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Any

from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.goals.expert_names import expert_names, unread_experts
from quark.goals.goal import RuntimeGoal
from quark.torch.calibration.reached import check_reached
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.config.selectors import output_head
from quark.torch.flows.replaced import replaced
from quark.torch.formats.fused_groups import EXPERTS, FusedGroup, fused_groups
from quark.torch.formats.readers import TRANSFORMERS
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.names import layers_published
from quark.torch.model.passes import UnfusedExperts
from quark.torch.plan import Plan
from quark.torch.writers.folder import FolderTarget, of_model
from quark.torch.writers.writer import OutputTarget


def check_plan(
    meta: Any, config: QConfig, made: Plan, form: str, reader: str = TRANSFORMERS, folder: OpenedFolder | None = None
) -> str | None:
    """Check a plan, and return a sentence about what transformers would decode wrongly of a folder, or None.

    Raise NotSupportedError or ShapeError for a plan whose result the format could not hold, or nobody would find.

    Args:
        meta: Model on the meta device, as `planned` leaves it; its layers are replaced.
        config: What was asked for.
        made: The plan of both.
        form: A value of --export-format; "onnx" holds what the plan holds.
        reader: What the folder is made for, of READERS.
        folder: That the model is of; None: one that was built by hand.
    """
    if form == "onnx":
        return None
    target: OutputTarget
    if form == "gguf":
        from quark.torch.writers.gguf.file import GgufTarget  # with the tables of architectures

        target = GgufTarget()
    else:
        target = FolderTarget(form, reader=reader)
    with replaced(meta, made):
        return target.writer(of_model(meta, config, made, folder, solved=False)).check()


def check_data(meta: Any, made: Plan, data: Iterable[Any] | None) -> None:
    """Raise CalibrationError for batches that never reach what a plan gives static scales.

    Args:
        meta: As `check_plan` leaves it.
        made: The plan.
        data: Calibration batches.
    """
    layers = quantized_layers(meta)
    if not layers:
        with replaced(meta, made) as layers:
            pass
    check_reached(meta, layers, data)


SHOWN = 4
"""How many names of a kind a message lists."""


def check_goal(model: nn.Module, made: Plan, goal: RuntimeGoal, form: str) -> None:
    """Raise NotSupportedError for a plan whose result a program would not load; names the layers.

    Args:
        model, made: As `split_said` takes them.
        goal: The program.
        form: A value of --export-format.
    """
    said = split_said(model, made, goal.program) if goal.fuses else None
    if said is not None:
        raise NotSupportedError(f"{goal.program} {said}")
    if (lost := _lost_experts(model, made, form, goal.program)) is not None:
        raise NotSupportedError(f"{goal.program} {lost}")
    # The last names of layers beside which the program finds the scale of a cache; None: of all.
    known = goal.cache_layers.get(form)
    outputs = [name for name, spec in made.layers.items() if spec.output is not None]
    unnamed = [name for name in outputs if known is not None and name.rpartition(".")[2] not in known]
    if unnamed:
        served = (
            f", and{goal.folder.serve_cache} when it is served, which takes 1.0 for each scale" if goal.folder else ""
        )
        raise NotSupportedError(
            f"{goal.program} does not read the scale of {unnamed[0]} from {form} folders. Possible: "
            f"compressed-tensors, if it can store that scale; or no --kv-cache{served}."
        )
    heads = [] if goal.heads is None or form in goal.heads else sorted(output_head(model) & made.layers.keys())
    if heads:
        possible = f"the format {' or '.join(goal.heads)}, or " if goal.heads else ""
        raise NotSupportedError(
            f"{goal.program} is not known to read an output head ({heads[0]}) that is quantized as {form}. Possible: "
            f"{possible}to leave it in float."
        )


def _lost_experts(model: nn.Module, made: Plan, form: str, program: str) -> str | None:
    """Return a sentence about experts of a plan that a server would not find in the folder; None: it finds all.

    Args:
        model, made: As `split_said` takes them.
        form: A value of --export-format.
        program: The server, as the table of facts names it.
    """
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, UnfusedExperts))
    experts = [name for name in made.layers if name.startswith(blocks)] if blocks else []
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    row, publish = expert_names(kind, program), layers_published(model)
    if row is None or form == "gguf" or not experts:
        return None
    unread = unread_experts(kind, map(publish, experts), program)
    if unread:
        return f"has no place for the experts of {kind} in the folder ({unread[0]}). Possible: the quark format."
    other = _of_other_type(made, experts, row.quark) if form == "quark" and row.quark else None
    if other is None:
        return None
    return (
        f"passes over the experts of {kind} in quark folders ({publish(other)}: {made.layers[other].weight}) unless "
        f"their weights are {' or '.join(row.quark)}. Possible: such a scheme, or to leave them in float (--exclude "
        "'*experts*')."
    )


def split_said(model: nn.Module, made: Plan, program: str) -> str | None:
    """Return a sentence about a plan that gives parts of one layer of a server different schemes; else None.

    Args:
        model: As the plan was made of it.
        made: The plan.
        program: The server, as the table of facts names it.
    """
    split = _split_groups(model, made, program)
    if not split:
        return None
    group, parts = split[0]
    module = _module(group)
    has = "; ".join(f"{_listed(names, group)}: {spec}" for spec, names in parts.items())
    more = f" (and {len(split) - 1} more)" if len(split) > 1 else ""
    every = [f"{module}.*"] if group.fused == EXPERTS else [f"*.{name.rpartition('.')[2]}" for name in group.layers]
    return (
        f"makes one layer{f' ({group.fused})' if group.fused else ''} of several that get different schemes here, and "
        f"refuses such a folder: in {module or 'the model'}, {has}{more}. Possible: one scheme for all of "
        f"{' '.join(map(repr, every))}, or all of them excluded."
    )


def _split_groups(model: nn.Module, made: Plan, program: str) -> list[tuple[FusedGroup, dict[LayerSpec, list[str]]]]:
    """The groups of which a server makes one, and whose layers a plan gives different schemes.

    Args:
        model: As the plan was made of it.
        made: The plan.
        program: The server, as the table of facts names it.

    Returns:
        Each with what its layers get -> those that get it; an empty spec for float. What is quantized of an output, the
        cache of keys and values, is no part of it.
    """
    found = []
    for group in fused_groups(model, (program,)):
        parts: dict[LayerSpec, list[str]] = defaultdict(list)
        for name in group.layers:
            parts[replace(made.layers.get(name, LayerSpec()), output=None)].append(name)
        if len(parts) > 1:
            found.append((group, dict(parts)))
    return found


def _module(group: FusedGroup) -> str:
    """The module that holds all layers of a group."""
    parts = [name.split(".")[:-1] for name in group.layers]
    return ".".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))


def _listed(names: list[str], group: FusedGroup) -> str:
    """Some of the names, within their module."""
    inside = [name.removeprefix(f"{_module(group)}.") for name in names]
    return ", ".join(inside[:SHOWN]) + (f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else "")


def _of_other_type(made: Plan, layers: list[str], types: Collection[str]) -> str | None:
    """One of these layers whose weight is of none of some types."""
    found = {weight.dtype.name: name for name in layers if (weight := made.layers[name].weight) is not None}
    return next((name for kind, name in found.items() if kind not in types), None)
