"""The call of a block on a part of its batch: enough to see what the block does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from quark.torch.model.blocks import Call

TOKENS = 16
"""Tokens of one batch on which folds are found and proved."""


def short_call(module: nn.Module, call: Call, tokens: int | None = TOKENS, rows: int = 1) -> Call:
    """The call for the first tokens of its first rows.

    Every axis of an argument that is as long as the sequence, and the first one where it is as long as the batch, is
    cut; if the module does not take that, the call stays.

    Args:
        module: The block, which is run on what is cut.
        call: With a hidden state of shape (rows, tokens, channels), or ids of shape (rows, tokens).
        tokens: How many; None: all.
        rows: How many.
    """
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
