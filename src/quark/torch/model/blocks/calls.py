"""The arguments of one block for one batch: run again on another hidden state, cut short, or put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

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
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden state, or the first argument of a whole model."""
        return self.kwargs[self.key] if self.key else self.args[0]

    def with_hidden(self, hidden: torch.Tensor) -> Call:
        """The same call on another hidden state."""
        if self.key:
            return replace(self, kwargs={**self.kwargs, self.key: hidden})
        return replace(self, args=(hidden, *self.args[1:]))

    def run(self, module: nn.Module) -> torch.Tensor:
        """The hidden state that `module` returns."""
        output = module(*self.args, **self.kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output


def short_call(module: nn.Module, call: Call, tokens: int | None = SHORT, rows: int = 1) -> Call:
    """The call for the first tokens of its first rows.

    Every axis of an argument that is as long as the sequence, and the first one where it is as long as the batch, is
    cut; if the module does not take that, the call stays.

    Args:
        module: The block, which is run on what is cut.
        call: With a hidden state of shape (rows, tokens, channels), or ids of shape (rows, tokens).
        tokens: How many; None: all.
        rows: How many.
    """
    if type(call) is not Call:
        return call  # it says itself what it runs
    hidden = call.hidden
    axis = -2 if hidden.is_floating_point() else -1
    if hidden.ndim != (3 if axis == -2 else 2):
        return call
    batch, length = hidden.shape[0], hidden.shape[axis]
    tokens = length if tokens is None else tokens
    if rows >= batch and tokens >= length:
        return call
    for keep_last in (False, True):

        def cut(x: Any, keep_last: bool = keep_last) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            axes = range(x.ndim - (1 if keep_last and x.is_floating_point() else 0))
            whole = [slice(tokens) if x.shape[i] == length and i in axes else slice(None) for i in range(x.ndim)]
            whole[:1] = [slice(rows)] if x.ndim > 1 and x.shape[0] == batch else whole[:1]
            return x[tuple(whole)]

        args, kwargs = tree_map(cut, (call.args, dict(call.kwargs)))
        head = hidden[:rows, :tokens]
        shorter = Call(args, kwargs, call.key).with_hidden(head)
        try:
            output = tree_leaves(shorter.run(module))[0]
        except (RuntimeError, ValueError, IndexError):
            continue
        if output.shape[:2] == head.shape[:2] and bool(torch.isfinite(output).all()):
            return shorter
    return call


def joined_call(calls: Sequence[Call]) -> Call | None:
    """One call with the rows of all; None where they differ in anything that has no row for each.

    What has as many rows as the hidden state is put together, and everything else must be equal. Whether a block takes
    that is its own affair: see `takes_joined`.

    Args:
        calls: Of one block, one or more.
    """
    flat = [tree_flatten((call.args, dict(call.kwargs))) for call in calls]
    if any(structure != flat[0][1] for _, structure in flat):
        return None
    rows = len(calls[0].hidden)
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            if any(leaf is not first and not (isinstance(leaf, PLAIN) and leaf == first) for leaf in leaves):
                return None
            joined.append(first)
        elif any(leaf.shape != first.shape or leaf.dtype != first.dtype for leaf in leaves):
            return None
        elif first.ndim and len(first) == rows:
            joined.append(torch.cat(leaves))
        elif all(leaf is first or torch.equal(leaf, first) for leaf in leaves):
            joined.append(first)
        else:
            return None
    args, kwargs = tree_unflatten(joined, flat[0][1])
    return Call(args, kwargs, calls[0].key)


def takes_joined(module: nn.Module, calls: Sequence[Call]) -> bool:
    """Whether a block gives for the calls in one what it gives for one after the other, to rounding; it is run."""
    joined = joined_call(calls)
    if joined is None:
        return False
    with torch.no_grad():
        apart = torch.cat([call.run(module) for call in calls])
        try:
            given = joined.run(module)
        except (RuntimeError, ValueError, IndexError):
            return False
    return given.shape == apart.shape and bool(((given - apart).abs() <= JOINED * apart.abs().amax()).all())
