"""Masked positions count nowhere in a graph of one length either, whose batches cannot be cut.

    quantizers see   x[real]   of x: (batch, .., length, ..), (batch * length, ..), (batch * heads, length, ..)

Of scores (batch, heads, length, length) those of real queries are seen. What has none of these shapes counts whole:
pooled states, and heads of which there are as many as positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.model.calibration_data import ModelArguments, real_positions


@contextmanager
def observing_real_rows(graph: nn.Module, quantizers: Iterable[FakeQuantize]) -> Iterator[None]:
    """Within: quantizers of a graph observe rows of real positions alone, and hand on all."""
    arguments, real, whole = ModelArguments.of(graph), list[torch.Tensor](), dict[nn.Module, torch.Tensor]()

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real[:] = real_positions(kwargs or args, arguments)

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        if not real or not isinstance(module, FakeQuantize) or module.mode is not Mode.observe:
            return None
        whole[module] = args[0]
        return (rows_at(args[0], real), *args[1:])

    def after(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        return whole.pop(module, None)

    with ExitStack() as hooks:
        hooks.enter_context(graph.register_forward_pre_hook(begin, with_kwargs=True))
        for quantizer in quantizers:
            hooks.enter_context(quantizer.register_forward_pre_hook(before))
            hooks.enter_context(quantizer.register_forward_hook(after))
        yield


def rows_at(x: torch.Tensor, real: Iterable[torch.Tensor]) -> torch.Tensor:
    """What a tensor holds at real positions, of as many axes; all of it where it has none of the shapes.

    Args:
        x: Any tensor.
        real: (batch, length) bool on the CPU; the first that fits is taken, with all others of its shape.
    """
    masks = list(real)
    for first in masks:
        mask = torch.stack([other for other in masks if other.shape == first.shape]).any(0)
        batch, length = mask.shape
        places = mask.flatten().nonzero()[:, 0].to(x.device)
        axis = _axis(x, batch, length)
        if axis is not None:
            rows = x.movedim(axis, 1).flatten(0, 1).index_select(0, places)
            return rows[None].movedim(1, axis)
        if x.ndim > 1 and x.shape[0] == batch * length:
            return x.index_select(0, places)
        if x.ndim == 3 and x.shape[0] % batch == 0:
            apart = x.reshape(batch, -1, *x.shape[1:])
            found = rows_at(apart, [mask])
            if found is not apart:
                return found.flatten(0, 1)
    return x


def _axis(x: torch.Tensor, batch: int, length: int) -> int | None:
    """The axis of a tensor that goes along the positions; None where there is none, or it cannot be told."""
    axes = [axis for axis in range(1, x.ndim) if x.shape[axis] == length] if x.ndim and x.shape[0] == batch else []
    if len(axes) > 1 and not (x.ndim == 3 or axes == [2, 3]):  # scores of heads, whose queries come first
        return None
    return axes[0] if axes else None
