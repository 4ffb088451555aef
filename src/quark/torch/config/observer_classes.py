"""The documented observer classes: nn.Module faces of core/observers.

A face is a name: `observer` is the statistic in core's OBSERVERS and `family` the QSchemeType it belongs to.
A class of one's own needs no more than these two:

    class PerChannelEntropy(ObserverBase):
        observer, family = "my_entropy", QSchemeType.per_channel  # "my_entropy" is in OBSERVERS
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import nn

from quark.core.granularity import Granularity, PerBlock, PerGroup, PerTensor
from quark.core.observers import OBSERVERS
from quark.core.quantize import effective
from quark.core.registry import Registry
from quark.core.spec import Learning, TensorSpec
from quark.errors import ConfigError
from quark.torch.config.enums import QSchemeType

OBSERVER_CLASSES: Registry[type[ObserverBase]] = Registry("observer class")
"""Class name, as JSON stores it, -> class. Subclasses enter when they are defined."""

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Defined twice (a notebook cell run again): the last one counts.
        if cls.__name__ in OBSERVER_CLASSES:
            OBSERVER_CLASSES.unregister(cls.__name__)
        OBSERVER_CLASSES.register(cls.__name__, cls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collect x and return it unchanged."""
        self.statistic.update(x.detach())
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero point) for everything seen: float32, and int32 unless the zero point is a float.

        Raises CalibrationError when nothing was seen, NonFiniteError when NaN or Inf was.
        """
        params = effective(self.statistic.qparams(), self.statistic.spec)
        zero = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
        return params.scale, zero if self.statistic.spec.float_zero_point else zero.to(torch.int32)


class UniformScalingObserver(ObserverBase):
    """Base of the observers of evenly spaced codes."""


class PlaceholderObserver(ObserverBase):
    """For types without a scale: float16, bfloat16."""

    observer = "placeholder"


class PerTensorMinMaxObserver(UniformScalingObserver):
    """Running minimum and maximum."""

    family = _TENSOR


class PerTensorMovingAverageMinMaxObserver(UniformScalingObserver):
    """Mean of the batches' minima and maxima."""

    observer, family = "moving_average", _TENSOR


class PerTensorPercentileObserver(UniformScalingObserver):
    """Cuts a share of outliers."""

    observer, family = "percentile", _TENSOR


class PerTensorLayerwisePercentileObserver(UniformScalingObserver):
    """Of a few percentiles the one with the least error."""

    observer, family = "layerwise_percentile", _TENSOR


class PerTensorDistributionObserver(UniformScalingObserver):
    """Mean and deviation, cut where a normal distribution loses least."""

    observer, family = "distribution", _TENSOR


class PerTensorMSEObserver(UniformScalingObserver):
    """Least squared error over shrunken ranges."""

    observer, family = "mse", _TENSOR


class PerTensorHistogramObserver(UniformScalingObserver):
    """Least squared error with both ends free."""

    observer, family = "histogram", _TENSOR


class PerTensorHistogramObserverPro(PerTensorHistogramObserver):
    """The same statistic as PerTensorHistogramObserver."""


class PerTensorEntropyObserver(UniformScalingObserver):
    """Least Kullback-Leibler divergence."""

    observer, family = "entropy", _TENSOR


class PerTensorPowOf2MinMaxObserver(UniformScalingObserver):
    """Nearest power of two of the min-max scale."""

    observer, family = "pof2_min_max", _TENSOR


class PerTensorPowOf2MinMSEObserver(UniformScalingObserver):
    """Power of two with the least squared error."""

    observer, family = "pof2_min_mse", _TENSOR


class PerTensorPowOf2NonOverflowObserver(UniformScalingObserver):
    """Smallest power of two at which nothing clips."""

    observer, family = "pof2_non_overflow", _TENSOR


class PerChannelMinMaxObserver(UniformScalingObserver):
    """Running minimum and maximum of each channel."""

    family = _CHANNEL


class PerChannelPowOf2MinMaxObserver(UniformScalingObserver):
    """Nearest power of two of each channel's min-max scale."""

    observer, family = "pof2_min_max", _CHANNEL


class PerChannelPowOf2MinMSEObserver(UniformScalingObserver):
    """Power of two with the least squared error, for each channel."""

    observer, family = "pof2_min_mse", _CHANNEL


class PerChannelPowOf2NonOverflowObserver(UniformScalingObserver):
    """Smallest power of two at which nothing clips, for each channel."""

    observer, family = "pof2_non_overflow", _CHANNEL


class PerGroupMinMaxObserver(UniformScalingObserver):
    """Running minimum and maximum of each group."""

    family = _GROUP


class PerBlock2DMinMaxObserver(UniformScalingObserver):
    """Running minimum and maximum of each tile of the last two axes."""

    family = QSchemeType.per_block


class PerBlockMXObserver(ObserverBase):
    """Largest magnitude of each block."""

    observer, family = "block", _GROUP


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """The same statistic as PerBlockMXObserver."""


class PerBlockMXDiffsObserver(ObserverBase):
    """Ceil exponent or the one below, whichever has the lower error."""

    observer, family = "mx_diffs", _GROUP


class PerBlockBFPObserver(ObserverBase):
    """Largest magnitude of each block, for BFP16."""

    observer, family = "block", _GROUP


class LSQObserver(UniformScalingObserver):
    """Learned step size: where training starts; of any granularity."""

    observer, learning = "mean_magnitude", Learning.lsq


class TQTObserver(UniformScalingObserver):
    """Trained quantization threshold: where training starts, unless a `TQTSpec` says otherwise."""

    observer, family, learning = "three_sigma", _TENSOR, Learning.tqt


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
