"""The arguments of one block for one batch: run again on another hidden state, cut short, or put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from quark.core.checks import read
from quark.torch.model.batches import to_device

SHORT = 16
"""Tokens of one batch on which folds are found and proved."""
PLAIN = (bool, int, float, str, type(None))
"""Arguments that are compared by value."""
JOINED = 1e-2
"""Share of the largest output by which those of joined calls may differ: bfloat16 sums otherwise in larger products."""


@dataclass(frozen=True)
class Call:
    """The arguments of one block for one batch.

    Attributes:
        args, kwargs: As the model passed them; the hidden state is the first argument, or `key`.
        key: Name of the hidden state among kwargs; None: it is args[0], or the block is the whole model.
        device: Where it runs, of a call whose tensors wait on the host until then; None: where its tensors are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None = None
    device: torch.device | None = field(default=None, kw_only=True)

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden state, or the first argument of a whole model."""
        return self.kwargs[self.key] if self.key else self.args[0]

    def with_hidden(self, hidden: torch.Tensor) -> Call:
        """This call on another hidden state."""
        if self.key:
            return replace(self, kwargs={**self.kwargs, self.key: hidden})
        return replace(self, args=(hidden, *self.args[1:]))

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor], device: torch.device | None = None) -> Call:
        """This call with its tensors changed, to run on a device; None: where they are then."""

        def changed(x: Any) -> Any:
            return change(x) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(changed, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs, device=device)

    def to(self, device: torch.device) -> Call:
        """This call with its tensors on a device."""
        return self.with_tensors(lambda x: to_device(x, device))

    def loaded(self) -> Call:
        """This call with its tensors where it runs."""
        return self if self.device is None else self.to(self.device)

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of the block, where it runs."""
        here = self.loaded()
        return here.args, here.kwargs

    def run(self, module: nn.Module) -> torch.Tensor:
        """The hidden state that `module` returns."""
        args, kwargs = self.arguments()
        output = module(*args, **kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output


def short_call(module: nn.Module, call: Call, tokens: int | None = SHORT, rows: int = 1) -> Call:
    """The call for the first tokens of its first rows; see `short_calls`."""
    return short_calls(module, [call], tokens, rows)[0]


def short_calls(module: nn.Module, calls: Sequence[Call], tokens: int | None = SHORT, rows: int = 1) -> list[Call]:
    """The calls for the first tokens of their first rows.

    Every axis of an argument that is as long as the sequence, and the first one where it is as long as the batch, is
    cut; if the module does not take that, the call stays. A device is waited for once for all calls, seldom twice.

    Args:
        module: The block, which is run on what is cut.
        calls: With a hidden state of shape (rows, tokens, channels), or ids of shape (rows, tokens).
        tokens: How many; None: all.
        rows: How many.
    """
    return [call for call, _ in short_runs(module, calls, tokens, rows)]


def short_runs(
    module: nn.Module, calls: Sequence[Call], tokens: int | None = SHORT, rows: int = 1
) -> list[tuple[Call, torch.Tensor | None]]:
    """Return the calls of `short_calls`, each after the output of the module for it; None for a call that stays."""
    found: list[tuple[Call, torch.Tensor | None]] = [(call.loaded(), None) for call in calls]
    left = [*range(len(found))]
    for keep_last in (False, True):
        tried = {index: _cut(module, found[index][0], tokens, rows, keep_last) for index in left}
        ran = {index: short for index, short in tried.items() if short is not None}
        flags = read_flags([torch.isfinite(output).all() for _, output in ran.values()])
        fine = {index: short for (index, short), flag in zip(ran.items(), flags, strict=True) if flag}
        for index, short in fine.items():
            found[index] = short
        left = [index for index in left if index not in fine]
    return found


def _cut(
    module: nn.Module, call: Call, tokens: int | None, rows: int, keep_last: bool
) -> tuple[Call, torch.Tensor] | None:
    """A shorter call, and what the module gives for it, first; None where it does not take it, or is short.

    Args:
        keep_last: Whether the last axis of values is never cut.
    """
    if type(call) is not Call:
        return None  # it says itself what it runs
    hidden = call.hidden
    axis = -2 if hidden.is_floating_point() else -1
    if hidden.ndim != (3 if axis == -2 else 2):
        return None
    batch, length = hidden.shape[0], hidden.shape[axis]
    tokens = length if tokens is None else tokens
    if rows >= batch and tokens >= length:
        return None

    cut = partial(_cut_tensor, batch=batch, length=length, rows=rows, tokens=tokens, keep_last=keep_last)
    args, kwargs = tree_map_only(torch.Tensor, cut, (call.args, dict(call.kwargs)))
    head = hidden[:rows, :tokens]
    shorter = Call(args, kwargs, call.key).with_hidden(head)
    try:
        output = tree_leaves(shorter.run(module))[0]
    except (RuntimeError, ValueError, IndexError):
        return None
    return (shorter, output) if output.shape[:2] == head.shape[:2] else None


def _cut_tensor(x: torch.Tensor, batch: int, length: int, rows: int, tokens: int, keep_last: bool) -> torch.Tensor:
    """The first rows of an argument with one for each of the batch, and the first tokens along axes of the length."""
    axes = range(x.ndim - (1 if keep_last and x.is_floating_point() else 0))
    whole = [slice(tokens) if x.shape[i] == length and i in axes else slice(None) for i in range(x.ndim)]
    whole[:1] = [slice(rows)] if x.ndim > 1 and x.shape[0] == batch else whole[:1]
    return x[tuple(whole)]


class JoinedCalls:
    """Calls of one block, any of which are put together again and again: what is the same in all is joined once.

    What has as many rows as the hidden state is put together, and everything else must be equal. Whether a block takes
    that is its own affair: see `takes_joined`. On a device it waits once, here, for all comparisons.

    Args:
        calls: Of one block, one or more.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.flat = [tree_flatten((call.args, dict(call.kwargs))) for call in calls]
        self.first = self._first_equal()
        self.same: dict[int, set[int]] = {}
        self._once: dict[tuple[int, int, int], torch.Tensor] = {}
        self._compare()

    def of(self, picked: Sequence[int]) -> Call | None:
        """One call with the rows of all those; None where they differ in anything that has no row for each."""
        first = self.first[picked[0]]
        if type(self.calls[first]) is not Call:  # it says itself what it runs
            return self.calls[first].loaded() if len(picked) == 1 else None
        if any(self.first[index] != first for index in picked):
            return None
        leaves, structure = self.flat[first]
        joined = [self._leaf(first, place, picked) for place in range(len(leaves))]
        args, kwargs = tree_unflatten(joined, structure)
        return Call(args, kwargs, self.calls[first].key, device=self.calls[first].device).loaded()

    def _loaded(self, index: int, place: int) -> Any:
        """An argument of a call where that runs."""
        leaf, device = self.flat[index][0][place], self.calls[index].device
        return leaf if device is None else to_device(leaf, device)

    def _leaf(self, first: int, place: int, picked: Sequence[int]) -> Any:
        leaf = self.flat[first][0][place]
        if not self._has_rows(first, leaf):
            return leaf
        if place not in self.same[first]:
            return torch.cat([self._loaded(index, place) for index in picked])
        key = (first, place, len(picked))
        if key not in self._once:
            self._once[key] = torch.cat([self._loaded(first, place)] * len(picked))
        return self._once[key]

    def _has_rows(self, first: int, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == len(self.calls[first].hidden)

    def _first_equal(self) -> list[int]:
        """For each call the first one that differs from it in values of tensors alone."""
        if any(type(call) is not Call for call in self.calls):
            return [*range(len(self.calls))]
        first: list[int] = []
        for index, (leaves, structure) in enumerate(self.flat):
            equal = (
                other
                for other in dict.fromkeys(first)
                if self.flat[other][1] == structure and all(map(_is_like, leaves, self.flat[other][0]))
            )
            first.append(next(equal, index))
        return first

    def _compare(self) -> None:
        """See which tensors are the same in all calls, and set apart calls that differ in one without rows."""
        compared, flags, firsts = [], [], dict[tuple[int, int], torch.Tensor]()
        self.same = {first: set(range(len(self.flat[first][0]))) for first in self.first}
        for index, first in enumerate(self.first):
            for place, (leaf, other) in enumerate(zip(self.flat[index][0], self.flat[first][0], strict=True)):
                if leaf is self.calls[index].hidden:
                    self.same[first].discard(place)
                    continue
                if leaf is other or not isinstance(leaf, torch.Tensor):
                    continue
                compared.append((index, first, place))
                if (first, place) not in firsts:
                    firsts[first, place] = self._loaded(first, place)
                flags.append((self._loaded(index, place) == firsts[first, place]).all())
        for (index, first, place), is_same in zip(compared, read_flags(flags), strict=True):
            if not is_same and self._has_rows(first, self.flat[first][0][place]):
                self.same[first].discard(place)
            elif not is_same:
                self.first[index] = index
                self.same.setdefault(index, set())


def _is_like(leaf: Any, other: Any) -> bool:
    """Return True where two arguments are equal, or are tensors that differ in their values alone."""
    if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
        return leaf.shape == other.shape and leaf.dtype == other.dtype
    return leaf is other or (isinstance(leaf, PLAIN) and isinstance(other, PLAIN) and bool(leaf == other))


def read_flags(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Flags of any devices, in one read."""
    if not flags:
        return []
    device = flags[0].device
    return [bool(flag) for flag in read(torch.stack([flag.to(device) for flag in flags]))]


def joined_call(calls: Sequence[Call]) -> Call | None:
    """One call with the rows of all; None where they differ: see `JoinedCalls`."""
    return JoinedCalls(calls).of(range(len(calls)))


def takes_joined(module: nn.Module, calls: JoinedCalls) -> bool:
    """Return True where a block gives for two calls in one, to rounding, what it gives for each alone; it is run."""
    if len(calls.calls) < 2 or (joined := calls.of([0, 1])) is None:
        return False
    with torch.no_grad():
        apart = torch.cat([call.run(module) for call in calls.calls[:2]])
        try:
            given = joined.run(module)
        except (RuntimeError, ValueError, IndexError):
            return False
    return given.shape == apart.shape and bool(((given - apart).abs() <= JOINED * apart.abs().amax()).all())
