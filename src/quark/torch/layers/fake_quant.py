"""FakeQuantize: the module that stands where a tensor is quantized. One class for weights, biases and activations.

Gradients pass; see learned_scales.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import nn

from quark.core.granularity import PerTensor
from quark.core.observers import OBSERVERS, Observer
from quark.core.quantize import compute_qparams, fake_quantize, fake_quantize_traceable, quantize_scales
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import Learning, TensorSpec
from quark.errors import CalibrationError
from quark.torch.config.tensor.observer_classes import TQTObserver
from quark.torch.layers.learned_scales import TrainableFakeQuantize, learned_scale, learned_value

Extras = Mapping[str, torch.Tensor]
"""Tensors of one role beside scale and zero point, by their suffix in the file (EXTRA_SUFFIXES)."""


class Mode(Enum):
    """The behaviour of a FakeQuantize with the tensor that passes."""

    off = "off"
    """Nothing: the float tensor goes on."""
    observe = "observe"
    """Collect statistics; the float tensor goes on."""
    quantize = "quantize"
    """Quantize and dequantize."""
    frozen = "frozen"
    """Nothing: the stored tensor holds quantized values already (a frozen weight)."""


class FakeQuantize(nn.Module):
    """Quantizes and dequantizes a tensor as its spec says.

    Args:
        spec: What to do.

    Attributes:
        scale, zero_point: Buffers, shaped `spec.split.scale_shape(x.shape)`; None until calibrated, and for ever
            where the tensor is dynamic or the type has none.
        scale_2, zero_point_2: The same of the second level.
        learned: What an optimizer trains where the spec asks for LSQ, until `stop_learning`; else None.
        threshold_observer: Has what an optimizer trains where the spec asks for TQT, until `stop_learning`; else None.
            It is of the documented class, by which scripts find the thresholds of a model.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    scale_2: torch.Tensor | None
    zero_point_2: torch.Tensor | None
    learned: nn.Parameter | None
    threshold_observer: TQTObserver | None

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mode = Mode.quantize
        self.observer: Observer | None = None
        for name in ("scale", "zero_point", "scale_2", "zero_point_2"):
            self.register_buffer(name, None)
        self.register_parameter("learned", None)
        self.register_module("threshold_observer", None)

    def forward(self, x: torch.Tensor, extras: Extras | None = None) -> torch.Tensor:
        """Return x quantized; `extras` are tensors that a loaded checkpoint keeps on the layer (second level)."""
        if self.mode in (Mode.off, Mode.frozen) or x.numel() == 0:
            return x
        if self.mode is Mode.observe:
            assert self.observer is not None
            self.observer.update(x.detach())
            return x
        params = self.params_for(x, second_level_of(extras or {}))
        if torch.compiler.is_exporting():
            return fake_quantize_traceable(x, params, self.spec)
        if torch.is_grad_enabled() and (x.requires_grad or self.trained is not None):
            y: torch.Tensor = TrainableFakeQuantize.apply(x, self.trained, params, self.spec)  # type: ignore[no-untyped-call]
            return y
        if torch.compiler.is_compiling():  # a graph has no addresses, by which views are told from copies
            return fake_quantize_traceable(x.detach(), params, self.spec)
        return fake_quantize(x.detach().contiguous(), params, self.spec)

    def params_for(self, x: torch.Tensor, second: QParams | None = None) -> QParams | None:
        """The scales that x is quantized with: the stored ones, or those of x itself."""
        stored = self.params
        second = second or (stored.second if stored else None) or self._second
        if not self.spec.dynamic:
            if stored is None and not self.spec.is_cast:
                raise CalibrationError("This tensor has no scale yet: run quantize_model with calibration data first.")
            return replace(stored, second=second) if stored and second else stored
        if self.spec.scale_spec is None or second is None:
            return None
        first = compute_qparams(x.detach(), replace(self.spec, scale_spec=None))
        return quantize_scales(first, second, self.spec)

    @property
    def params(self) -> QParams | None:
        """The stored scale and zero point, or None."""
        if self.trained is not None:
            self.scale = learned_scale(self.trained, self.spec)
        if self.scale is None:
            return None
        return QParams(self.scale, self.zero_point, self._second)

    @property
    def trained(self) -> nn.Parameter | None:
        """The value that an optimizer trains in place of the scale, or None."""
        return self.learned if self.threshold_observer is None else self.threshold_observer.log_threshold

    @property
    def needs_range(self) -> bool:
        """True where the tensor is static and its scale waits for calibration data."""
        missing = self.scale_2 if self.spec.dynamic else self.scale
        return self.spec.needs_calibration and missing is None

    @property
    def _second(self) -> QParams | None:
        return None if self.scale_2 is None else QParams(self.scale_2, self.zero_point_2)

    def store(self, params: QParams) -> None:
        """Keep scale and zero point; from now on the tensor is quantized with them."""
        self.scale, self.zero_point = params.scale, params.zero_point
        self._store_second(params.second)
        if self.spec.learning is not None:
            value = learned_value(params.scale, self.spec)
            if self.spec.learning is Learning.tqt:
                self.threshold_observer = TQTObserver(self.spec, log_threshold=value)
            else:
                self.learned = nn.Parameter(value)
            self.scale = learned_scale(value, self.spec)
        self.mode = Mode.quantize

    def forget(self) -> None:
        """Have no scale any more, as before calibration."""
        self.scale = self.zero_point = self.scale_2 = self.zero_point_2 = None
        self.learned = self.threshold_observer = None

    def stop_learning(self) -> None:
        """End training: the scale stays as it is."""
        if self.trained is not None:
            self.scale = learned_scale(self.trained, self.spec)
            self.learned = self.threshold_observer = None

    def _store_second(self, second: QParams | None) -> None:
        if second is not None:
            self.scale_2, self.zero_point_2 = second.scale, second.zero_point

    def start_observing(self) -> None:
        """Collect statistics from now on."""
        spec = self.spec
        if spec.dynamic:
            # Block scales are live; only the scale of the scales is static, and its range is that of the tensor.
            spec = replace(spec, granularity=PerTensor(), scale_spec=None, dynamic=False, observer="min_max")
        self.observer = OBSERVERS[spec.observer](spec)
        self.mode = Mode.observe

    def finish_observing(self) -> None:
        """Solve the range and quantize from now on. Raises what the observer's range() raises."""
        assert self.observer is not None
        if self.spec.dynamic:
            assert self.spec.scale_spec is not None
            low, high = self.observer.range()
            largest = torch.maximum(low.abs(), high.abs()) / self.spec.dtype.max
            self._store_second(qparams_from_range(largest, largest, self.spec.scale_spec))
        else:
            self.store(self.observer.qparams())
        self.observer, self.mode = None, Mode.quantize

    @staticmethod
    def share_observed(quantizers: Sequence[FakeQuantize]) -> None:
        """Let quantizers that observe have one statistic: that of all values that any of them saw."""
        quantizers[0].observe_as(quantizers)
        for quantizer in quantizers[1:]:
            quantizer.observer = quantizers[0].observer

    def observe_as(self, quantizers: Sequence[FakeQuantize]) -> None:
        """Have the statistic of all values that some quantizers saw, which observe, in place of one of its own."""
        seen = [quantizer.observer for quantizer in quantizers if quantizer.observer is not None]
        merged = type(seen[0])(seen[0].spec)
        for observer in seen:
            merged.merge(observer)
        self.observer = merged

    def extra_repr(self) -> str:
        return f"{self.spec}, {self.mode.value}"


def second_level_of(extras: Extras) -> QParams | None:
    """The second level among a layer's extra tensors."""
    return QParams(extras["scale_2"], extras.get("zero_point_2")) if "scale_2" in extras else None
