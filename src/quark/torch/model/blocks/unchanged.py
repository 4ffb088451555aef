"""The part of a block that follows from its input alone, with modules that stay unchanged: its first norm, mostly.

A block that runs many times on the same inputs, while its linear layers change, need not compute that again: it is
kept for each batch where that takes little memory. Where it would take much, computing it takes little in comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.model.blocks.calls import Call
from quark.torch.model.blocks.forwards import forward_instead

MOST_BYTES = 1 << 26
"""Of all that is kept for a block."""


class Unchanged:
    """The outputs of modules without children for the hidden states of the calls of a block.

    Args:
        module: The block, in evaluation mode; it is run on the first call.
        calls: Its arguments, one for each batch.
        changing: Its modules that do not stay as they are.

    Attributes:
        given: Module -> what it gives, (rows, ...), for each batch.
    """

    def __init__(self, module: nn.Module, calls: Sequence[Call], changing: Sequence[nn.Module]) -> None:
        self.given: dict[nn.Module, list[torch.Tensor]] = {}
        waits = calls[0].device is not None  # it would have to be carried like the hidden state it follows from
        room = 0 if waits else MOST_BYTES
        with torch.no_grad():
            for reader, share in _readers(module, calls[0].loaded(), {id(layer) for layer in changing}).items():
                room -= int(share * sum(call.hidden.nbytes for call in calls))
                if room >= 0:
                    self.given[reader] = [reader(call.loaded().hidden) for call in calls]

    @contextmanager
    def of(self, hidden: torch.Tensor, picked: Sequence[int]) -> Iterator[None]:
        """Within: the modules give what they gave, for a hidden state that is that of these batches, put together."""
        with ExitStack() as undo:
            for reader, parts in self.given.items():
                whole = parts[picked[0]] if len(picked) == 1 else torch.cat([parts[index] for index in picked])
                undo.enter_context(forward_instead(reader, partial(_known, hidden, whole, reader.forward)))
            yield


def _known(hidden: torch.Tensor, given: torch.Tensor, forward: Any, x: torch.Tensor) -> torch.Tensor:
    return given if x is hidden else forward(x)


def _readers(module: nn.Module, call: Call, changing: set[int]) -> dict[nn.Module, float]:
    """Modules that read the hidden state and nothing else, and give something else of as many rows; how much larger."""
    found: dict[nn.Module, float] = {}

    def note(reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        alone = len(args) == 1 and args[0] is call.hidden and not kwargs
        other = isinstance(output, torch.Tensor) and output is not call.hidden
        if alone and other and output.shape[:1] == call.hidden.shape[:1]:
            found[reader] = output.nbytes / max(1, call.hidden.nbytes)

    with ExitStack() as hooks:
        for part in module.modules():
            still = id(part) not in changing and "forward" not in part.__dict__
            if still and part is not module and next(part.children(), None) is None:
                hooks.enter_context(part.register_forward_hook(note, with_kwargs=True))
        call.run(module)
    return found
