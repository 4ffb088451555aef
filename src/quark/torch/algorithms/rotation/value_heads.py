"""The way of the values through attention: which rows of which layer become which inputs of the output projection.

With a single token, attention returns the values as they are: softmax of one score is 1. So each input of the output
projection is then equal to one output of the layer that makes the values, whatever that layer is called, however it
is fused with queries and keys, and whichever query heads share a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from quark.torch.layers.base import input_of
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.record_forward import is_linear


@dataclass(frozen=True)
class ValuePath:
    """Two linear layers between which values only move.

    Attributes:
        value, output: Their names.
        rows: For each input of `output`, the row of `value` that it comes from; shape (in_features of output,).
    """

    value: str
    output: str
    rows: torch.Tensor

    def heads(self, size: int) -> list[torch.Tensor] | None:
        """The rows of `value`, one tensor for each value head of `size`; None if heads of this size would overlap."""
        if len(self.rows) % size:
            return None
        heads = {tuple(head.tolist()) for head in self.rows.reshape(-1, size)}
        rows = [row for head in heads for row in head]
        return [torch.tensor(head) for head in sorted(heads)] if len(set(rows)) == len(rows) else None


def find_value_paths(block: nn.Module, run: Callable[[], Any]) -> list[ValuePath]:
    """The value paths of a block.

    Args:
        block: In float64, so that equal numbers come from the same row.
        run: Calls it on a single token with random values.
    """
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any], result: Any) -> None:
            # Routers are linear layers, of which some return more than scores.
            if isinstance(result, torch.Tensor) and result.numel() == result.shape[-1]:
                inputs[name], outputs[name] = input_of(args, kwargs).reshape(-1), result.reshape(-1)

        return hook

    with ExitStack() as hooks, torch.no_grad(), quantizers_off(quantized_layers(block).values()):
        for name in (name for name, module in block.named_modules() if is_linear(module)):
            hooks.enter_context(block.get_submodule(name).register_forward_hook(note(name), with_kwargs=True))
        run()
    pairs = [(value, output) for output in inputs for value in outputs if value != output]
    rows = _on_cpu([*inputs.values(), *outputs.values()])
    read = dict(zip(inputs, rows, strict=False))
    ordered = {value: source.sort() for value, source in zip(outputs, rows[len(inputs) :], strict=True)}
    found = ((value, output, _places(*ordered[value], read[output])) for value, output in pairs)
    return [ValuePath(value, output, places) for value, output, places in found if places is not None]


def _on_cpu(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Rows on the CPU, in one copy: a device would be waited for at each pair that is compared there."""
    if not rows:
        return []
    whole = torch.cat([x.to(rows[0].device) for x in rows]).cpu()
    return cast(Sequence[torch.Tensor], torch.split(whole, [len(x) for x in rows]))


def _places(ordered: torch.Tensor, order: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor | None:
    """Where each of `inputs` stands in what is sorted as `ordered`; None if one is not there."""
    at = torch.searchsorted(ordered, inputs).clamp(max=len(ordered) - 1)
    at = torch.where((ordered[at] - inputs).abs() <= (ordered[at - 1] - inputs).abs(), at, at - 1)
    near = (ordered[at] - inputs).abs() <= 1e-9 * inputs.abs()
    return order[at] if bool(near.all()) and bool((inputs != 0).all()) else None
