"""Folds: per-channel scales moved from the input of linear layers into what makes that input.

    W x = (W diag(s)) (x / s)        the columns of the readers times s, the channels of the producer divided by s

The producer is a norm (weight and bias; also where its gain is 1 + weight) or a linear layer (rows of weight and bias),
with anything in between that passes a positive factor on: products, reshapes, attention over its values, ReLU. Names
decide nothing. `quark.torch.algorithms.scaling.find_folds` finds folds and proves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from quark.torch.model.record_forward import is_linear

ROWS = 64
"""Rows of a weight that are scaled at once."""


@dataclass(frozen=True, eq=False)
class Fold:
    """A proved way to scale the input channels of some linear layers. Names are relative to the block.

    Attributes:
        producer: Module that makes the input.
        layers: Linear layers that read it.
        others: Further modules with a weight (out, channels) that read it and are scaled along (a router).
        rows: For each input channel the channel of the producer that feeds it, -1 for none: its s must be 1. Several
            channels may share one (grouped-query attention). On the host.
        offsets: For a norm: name of each parameter that is divided -> c, where it acts as (c + parameter).
        carried: What `rows` say, on the devices where it was asked for.
    """

    producer: str
    layers: tuple[str, ...]
    others: tuple[str, ...]
    rows: torch.Tensor
    offsets: dict[str, float] = field(default_factory=dict)
    carried: dict[torch.device, tuple[int, torch.Tensor]] = field(default_factory=dict, repr=False)

    def shared(self, statistic: torch.Tensor, reduce: str = "amax") -> torch.Tensor:
        """A statistic of each input channel, combined ("amax" or "mean") over channels that must have one s.

        Shape in and out: (channels,).
        """
        size, index = self._places(statistic.device)
        return statistic.new_zeros(size + 1).scatter_reduce(0, index, statistic, reduce, include_self=False)[index]

    def feasible(self, s: torch.Tensor) -> torch.Tensor:
        """The nearest s that the fold allows: the geometric mean where channels share one, 1 where it must be."""
        size, index = self._places(s.device)
        return torch.where(index < size, self.shared(s.log(), "mean").exp(), 1.0)

    def spread(self, of_producer: torch.Tensor, other: float) -> torch.Tensor:
        """For each input channel the value of the producer's channel that feeds it, or another where none does."""
        size, index = self._places(of_producer.device)
        return torch.cat([of_producer[:size], of_producer.new_full((1,), other)])[index]

    def _places(self, device: torch.device) -> tuple[int, torch.Tensor]:
        """How many channels of the producer there are up to the last that is read, and that of each input channel; one
        after them where there is none. Carried to a device once.
        """
        if device not in self.carried:
            size = int(self.rows.amax()) + 1
            self.carried[device] = size, torch.where(self.rows >= 0, self.rows, size).to(device)
        return self.carried[device]

    def apply(self, block: nn.Module, s: torch.Tensor) -> None:
        """Multiply the columns of the readers by s and divide the producer's channels by it, in place.

        Args:
            block: The block that the names belong to.
            s: Positive, (channels,), as `feasible` returns.
        """
        s, producer = s.float(), block.get_submodule(self.producer)
        with torch.no_grad():
            if is_linear(producer):
                for parameter in producer.parameters(recurse=False):
                    by = self.factor(block, s).to(parameter.device)
                    _rewrite(torch.div, parameter, by.unsqueeze(-1) if parameter.ndim == 2 else by)
            else:
                for name, value in self.divided(block, s).items():
                    block.get_parameter(name).copy_(value)
            for name in (*self.layers, *self.others):
                weight = block.get_parameter(f"{name}.weight")
                _rewrite(torch.mul, weight, s.to(weight.device))

    def divided(self, block: nn.Module, s: torch.Tensor) -> dict[str, torch.Tensor]:
        """Full name -> value of the producer's parameters after the division, in the dtype of s."""
        producer, factor = block.get_submodule(self.producer), self.factor(block, s)
        result = {}
        for name, parameter in producer.named_parameters(recurse=False):
            value, by = parameter.detach().to(s.dtype), factor.to(parameter.device)
            if is_linear(producer):
                result[name] = value / (by.unsqueeze(-1) if value.ndim == 2 else by)
            elif name in self.offsets:
                moved = (value + self.offsets[name]) / by - self.offsets[name]
                result[name] = torch.where(by == 1, value, moved)  # bit by bit as it was where nothing is to be done
        return {f"{self.producer}.{name}": value for name, value in result.items()}

    def factor(self, block: nn.Module, s: torch.Tensor) -> torch.Tensor:
        """Return the divisor of each channel of the producer's output."""
        size, index = self._places(s.device)
        channels = next(p.shape[0] for p in block.get_submodule(self.producer).parameters(recurse=False))
        read = s.new_ones(size + 1).scatter(0, index, s)[:size]
        return torch.cat([read, s.new_ones(channels - size)])

    def multiplied(
        self, block: nn.Module, s: torch.Tensor, names: tuple[str, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """Full name -> weights of the readers (all, or those named) with their columns times s, in the dtype of s."""
        weights = {f"{n}.weight": block.get_parameter(f"{n}.weight") for n in names or (*self.layers, *self.others)}
        return {name: weight.detach().to(s.dtype) * s.to(weight.device) for name, weight in weights.items()}


def _rewrite(operation: Callable[..., torch.Tensor], parameter: torch.Tensor, factors: torch.Tensor) -> None:
    """Write operation(parameter, factors), computed in the dtype of the factors, over a parameter.

    ROWS at a time: these stay in the cache, and no second copy of the parameter is made.
    """
    of_rows = torch.split(factors.expand_as(parameter), ROWS)
    for rows, own in zip(torch.split(parameter, ROWS), of_rows, strict=True):
        rows.copy_(operation(rows.to(factors.dtype), own))


@dataclass(frozen=True)
class Refusal:
    """Why the input of some linear layers cannot be scaled."""

    layers: tuple[str, ...]
    reason: str
