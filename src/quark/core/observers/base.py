"""Observer: a statistic of the values of a tensor that ends in a range.

`update(x)` collects, `merge(other)` adds what another observer saw, `range()` decides. The three are such that the
order of the data, the batch size and the number of workers cannot change the result: every statistic here is a
minimum, a maximum, a count or a sum of counts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from quark.core.array import Array, NumpyArray, dtype_name, namespace, on_cpu, to_numpy
from quark.core.checks import all_finite, check
from quark.core.granularity import PerTensor
from quark.core.quantize import quantize_scales, range_of
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, ConfigError, NonFiniteError


class Observer:
    """Base: the running minimum and maximum, which every range is checked against.

    Args:
        spec: The spec of the observed tensor; its `split` says which values share a range.

    Attributes:
        per_tensor_only: Whether the statistic has a single range (then another granularity raises ConfigError).
        count: Number of tensors seen.
    """

    per_tensor_only: ClassVar[bool] = False

    def __init__(self, spec: TensorSpec) -> None:
        if self.per_tensor_only and not isinstance(spec.split, PerTensor):
            raise ConfigError(
                f"The observer {type(self).__name__} has one range for a whole tensor; {spec.granularity} needs "
                "one of: min_max, pof2_min_max, pof2_min_mse, pof2_non_overflow."
            )
        self.spec = spec
        self.count = 0
        self.low: Array | None = None
        self.high: Array | None = None
        self.model_dtype = "float32"
        self._checked = -1  # `count` when the extremes were checked

    def update(self, x: Array) -> None:
        """Collect a tensor. Empty tensors count for nothing."""
        if 0 not in x.shape:
            self._saw(x, *range_of(x, self.spec))

    def merge(self, other: Observer) -> None:
        """Add what `other`, of the same class and spec, has seen."""
        if other.low is not None and other.high is not None:
            self._include(other.low, other.high)
            self.count += other.count
            self.model_dtype = other.model_dtype

    def state(self) -> dict[str, Array]:
        """Return the collected figures as arrays: saved, sent to another process, restored."""
        return {"count": np.asarray(self.count), "low": self.low, "high": self.high}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take what another observer collected, be it of another class that collected at least as much.

        Raises:
            CalibrationError: The state lacks what this statistic needs.
        """
        self.count = int(needed(state, "count", self))
        self.low, self.high = needed(state, "low", self), needed(state, "high", self)
        self._checked = -1

    def range(self) -> tuple[Array, Array]:
        """The range [low, high] that quantization should cover, shaped like the stored scale; float32.

        Raises:
            CalibrationError: nothing was observed.
            NonFiniteError: NaN or Inf was observed.
        """
        return self.extremes()

    def extremes(self) -> tuple[Array, Array]:
        """The exact minimum and maximum seen; raises as `range` does."""
        if self.low is None or self.high is None:
            raise CalibrationError("No values were observed: the calibration data never reached this tensor.")
        if self._checked != self.count:
            failure = NonFiniteError(f"The observed values hold NaN or Inf after {self.count} tensors.")
            check(all_finite(self.low, self.high), failure)
            self._checked = self.count
        return self.low, self.high

    def solved_from(self) -> list[Array]:
        """The arrays that `range` reads on the host, once all is observed; none where it is solved where they are."""
        return []

    def solve_from(self, arrays: Sequence[NumpyArray]) -> None:
        """Take these in their place, read from the device already."""

    def qparams(self) -> QParams:
        """Scale and zero point for the range."""
        low, high = self.range()
        params = qparams_from_range(low, high, self.spec, self.model_dtype)
        if self.spec.scale_spec is not None:
            second = qparams_from_range(params.scale.min(), params.scale.max(), self.spec.scale_spec)
            return quantize_scales(params, second, self.spec)
        return params

    def _saw(self, x: Array, low: Array, high: Array) -> None:
        """Take over the extremes of a tensor, in the shape of the scale."""
        self.model_dtype = dtype_name(x)
        self._include(low, high)
        self.count += 1

    def _include(self, low: Array, high: Array) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        if self.low.shape != low.shape:
            raise CalibrationError(
                f"The scale shape changed from {tuple(self.low.shape)} to {tuple(low.shape)} between batches: "
                f"{self.spec.granularity} of a static tensor needs batches of one shape. "
                "Possible: per_tensor, or dynamic quantization."
            )
        xp = namespace(low)
        self.low, self.high = xp.minimum(self.low, low), xp.maximum(self.high, high)

    def _as_range(self, low: float, high: float) -> tuple[Array, Array]:
        """A decided scalar range, cut to what was seen, as arrays like the statistic's."""
        assert self.low is not None
        zero = self.low * 0
        return zero + float(np.float32(low)), zero + float(np.float32(high))


def bring_to_host(observers: Sequence[Observer]) -> None:
    """Read what observers on a device solve their ranges from, all of it at once: the device is waited for once."""
    wanted = [(observer, observer.solved_from()) for observer in observers]
    wanted = [(observer, arrays) for observer, arrays in wanted if arrays and not on_cpu(arrays[0])]
    read = iter(_read_together([x for _, arrays in wanted for x in arrays]))
    for observer, arrays in wanted:
        observer.solve_from([next(read) for _ in arrays])


def _read_together(arrays: Sequence[Array]) -> list[NumpyArray]:
    """Tensors of a device as numpy arrays, by way of one copy."""
    if not arrays:
        return []
    torch = sys.modules["torch"]
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].itemsize)  # so that each begins where its type may
    parts = [arrays[i].to(arrays[0].device).reshape(-1).contiguous().view(torch.uint8) for i in order]
    whole, start, found = to_numpy(torch.cat(parts)), 0, {}
    for index, part in zip(order, parts, strict=True):
        x = arrays[index]
        flat = whole[start : start + len(part)].view(dtype_name(x))
        found[index], start = flat.reshape(tuple(x.shape)), start + len(part)
    return [found[index] for index in range(len(arrays))]


def needed(state: Mapping[str, Array], name: str, observer: Observer) -> Array:
    """An entry of a state. Raises CalibrationError where it is absent."""
    if state.get(name) is None:
        raise CalibrationError(f"{type(observer).__name__} needs {name!r}; what was collected has {sorted(state)}.")
    return state[name]


def host(x: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The values of x as float64 on the host, where ranges are solved (once, from small statistics)."""
    return to_numpy(x).astype(np.float64)
