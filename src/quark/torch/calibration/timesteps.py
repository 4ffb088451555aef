"""Ranges and errors of a denoiser by timestep: one static scale serves all steps, and each step has a range of its own.

    max_b = max |x| of the batches of bucket b         spread = max over b of max_b / min over b of max_b

Buckets are equal parts of the timesteps that were seen. A spread of 4 leaves the narrowest bucket a fourth of the
codes, two bits less than the widest has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.core.checks import read
from quark.core.metrics import Comparison
from quark.torch.diffusion.component import TIMESTEPS
from quark.torch.layers.base import hook_input
from quark.torch.model.batches import run_batches
from quark.torch.model.calibration_data.model_arguments import positional_parameters
from quark.torch.model.calibration_data.recorded_steps import timestep_of

BUCKETS = 4
MUCH = 4.0
"""A spread from which on it is said: two bits."""


@dataclass(frozen=True)
class TimestepBucket:
    """Timesteps from `low` to `high`, both among those seen."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


def buckets_of(times: Sequence[float], most: int = BUCKETS) -> tuple[list[TimestepBucket], list[int]]:
    """The buckets of some timesteps, from high to low as a pipeline runs, and the number of that of each timestep."""
    low, high = min(times), max(times)
    width = (high - low) / most
    number = {time: min(most - 1, int((high - time) / width)) if width else 0 for time in times}
    used = sorted({*number.values()})
    members = {index: [time for time in times if number[time] == index] for index in used}
    found = [TimestepBucket(min(members[index]), max(members[index])) for index in used]
    return found, [used.index(number[time]) for time in times]


@dataclass(frozen=True)
class RangeByTimestep:
    """The range of one tensor: its name, and the largest magnitude in each bucket."""

    name: str
    largest: Sequence[float]

    @property
    def spread(self) -> float:
        """See above; 1 for a tensor of zeros."""
        least = min(self.largest)
        return max(self.largest) / least if least > 0 else 1.0


@dataclass
class RangesByTimestep:
    """The ranges that modules read, by the timestep of the call: see `noting_ranges`.

    Attributes:
        times: Of the calls that had one.
        call: The number among these of the call that runs; None: none does.
        largest: Name -> number of the call -> largest magnitude, where it was computed.
    """

    times: list[float] = field(default_factory=list)
    call: int | None = None
    largest: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def note(self, name: str, x: Any) -> None:
        """Take what a module reads in the current call."""
        if (call := self.call) is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
            of_calls, value = self.largest.setdefault(name, {}), x.detach().abs().amax()
            of_calls[call] = torch.maximum(of_calls[call], value) if call in of_calls else value

    def buckets(self) -> tuple[list[TimestepBucket], list[RangeByTimestep]]:
        """The buckets, and the tensors that were read in each of them, of the widest spread first."""
        if len({*self.times}) < 2:
            return [], []
        buckets, numbers = buckets_of(self.times)
        found = []
        for name, of_calls in self.largest.items():
            values = read(torch.stack([value.float() for value in of_calls.values()]))
            largest = [0.0] * len(buckets)
            for call, value in zip(of_calls, values, strict=True):
                largest[numbers[call]] = max(largest[numbers[call]], float(value))
            if {numbers[call] for call in of_calls} == {*range(len(buckets))}:
                found.append(RangeByTimestep(name, largest))
        return buckets, sorted(found, key=lambda one: -one.spread)

    def say(self) -> None:
        """One line in the log, where ranges differ much."""
        buckets, found = self.buckets()
        wide = [one for one in found if one.spread >= MUCH]
        if wide:
            each = ", ".join(f"{x:.3g} at {bucket}" for bucket, x in zip(buckets, wide[0].largest, strict=True))
            logger.warning(
                "%d of %d static ranges differ %g-fold or more between timesteps (most: %s, max|x| %s). One scale "
                "serves all steps. Possible: a scheme with dynamic inputs, or smoothing.",
                len(wide), len(found), MUCH, wide[0].name, each,
            )  # fmt: skip


@contextmanager
def noting_ranges(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[RangesByTimestep]:
    """Within: what the modules read first is noted by the timestep that the model is called with.

    A model whose forward takes no timestep is left alone.
    """
    found = RangesByTimestep()
    parameters = [parameter.name for parameter in positional_parameters(model.forward) or ()]
    if not {*parameters} & {*TIMESTEPS}:
        yield found
        return

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        time = timestep_of({**dict(zip(parameters, args, strict=False)), **kwargs})
        if time is not None:
            found.call = len(found.times)
            found.times.append(time)

    with model.register_forward_pre_hook(begin, with_kwargs=True), _noting(found, modules):
        yield found


def ranges_by_timestep(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> RangesByTimestep:
    """Run batches, and note what the modules of some names read."""
    with noting_ranges(model, {name: model.get_submodule(name) for name in names}) as found:
        run_batches(model, batches)
    return found


@contextmanager
def ranges_of_batches(modules: Mapping[str, nn.Module], batches: Sequence[Any]) -> Iterator[RangesByTimestep]:
    """Within: what modules read of a batch is noted once its number is the `call`; nothing without timesteps.

    The modules may run on all batches one after the other, as those of a block that is alone in memory do.
    """
    times = [timestep_of(batch) for batch in batches]
    found = RangesByTimestep([time for time in times if time is not None])
    with _noting(found, modules if len(found.times) == len(times) else {}):
        yield found


@contextmanager
def _noting(found: RangesByTimestep, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within: what modules read is noted."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(hook_input(module, partial(_note_input, found, name)))
        yield


def _note_input(found: RangesByTimestep, name: str, _: Any, x: Any) -> None:
    found.note(name, x)


class ErrorsByTimestep:
    """How near two denoisers are, by timestep."""

    def __init__(self) -> None:
        self._of: dict[float, Comparison] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def update(self, batch: Any, expected: Any, found: Any) -> None:
        """Add an output of both for a batch; one without a timestep is passed over."""
        time = timestep_of(batch)
        if time is not None:
            self._of.setdefault(time, Comparison()).update(expected, found)

    def rows(self, most: int = 8) -> list[tuple[TimestepBucket, float]]:
        """Buckets from high timesteps (noise) to low ones (pictures), and the SQNR of each in dB."""
        if not self._of:
            return []
        times = [*self._of]
        buckets, numbers = buckets_of(times, most)
        sums = [Comparison() for _ in buckets]
        for time, number in zip(times, numbers, strict=True):
            sums[number].signal += self._of[time].signal
            sums[number].noise += self._of[time].noise
        return [(bucket, one.sqnr) for bucket, one in zip(buckets, sums, strict=True)]
