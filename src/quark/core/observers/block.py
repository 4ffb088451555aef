"""Observers of the shared-exponent formats.

MX and BFP scales follow from the largest magnitude of a block, so the statistic is MinMax. MXDiffs compares, for each
block, the ceil exponent with the one below by squared error and keeps the better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quark.core.array import Array, astype, namespace
from quark.core.observers.base import Observer
from quark.core.quantize import dequantize, quantize
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import ScaleRule, TensorSpec
from quark.errors import CalibrationError

_NO_STATE = "mx_diffs keeps the values themselves: it has no state to save or to restore. Possible: block."


class BlockObserver(Observer):
    """Largest magnitude of each block, for MX, MX4/6/9, BFP16 and the two-level formats."""


class MXDiffsObserver(Observer):
    """Per block, ceil exponent or one less, by squared error summed over what was seen."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(replace(spec, scale_rule=ScaleRule.ceil))
        self.seen: list[Array] = []

    def update(self, x: Array) -> None:
        super().update(x)
        if 0 in x.shape:
            return
        # The better exponent depends on the final maximum, so the values are needed once it is known (weights).
        self.seen.append(x)

    def merge(self, other: Observer) -> None:
        super().merge(other)
        if isinstance(other, MXDiffsObserver):
            self.seen.extend(other.seen)

    def state(self) -> dict[str, Array]:
        raise CalibrationError(_NO_STATE)

    def restore(self, state: Mapping[str, Array]) -> None:
        raise CalibrationError(_NO_STATE)

    def qparams(self) -> QParams:
        """The scale of the lower error for each block."""
        low, high = self.range()
        upper = qparams_from_range(low, high, self.spec)
        xp = namespace(low)
        dtype = self.spec.dtype
        smallest = 2.0 ** (-127 if dtype.is_float else -127 - dtype.emax)  # the step at which an E8M0 exponent is -127
        lower = QParams(xp.where(upper.scale > smallest, upper.scale / 2, upper.scale))
        return QParams(xp.where(self._error(lower) < self._error(upper), lower.scale, upper.scale))

    def _error(self, params: QParams) -> Array:
        """Squared error of each part; float64, so that order and library do not decide between near errors."""
        total = 0.0
        for x in self.seen:
            y = dequantize(quantize(x, params, self.spec), params, self.spec)
            total = total + self.spec.split.sums((astype(x, "float64") - astype(y, "float64")) ** 2)
        return total
