"""change: what a search does to settings, the same for all of them.

    (settings, situation) -> other settings; or as text why it is out of the question; or None: it would change nothing

An `Evaluator` says what a model by the changed settings gives and takes; what is better is kept (`recovery/search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from quark.core.metrics import Metric
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.search.evaluator import PartValues
from quark.onnx.search.latency.choose_nodes import PlacementChoice
from quark.onnx.search.noise.choices import Measured

_NOISY = 2.0
"""Time of a forward with noise added to its tensors, in times of one without."""


@dataclass(frozen=True)
class Goal:
    """The metric that a search betters, and its target.

    Attributes:
        metric: Of the worst output.
        target: Its value; None for as good as it gets.
        samples: On how many samples it is measured.
        output: Position of the output that is worst so far.
    """

    metric: Metric = field(default_factory=lambda: Metric("sqnr"))
    target: float | None = None
    samples: int = 1
    output: int = 0


@dataclass(frozen=True)
class Situation:
    """The state of a search before a step.

    Attributes:
        plain: The settings that recovery began with.
        share: Of the layers, for which there is time.
        goal: What is to be reached.
        prepared: The float model, with the samples to calibrate with and statistics in memory.
        lost: Whether the best model so far lost so much that the task suffers.
        noises: What nodes in float were chosen by before; read, and completed.
        measure: Gives the values by which a part of an output is compared; None for the part itself.
        forward: Seconds of a forward of the float model.
        seconds: For what a change runs itself.
        kernels: The kernels that were timed, to choose from; None where none were, or where time is no matter.
    """

    plain: Settings
    share: float = 1.0
    goal: Goal = field(default_factory=Goal)
    prepared: Prepared | None = None
    lost: bool = False
    noises: Measured = field(default_factory=list)
    measure: PartValues | None = None
    forward: float = 0.0
    seconds: float = math.inf
    kernels: PlacementChoice | None = None

    def skipped(self, forwards: int) -> str:
        """Why there is no time for forwards with noise, or ""."""
        needed = _NOISY * forwards * self.forward
        return (
            "" if needed <= self.seconds else f"skipped: about {needed:.0f} s, and {max(0.0, self.seconds):.0f} s left"
        )


Change = Callable[[Settings, Situation], Settings | str | None]
"""(the best settings so far, situation) -> what the step does to them."""
