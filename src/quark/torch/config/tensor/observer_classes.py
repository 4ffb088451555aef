"""The documented observer classes: nn.Module faces of core/observers.

A face is a name: `observer` is the statistic in core's OBSERVERS and `family` the QSchemeType it belongs to.
A class of one's own is one more row of the table below, wherever it stands:

    class PerChannelEntropy(ObserverBase, observer="my_entropy", family=QSchemeType.per_channel): ...
"""

# ruff: noqa: D101 - the classes of the table have the docstrings of their statistics

from __future__ import annotations

from functools import singledispatch
from typing import ClassVar

import torch
from torch import nn

from quark.core.granularity import Granularity, PerBlock, PerGroup, PerTensor
from quark.core.names.registry import Registry
from quark.core.observers import OBSERVERS
from quark.core.quantize import effective
from quark.core.scales import qparams_from_range, scale_of_magnitude
from quark.core.spec import Learning, ScaleType, TensorSpec
from quark.errors import ConfigError
from quark.torch.config.tensor.enums import QSchemeType

__all__ = [
    "LSQObserver", "ObserverBase", "PerBlock2DMinMaxObserver", "PerBlockBFPObserver", "PerBlockMXBufferReuseObserver",
    "PerBlockMXDiffsObserver", "PerBlockMXObserver", "PerChannelMinMaxObserver", "PerChannelPowOf2MinMSEObserver",
    "PerChannelPowOf2MinMaxObserver", "PerChannelPowOf2NonOverflowObserver", "PerGroupMinMaxObserver",
    "PerTensorDistributionObserver", "PerTensorEntropyObserver", "PerTensorHistogramObserver",
    "PerTensorHistogramObserverPro", "PerTensorLayerwisePercentileObserver", "PerTensorMSEObserver",
    "PerTensorMinMaxObserver", "PerTensorMovingAverageMinMaxObserver", "PerTensorPercentileObserver",
    "PerTensorPowOf2MinMSEObserver", "PerTensorPowOf2MinMaxObserver", "PerTensorPowOf2NonOverflowObserver",
    "PlaceholderObserver", "TQTObserver", "UniformScalingObserver",
]  # fmt: skip

OBSERVER_CLASSES: Registry[type[ObserverBase]] = Registry("observer class")
"""Class name, as JSON stores it, -> class. Subclasses enter when they are defined."""

SCALE_FORMATS = {
    "float32": ScaleType.float32,
    "e8m0": ScaleType.float8_e8m0fnu,
    "e4m3": ScaleType.float8_e4m3,
    "e5m3": ScaleType.float8_e5m3,
}
"""How `get_scale` names the types of scales."""

_TENSOR, _CHANNEL, _GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group


@singledispatch
def core_spec(qspec: object) -> TensorSpec:
    """The core spec of what an observer is made with. lowering.py registers what a QTensorConfig becomes.

    Raises ConfigError for anything else.
    """
    raise ConfigError(f"An observer is made with a QTensorConfig or a TensorSpec, got {qspec!r}.")


@core_spec.register
def _(qspec: TensorSpec) -> TensorSpec:
    return qspec


class ObserverBase(nn.Module):
    """Collects what passes through and ends in a scale and a zero point.

    Args:
        qspec: How the observed tensor is quantized: a QTensorConfig or a core TensorSpec.
        device: Accepted for compatibility; the statistic lives where the data is.
    """

    observer: ClassVar[str] = "min_max"
    family: ClassVar[QSchemeType | None] = None
    learning: ClassVar[Learning | None] = None

    def __init__(self, qspec: object, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.qspec = qspec
        self.statistic = OBSERVERS[self.observer](core_spec(qspec))

    def __init_subclass__(
        cls,
        observer: str | None = None,
        family: QSchemeType | None = None,
        learning: Learning | None = None,
    ) -> None:
        """Register the class under its name. What is not given is that of the class above.

        Args:
            observer: The statistic in core's OBSERVERS, which also says what it is.
            family: The qscheme whose tensors it observes; None fits all of them.
            learning: The scale is trained from what was observed, in this way.
        """
        super().__init_subclass__()
        cls.observer = observer or cls.observer
        cls.family = family or cls.family
        cls.learning = learning or cls.learning
        if cls.__doc__ is None and cls.observer in OBSERVERS:
            of_family = "" if cls.family is None else f" {cls.family.value}"
            cls.__doc__ = f"{cls.observer!r}{of_family}: {OBSERVERS[cls.observer].__doc__}"
        # Defined twice (a notebook cell run again): the last one counts.
        if cls.__name__ in OBSERVER_CLASSES:
            OBSERVER_CLASSES.unregister(cls.__name__)
        OBSERVER_CLASSES.register(cls.__name__, cls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collect x and return it unchanged."""
        self.statistic.update(x.detach())
        return x

    @property
    def min_val(self) -> torch.Tensor:
        """The smallest value seen of each part that has a scale, float32; inf before the first."""
        low = self.statistic.low
        return torch.tensor(torch.inf) if low is None else torch.as_tensor(low)

    @property
    def max_val(self) -> torch.Tensor:
        """The largest value seen of each part that has a scale, float32; -inf before the first."""
        high = self.statistic.high
        return torch.tensor(-torch.inf) if high is None else torch.as_tensor(high)

    def reset_state(self) -> None:
        """Forget everything seen: the next batch is the first."""
        self.statistic = OBSERVERS[self.observer](self.statistic.spec)

    def reset_min_max_vals(self) -> None:
        """Forget everything seen, as `reset_state`."""
        self.reset_state()

    def get_scale(self, amax: torch.Tensor, eps: float, scale_format: str) -> torch.Tensor:
        """The scales of parts whose largest magnitudes are known.

        Args:
            amax: Largest magnitudes, float32.
            eps: The scale of a part that is all zero.
            scale_format: "float32", "e8m0", "e4m3" or "e5m3": the type that a scale is rounded to.

        Raises:
            ConfigError: The format is unknown, or the observed type has no scale.
        """
        if scale_format not in SCALE_FORMATS:
            raise ConfigError(f"scale_format is {scale_format!r}; possible: {', '.join(SCALE_FORMATS)}.")
        if self.statistic.spec.is_cast:
            raise ConfigError(f"{self.statistic.spec.dtype} has no scale.")
        return scale_of_magnitude(amax, self.statistic.spec, SCALE_FORMATS[scale_format], eps)

    def calculate_qparams(
        self, min_val: torch.Tensor | None = None, max_val: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero point): float32, and int32 unless the zero point is a float.

        Args:
            min_val, max_val: The range of each part; both None: that of everything seen.

        Raises:
            CalibrationError: Nothing was seen.
            NonFiniteError: NaN or Inf was.
            ConfigError: One of the two is given without the other.
        """
        if (min_val is None) != (max_val is None):
            raise ConfigError("calculate_qparams takes both min_val and max_val, or neither.")
        if min_val is None:
            params = effective(self.statistic.qparams(), self.statistic.spec)
        else:
            params = effective(qparams_from_range(min_val, max_val, self.statistic.spec), self.statistic.spec)
        zero = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
        return params.scale, zero if self.statistic.spec.float_zero_point else zero.to(torch.int32)

    def _calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The name by which scripts ask for what was seen."""
        return self.calculate_qparams()


class UniformScalingObserver(ObserverBase):
    """Base of the observers of evenly spaced codes."""


class PlaceholderObserver(ObserverBase, observer="placeholder"):
    """For types without a scale: float16, bfloat16."""


# A table: a class a line. The first of a statistic and a family is the one that core specs become.
# fmt: off
class PerTensorMinMaxObserver(UniformScalingObserver, observer="min_max", family=_TENSOR): ...
class PerTensorMovingAverageMinMaxObserver(UniformScalingObserver, observer="moving_average", family=_TENSOR): ...
class PerTensorPercentileObserver(UniformScalingObserver, observer="percentile", family=_TENSOR): ...
class PerTensorLayerwisePercentileObserver(UniformScalingObserver, observer="layerwise_percentile", family=_TENSOR): ...
class PerTensorDistributionObserver(UniformScalingObserver, observer="distribution", family=_TENSOR): ...
class PerTensorMSEObserver(UniformScalingObserver, observer="mse", family=_TENSOR): ...
class PerTensorHistogramObserver(UniformScalingObserver, observer="histogram", family=_TENSOR): ...
class PerTensorHistogramObserverPro(UniformScalingObserver, observer="quantile_search", family=_TENSOR): ...
class PerTensorEntropyObserver(UniformScalingObserver, observer="entropy", family=_TENSOR): ...
class PerTensorPowOf2MinMaxObserver(UniformScalingObserver, observer="pof2_min_max", family=_TENSOR): ...
class PerTensorPowOf2MinMSEObserver(UniformScalingObserver, observer="pof2_min_mse", family=_TENSOR): ...
class PerTensorPowOf2NonOverflowObserver(UniformScalingObserver, observer="pof2_non_overflow", family=_TENSOR): ...

class PerChannelMinMaxObserver(UniformScalingObserver, observer="min_max", family=_CHANNEL): ...
class PerChannelPowOf2MinMaxObserver(UniformScalingObserver, observer="pof2_min_max", family=_CHANNEL): ...
class PerChannelPowOf2MinMSEObserver(UniformScalingObserver, observer="pof2_min_mse", family=_CHANNEL): ...
class PerChannelPowOf2NonOverflowObserver(UniformScalingObserver, observer="pof2_non_overflow", family=_CHANNEL): ...

class PerGroupMinMaxObserver(UniformScalingObserver, observer="min_max", family=_GROUP): ...
class PerBlock2DMinMaxObserver(UniformScalingObserver, observer="min_max", family=QSchemeType.per_block): ...

class PerBlockMXObserver(ObserverBase, observer="block", family=_GROUP): ...
class PerBlockMXBufferReuseObserver(PerBlockMXObserver): ...
class PerBlockMXDiffsObserver(ObserverBase, observer="mx_diffs", family=_GROUP): ...
class PerBlockBFPObserver(ObserverBase, observer="block", family=_GROUP): ...
# fmt: on


class LSQObserver(UniformScalingObserver, observer="mean_magnitude", learning=Learning.lsq):
    """Learned step size: where training starts; of any granularity."""


class TQTObserver(UniformScalingObserver, observer="three_sigma", family=_TENSOR, learning=Learning.tqt):
    """Trained quantization threshold: where training starts, unless a `TQTSpec` says otherwise.

    In a quantized model it holds what is trained: `_log_threshold`, a parameter, log2 of the threshold.

    Args:
        qspec, device: As every observer takes them.
        log_threshold: The first value of it; None: 0.
    """

    def __init__(
        self, qspec: object, device: torch.device | str | None = None, log_threshold: torch.Tensor | None = None
    ) -> None:
        super().__init__(qspec, device)
        first = torch.zeros((), device=device) if log_threshold is None else log_threshold
        self._log_threshold = nn.Parameter(first)

    @property
    def log_threshold(self) -> nn.Parameter:
        """Log2 of the threshold."""
        return self._log_threshold


def observer_class(name: str, split: Granularity) -> type[ObserverBase]:
    """The documented class of a core statistic: ("min_max", PerTensor()) -> PerTensorMinMaxObserver.

    Raises ConfigError for a combination that has no class.
    """
    families = {PerTensor: _TENSOR, PerGroup: _GROUP, PerBlock: QSchemeType.per_block}
    family = families.get(type(split), _CHANNEL)
    found = _face(name, family) or _face(name, None)
    if found is None:
        raise ConfigError(f"No observer class is defined for the statistic {name!r} {family.value}.")
    return found


def observer_of_scheme(qscheme: QSchemeType | str) -> type[ObserverBase] | None:
    """The min-max class of a qscheme: what configs older than `observer_cls` meant."""
    name = qscheme if isinstance(qscheme, str) else qscheme.name
    return next((_face("min_max", family) for family in QSchemeType if family.name == name), None)


def _face(name: str, family: QSchemeType | None) -> type[ObserverBase] | None:
    """The first class defined for a statistic; those that only repeat another come later in this file."""
    entries = (c for c in OBSERVER_CLASSES.values() if c is not UniformScalingObserver and c.learning is None)
    return next((c for c in entries if c.observer == name and c.family is family), None)
