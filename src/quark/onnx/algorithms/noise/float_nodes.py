"""The nodes whose noise weighs most in the outputs stay in float, decided once for a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.errors import NothingQualifiesError
from quark.log import logger
from quark.onnx.algorithms.noise.sensitivity import sensitivity
from quark.onnx.calibration.data.samples import Samples, required
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings


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


def leave_in_float(
    model: ir.Model,
    config: FloatNodes,
    settings: Settings,
    data: Samples | None,
    statistics: Statistics | None = None,
) -> Settings:
    """Settings that exclude these nodes.

    Args:
        model: The float model, after `prepare`; not changed.
        config: How many.
        settings: What is quantized.
        data: Calibration data.
        statistics: Of the model on these; read, and completed.

    Raises:
        NothingQualifiesError: No node alone, or with few others, takes noise away.
    """
    found = sensitivity(model, settings, required(data, config), runs=config.runs, statistics=statistics)
    nodes = found.worst_nodes(math.ceil(config.share * len(found.of_nodes())))
    if not nodes:
        raise NothingQualifiesError("FloatNodes: the outputs have no noise that few nodes in float would take away.")
    logger.info("In float, for the noise that they put into the outputs: %s.", ", ".join(nodes))
    return replace(settings, specs=replace(settings.specs, exclude=(*settings.specs.exclude, *nodes)))
