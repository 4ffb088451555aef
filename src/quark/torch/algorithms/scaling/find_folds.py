"""Finds the folds of a block and proves them.

Which layers read one tensor, and what made it, is read off a recorded forward. Which of the producer's channels feeds
which input channel is measured: its output channels get distinct factors, and the input of the readers must follow,
each channel with one of those factors for every token. A fold counts only if a random s leaves the block's float64
output as it was, to 1e-9; else there is a reason.

What is measured stays on the device of the block. The searches of all groups go side by side, and what they have
measured is read together, so that a device is waited for once a round and not once a question.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from quark.errors import ConfigError, did_you_mean
from quark.torch.algorithms.scaling.float64_forward import Exact, Tensors, difference, in_float64
from quark.torch.algorithms.scaling.fold import Fold, Refusal
from quark.torch.model.batches import input_device
from quark.torch.model.dataflow import Node, Trace
from quark.torch.model.record_forward import is_linear, record

TOLERANCE = 1e-9
"""Largest change of a block's float64 output under a fold, relative to its largest value."""

_FOLLOWS = 1e-7
"""Largest relative deviation of a channel from the factor that it follows."""

UNCHANGED, SILENT, NEITHER = -1, -2, -3
"""Values of a channel that follows no factor: it stays as it is, it is always 0, it is anything else."""

Answer = TypeVar("Answer")
_Asking = Generator[torch.Tensor, torch.Tensor, Answer]
"""A search that gives what it has measured, and gets it on the host, float64."""


class Discovery:
    """Finds the folds of blocks; for blocks of one structure what the first one taught is only proved again."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Fold | Refusal]] = {}

    def folds(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Fold | Refusal]:
        """A Fold or a Refusal for each group of linear layers that read one tensor.

        Args:
            block: A decoder block, or any module.
            args, kwargs: What it is called with, for some tokens (8 or more).
        """
        search = _Search(block, args, kwargs)
        if search.structure not in self._known:
            self._known[search.structure] = search.candidates()
        return search.proved(self._known[search.structure])

    def explicit(
        self,
        block: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        scaling_layers: Sequence[Mapping[str, Any]],
    ) -> list[Fold | Refusal]:
        """The folds that a config spells out: {"prev_op", "layers", "inp", "module2inspect"}, names in the block.

        Raises:
            ConfigError: A name that the block does not have, or a fold that would change the block's output.
        """
        search = _Search(block, args, kwargs)
        for item in scaling_layers:
            search.check(item)
        named = tuple((item["prev_op"], tuple(item["layers"])) for item in scaling_layers)
        if (search.structure, named) not in self._known:
            asked = [search.candidate(layers, before) for before, layers in named]
            self._known[search.structure, named] = answers(asked)
        proved = search.proved(self._known[search.structure, named])
        for item, result in zip(scaling_layers, proved, strict=True):
            if isinstance(result, Refusal):
                raise ConfigError(f"scaling_layers: {item['prev_op']!r} into {item['layers']}: {result.reason}.")
        return proved


class _Search:
    """The search in one block."""

    def __init__(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.block = block
        self.graph: Trace = record(block, lambda: block(*args, **kwargs))
        self.exact = Exact(block, args, kwargs)

    @property
    def structure(self) -> Any:
        """Equal for blocks that compute the same with other weights."""
        nodes = tuple((node.kind, node.module, node.inputs) for node in self.graph.nodes)
        return nodes, tuple(value.shape for value in self.graph.values), self.graph.uncalled

    @cached_property
    def before(self) -> tuple[list[torch.Tensor], Tensors]:
        """The block's float64 output, and the input of every module with a matrix."""
        return self.exact.run(watch=[name for name in self.graph.calls if self.has_columns(name)])

    def has_columns(self, name: str | None) -> bool:
        """Return True where a module has a weight (out, channels)."""
        weight = None if name is None else getattr(self.block.get_submodule(name), "weight", None)
        return isinstance(weight, torch.Tensor) and weight.ndim == 2

    def is_linear(self, name: str) -> bool:
        return is_linear(self.block.get_submodule(name))

    # Candidates

    def candidates(self) -> list[Fold | Refusal]:
        """A candidate for each group, layers that saw no token included."""
        groups = self.graph.groups()
        found = answers([self.candidate(group) for group in groups])
        for name in self.graph.uncalled:
            sibling = _sibling(name, set(self.graph.calls) - set(self.graph.uncalled))
            if sibling is None:
                return [Refusal(group, f"{name!r} read no token in the recorded forward") for group in groups]
            found = [copied for item in found for copied in _like_sibling(item, sibling, name)]
        merged: list[Fold | Refusal] = []
        for item in found:
            if not any(set(item.layers) <= set(other.layers) for other in merged):
                merged.append(item)
        return merged

    def candidate(self, layers: tuple[str, ...], producer: str | None = None) -> _Asking[Fold | Refusal]:
        """The first nearest node before `layers` whose channels pass factors on to their input, or all reasons."""
        reasons: dict[str, None] = {}
        for node in reversed(self.graph.sources(self.graph.calls[layers[0]][0].inputs[0])):
            if producer not in (None, node.module):
                continue
            for rows, values in self.parts(node):
                result = yield from self.probe(layers, node, rows, values)
                if isinstance(result, Fold):
                    return result
                reasons[result] = None
        near = f"{producer!r} does not come before it" if producer else "it comes from outside of the block"
        return Refusal(layers, "; ".join(reasons) or near)

    def parts(self, node: Node) -> list[tuple[torch.Tensor, list[int]]]:
        """How the output channels of a node part on their way (fused q/k/v), the last first: (channels, values)."""
        shape = self.graph.values[node.outputs[0]].shape
        todo = [(node.outputs[0], torch.arange(shape[-1]).expand(shape))]
        parts: dict[tuple[int, ...], list[int]] = {}
        while todo:
            value, channels = todo.pop(0)
            readers = self.graph.readers(value)
            moves = [reader for reader in readers if reader.move is not None]
            if len(moves) < len(readers) and channels.numel():
                parts.setdefault(tuple(torch.unique(channels).tolist()), []).append(value)
            for reader in moves:
                assert reader.move is not None
                moved = reader.move(channels)
                todo += zip(reader.outputs, [moved] if isinstance(moved, torch.Tensor) else moved, strict=True)
        return [(torch.tensor(rows), values) for rows, values in reversed(parts.items())]

    def _other_readers(self, layers: tuple[str, ...], values: list[int]) -> tuple[tuple[str, ...], list[str]]:
        """Return the readers of values beside `layers`, and those that take no factors, or are linear layers."""
        readers = {reader.module or reader.kind: reader for value in values for reader in self.graph.targets(value)}
        others = tuple(reader for reader in readers if reader not in (*layers, *self.graph.uncalled))
        return others, [r for r in others if not self.has_columns(readers[r].module) or self.is_linear(r)]

    def probe(self, layers: tuple[str, ...], node: Node, rows: torch.Tensor, values: list[int]) -> _Asking[Fold | str]:
        """Give some output channels of a node distinct factors; see which input channels of its readers follow."""
        name = node.module
        if name is None or len(self.graph.calls[name]) > 1:
            return f"{name or node.kind!r} is no module that runs once"
        module, count = self.block.get_submodule(name), self.graph.values[node.outputs[0]].shape[-1]
        offsets = {} if is_linear(module) else (yield from _offsets(module, count))
        if not is_linear(module) and not offsets:
            return f"{name!r} ({node.kind}) has no gain for each channel"
        others, alien = self._other_readers(layers, values)
        if alien:
            return f"{name!r} is read by {', '.join(map(repr, alien))} as well"
        shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        factors = torch.ones(count, dtype=torch.float64)
        factors[rows] = torch.linspace(1.5, 3.0, len(rows), dtype=torch.float64)[shuffled]
        factors = factors.to(input_device(module))
        # The readers go on with the input that they had, so that all else (the choice of experts) stays as it was.
        before, reading = self.before[1], (*layers, *others)
        _, after = self.exact.run(outputs={name: factors}, watch=reading, instead=before)
        if any(reader not in after or after[reader].shape != before[reader].shape for reader in reading):
            return f"the input does not scale with {name!r}"
        channels = yield _agreed([_followed(before[reader], after[reader], factors) for reader in reading], count)
        if bool((channels == NEITHER).any()):
            return f"the input does not scale with {name!r}"
        return Fold(name, layers, others, channels.long(), offsets)

    # Proof

    def proved(self, candidates: Sequence[Fold | Refusal]) -> list[Fold | Refusal]:
        """Refuse every fold under which the block's float64 output changes."""
        folds = [item for item in candidates if isinstance(item, Fold)]
        if not folds or difference(self.before[0], self.folded(folds)) <= TOLERANCE:
            return list(candidates)
        return [self.alone(item) if isinstance(item, Fold) else item for item in candidates]

    def alone(self, fold: Fold) -> Fold | Refusal:
        change = difference(self.before[0], self.folded([fold]))
        reason = f"scaling {fold.producer!r} changes the output of the block by {change:.1e}: it is used elsewhere too"
        return fold if change <= TOLERANCE else Refusal(fold.layers, reason)

    def folded(self, folds: Sequence[Fold]) -> list[torch.Tensor]:
        """The block's output under random scales; columns of a linear layer are scaled by way of its input."""
        generator = torch.Generator().manual_seed(0)
        parameters: dict[str, torch.Tensor] = {}
        inputs: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        for fold in folds:
            drawn = torch.rand(len(fold.rows), generator=generator, dtype=torch.float64) * 1.5 + 0.5
            s = fold.feasible(drawn.to(input_device(self.block.get_submodule(fold.producer))))
            if self.is_linear(fold.producer):
                outputs[fold.producer] = 1 / fold.factor(self.block, s)
            else:
                parameters |= fold.divided(self.block, s)
            parameters |= fold.multiplied(self.block, s, fold.others) if fold.others else {}
            inputs |= dict.fromkeys(fold.layers, s)
        return self.exact.run(parameters, inputs, outputs)[0]

    def check(self, item: Mapping[str, Any]) -> None:
        """Raise ConfigError for names that are not in the block."""
        inspected = item.get("module2inspect")
        for name in [item["prev_op"], *item["layers"], item.get("inp"), inspected]:
            known = dict(self.block.named_modules())
            if name and name not in known:
                raise ConfigError(f"scaling_layers: a block has no module {name!r}. {did_you_mean(name, known)}")
        linears = [name for name in item["layers"] if name in self.graph.calls and self.is_linear(name)]
        if not item["layers"] or len(linears) < len(item["layers"]):
            raise ConfigError(
                f"scaling_layers: 'layers' names linear layers that the forward calls, got {item['layers']}."
            )


def answers(searches: Sequence[_Asking[Answer]]) -> list[Answer]:
    """Return the results of searches side by side; figures of one round are read from the device at once."""
    found: dict[int, Answer] = {}
    replies: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(searches)))
    while replies:
        asked: dict[int, torch.Tensor] = {}
        for index, reply in replies.items():
            try:
                # A generator that has not begun takes nothing.
                asked[index] = next(searches[index]) if reply is None else searches[index].send(reply)
            except StopIteration as end:
                found[index] = end.value
        replies = dict(zip(asked, on_host(list(asked.values())), strict=True))
    return [found[index] for index in range(len(searches))]


def on_host(measured: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Vectors of a device as float64 on the host, all in one read."""
    if not measured:
        return []
    device = measured[0].device
    whole = torch.cat([x.double().to(device) for x in measured]).cpu()
    return list(torch.split(whole, [len(x) for x in measured]))


def _followed(before: torch.Tensor, after: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """For each input channel the index of the factor that it took on, UNCHANGED or SILENT; or NEITHER for all.

    Args:
        before, after: What a layer reads without and with the factors, (rows, channels).
        factors: Distinct, (channels of what makes it,).
    """
    factors = factors.to(before.device)
    strong = before.abs() > 1e-6 * before.abs().amax()
    ratio = torch.where(strong, after / torch.where(strong, before, 1.0), float("nan"))
    low, high = ratio.nan_to_num(float("inf")).amin(0), ratio.nan_to_num(-float("inf")).amax(0)
    seen = strong.any(0)
    differ = seen & (high - low > _FOLLOWS * high.abs())
    order = factors.argsort()
    middle = torch.where(seen, (low + high) / 2, 1.0)
    place = torch.searchsorted(factors[order], middle - _FOLLOWS * middle.abs()).clamp_max(len(factors) - 1)
    index = order[place]
    same = (middle - 1).abs() <= _FOLLOWS
    strange = ((factors[index] - middle).abs() > 2 * _FOLLOWS * middle.abs()) & ~same
    found = torch.where(seen, torch.where(same, UNCHANGED, index), SILENT)
    return torch.where((differ | strange).any(), NEITHER, found)


def _agreed(followed: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """One channel map of all readers, or NEITHER for all channels.

    A channel that was always 0 is known from the others, or if all go one to one.
    """
    maps = torch.stack([one.to(followed[0].device) for one in followed])
    channels = maps.amax(0)
    fits = ((maps == channels) | (maps == SILENT)).all() & (channels != NEITHER).all()
    straight, silent = torch.arange(len(channels), device=channels.device), channels == SILENT
    one_to_one = ((channels == straight) | silent).all() if len(channels) == count else torch.zeros_like(fits)
    channels = torch.where(silent.any(), straight, channels)
    fits = fits & (one_to_one | ~silent.any()) & (channels >= 0).any()
    return torch.where(fits, channels, NEITHER)


def _offsets(norm: nn.Module, channels: int) -> _Asking[dict[str, float]]:
    """Name -> c of each parameter of a norm that acts on its output as (c + parameter) * x, or as + parameter (c = 0).

    Empty if the module is nothing of the kind. Measured: LayerNorm and most RMSNorms have c = 0, Gemma's c = 1.
    """
    parameters = dict(norm.named_parameters(recurse=False))
    if not parameters or any(p.shape != (channels,) for p in parameters.values()):
        return {}
    x = torch.randn(4, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zeros = {name: torch.zeros(channels, dtype=torch.float64, device=p.device) for name, p in parameters.items()}
    x = x.to(input_device(norm))
    try:
        start = in_float64(norm, zeros, x)
        moved = {name: in_float64(norm, zeros | {name: zeros[name] + 1}, x) - start for name in parameters}
    except (TypeError, RuntimeError, IndexError):  # takes more than one tensor
        return {}
    spread = torch.stack([(change - change[0]).abs().amax() for change in moved.values()])
    middle = torch.stack([(start / change).nanmedian() for change in moved.values()])
    measured = yield torch.cat([spread, middle])
    gains = [index for index in range(len(moved)) if float(measured[index]) > _FOLLOWS]
    if len(gains) != 1:
        return {}
    gain, offset = list(moved)[gains[0]], float(measured[len(moved) + gains[0]])
    return dict.fromkeys(parameters, 0.0) | {gain: round(offset, 6) + 0.0}


# Experts that no token of the recorded forward reached


def _sibling(name: str, called: Iterable[str]) -> str | None:
    """A called layer whose name differs only in numbers; its own name must be the same (Mixtral has w1, w2, w3)."""
    parts = name.split(".")

    def matches(other: str) -> bool:
        others = other.split(".")
        numbered = [re.sub(r"\d+", "0", part) for part in parts[:-1]] == [re.sub(r"\d+", "0", p) for p in others[:-1]]
        return numbered and (parts[-1] == others[-1] or (parts[-1].isdigit() and others[-1].isdigit()))

    return next((other for other in sorted(called) if matches(other)), None)


def _like_sibling(item: Fold | Refusal, sibling: str, name: str) -> list[Fold | Refusal]:
    """The item with `name` beside its sibling, or followed by a copy of it for the part of the block with `name`."""
    if sibling not in item.layers:
        return [item]
    parts, others = sibling.split("."), name.split(".")
    at = next(i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b) + 1
    here, there = ".".join(parts[:at]) + ".", ".".join(others[:at]) + "."
    if isinstance(item, Fold) and not item.producer.startswith(here):
        return [replace(item, layers=(*item.layers, name))]
    layers = tuple(there + layer.removeprefix(here) for layer in item.layers if layer.startswith(here))
    if isinstance(item, Fold):
        return [item, replace(item, producer=there + item.producer.removeprefix(here), layers=layers)]
    return [item, replace(item, layers=layers)]
