"""The nodes whose noise weighs most in the outputs stay in float, decided once for a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingQualifiesError
from quark.onnx.calibration.data.samples import Samples, required
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.search.evaluator import Judge
from quark.onnx.search.noise.sensitivity import OutputNoise, sensitivity


@dataclass(frozen=True)
class FloatNodes:
    """What recovery asks for.

    Attributes:
        share: Of the quantized nodes, at most; rounded up.
        runs: Float forwards of the first sample that the noise is measured with; others take half as many.
    """

    share: float = 0.05
    runs: int = 88

    @property
    def forwards(self) -> int:
        """How many forwards that is: the second sample has the groups that the first left, half as many as its runs."""
        return self.runs + self.runs // 2


Measured = list[tuple[Settings, OutputNoise]]
"""The noise of each tensor under some settings."""


def known_noise(settings: Settings, measured: Measured) -> tuple[OutputNoise, list[str]] | None:
    """What was measured under settings that differ in fewer nodes in float alone, and the nodes that came since.

    Each noise is that of one tensor in the float model, whatever else is quantized.
    """
    for before, noise in measured:
        specs = replace(settings.specs, exclude=before.specs.exclude)
        added = settings.specs.exclude[len(before.specs.exclude) :]
        names = [name for name in added if isinstance(name, str)]
        if replace(settings, specs=specs) == before and len(names) == len(added):
            return noise, names
    return None


def leave_in_float(
    model: ir.Model,
    config: FloatNodes,
    settings: Settings,
    data: Samples | None,
    statistics: Statistics | None = None,
    measured: Measured | None = None,
    judge: Judge | None = None,
) -> Settings:
    """Settings that exclude these nodes.

    Args:
        model: The float model, after `prepare`; not changed.
        config: How many.
        settings: What is quantized.
        data: Calibration data.
        statistics: Of the model on these; read, and completed.
        measured: Of the model on these, too; read, and completed.
        judge: Gives what outputs are compared by; None for the outputs themselves.

    Raises:
        NothingQualifiesError: No node alone, or with few others, takes noise away.
    """
    measured = [] if measured is None else measured
    known = known_noise(settings, measured)
    if known is None:
        samples = required(data, config)
        noise = sensitivity(model, settings, samples, runs=config.runs, statistics=statistics, judge=judge)
        measured.append((settings, noise))
        known = noise, []
    found, before = known
    count = len(found.of_nodes().keys() - set(before))
    nodes = found.worst_nodes(math.ceil(config.share * count), before)
    if not nodes:
        raise NothingQualifiesError("FloatNodes: the outputs have no noise that few nodes in float would take away.")
    logger.info("In float, for the noise that they put into the outputs: %s.", ", ".join(nodes))
    return replace(settings, specs=replace(settings.specs, exclude=(*settings.specs.exclude, *nodes)))
