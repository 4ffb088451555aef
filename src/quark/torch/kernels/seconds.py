"""Which function is fastest: alternating runs, the minimum of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

import torch

Clock = Callable[[], float]
"""Seconds; `time.perf_counter`, or what a test injects."""

RUNS = 5
"""Of each function at least."""

ENOUGH = 0.02
"""Seconds that short functions are run again for: the shortest of five runs of some microseconds is chance."""


def seconds_of(
    functions: Mapping[Hashable, Callable[[], object]], device: torch.device, clock: Clock = time.perf_counter
) -> dict[Hashable, float]:
    """The shortest of some runs of each function, which take turns, so that a busy moment hits all of them."""
    times: dict[Hashable, float] = {}
    for function in functions.values():
        function()  # the first call of a kernel compiles or allocates
    runs, begin = 0, time.perf_counter()
    while runs < RUNS or time.perf_counter() - begin < ENOUGH:
        runs += 1
        for name, function in functions.items():
            _wait(device)
            start = clock()
            function()
            _wait(device)
            times[name] = min(clock() - start, times.get(name, float("inf")))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
