"""Masked positions count nowhere in a graph of one length either, whose batches cannot be cut.

Quantizers see the rows of real positions, see `quark.core.observers.real_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quark.core.array import NumpyArray
from quark.core.observers.real_rows import rows_at
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.model.calibration_data import ModelArguments, real_positions


@contextmanager
def observing_real_rows(graph: nn.Module, quantizers: Iterable[FakeQuantize]) -> Iterator[None]:
    """Within: quantizers of a graph observe rows of real positions alone, and hand on all."""
    arguments, real = ModelArguments.of(graph), list[NumpyArray]()
    whole: dict[nn.Module, torch.Tensor] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real[:] = [one.numpy() for one in real_positions(kwargs or args, arguments)]

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
