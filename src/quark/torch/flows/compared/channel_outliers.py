"""The channels of what layers read that are far larger than the others, of any module.

    outlier: max |x_c| > 6 median over c of max |x_c|       (`ChannelMaxima`)

One scale for all channels is for the largest: beside an outlier of 16 times the others, these have 4 bits less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.core.array import to_numpy
from quark.errors import CalibrationError, ConfigError, did_you_mean
from quark.report.figures import ChannelMaxima, channel_bars
from quark.report.page import PageTable
from quark.report.shown import Shown
from quark.torch.flows.compared.coded_layers import rotated_input
from quark.torch.layers import QuantLayer, layer_class
from quark.torch.layers.base import hook_input
from quark.torch.model.batches import run_batches
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.passes import while_prepared


@dataclass(frozen=True, repr=False)
class ChannelOutliers(Shown):
    """The largest magnitude of each channel of what layers read; prints as a table, in a notebook with pictures.

    Attributes:
        layers: Name -> its channels; those that are shown come first.
        shown: How many layers are shown.
    """

    layers: Mapping[str, ChannelMaxima]
    shown: int = 6

    def drawn(self) -> Sequence[str]:
        """A picture of each layer that is shown, as SVG. Raises MissingDependencyError without matplotlib."""
        return [channel_bars(each) for each in [*self.layers.values()][: self.shown]]

    def tables(self) -> Sequence[PageTable]:
        """The layers that are shown."""
        rows = [
            (each.layer, str(len(each.values)), f"{each.median:.3g}", f"{float(each.values.max()):.3g}",
             str(len(each.outliers)), each.named, f"{each.outlier_share:.0%}")
            for each in [*self.layers.values()][: self.shown]
        ]  # fmt: skip
        some = "" if len(rows) == len(self.layers) else f", {len(rows)} of {len(self.layers)} layers"
        headers = (
            "layer",
            "channels",
            "median",
            "largest",
            "outliers",
            "channel (largest |x|)",
            "range of outliers alone",
        )
        return [PageTable(headers, rows, f"Outliers by channel of the inputs{some}")]


def channel_outliers(model: nn.Module, batches: Iterable[Any], layers: Sequence[str] | None = None) -> ChannelOutliers:
    """Find the channels of the inputs of layers that are far larger than the others.

    Args:
        model: Float or quantized; its linear layers and convolutions are looked at. It stays as it is.
        batches: As `quantize_model` takes them; positions that a mask leaves out do not count.
        layers: Names, in the order in which they are shown, such as `worst` of `layer_errors`. Those that read no float
            values, or did not run, are left out. None: all, first those whose largest channel is most times the median.

    Raises:
        ConfigError: The model has no layer of a name.
        CalibrationError: No batch, or one that the model does not take.
    """
    with while_prepared(model, lambda name: True):  # each expert is layers of its own
        there = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, QuantLayer) or layer_class(module) is not None
        }
        unknown = next((name for name in layers or () if name not in there), None)
        if unknown is not None:
            raise ConfigError(f"channel_outliers: there is no layer {unknown!r}. {did_you_mean(unknown, there)}")
        wanted = there if layers is None else {name: there[name] for name in layers}
        found: dict[str, torch.Tensor] = {}
        with noting_channels(wanted, found):
            count = run_batches(model, calibration_data(model, batches) or ())
    if not count:
        raise CalibrationError("channel_outliers: there is no batch; at least one is needed.")
    known = of_noted(found, wanted)
    if layers is None:
        known = ChannelOutliers(dict(sorted(known.layers.items(), key=lambda item: -item[1].spread)))
    return known


def of_noted(found: Mapping[str, torch.Tensor], order: Iterable[str]) -> ChannelOutliers:
    """Return what was noted of layers, in an order of names; those without values are left out."""
    values = {
        name: np.nan_to_num(to_numpy(found[name].cpu()), nan=math.inf, posinf=math.inf)
        for name in order
        if name in found
    }
    return ChannelOutliers({name: ChannelMaxima(name, each) for name, each in values.items()})


@contextmanager
def noting_channels(layers: Mapping[str, nn.Module], found: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within: the largest magnitude of each channel that layers read is added to `found`, one float32 vector by name.

    The channels of a quantized layer are those that its quantizer reads.
    """
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(hook_input(layer, partial(_note, found, name)))
        yield


def _note(found: dict[str, torch.Tensor], name: str, layer: nn.Module, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
        return
    x = rotated_input(layer, x.detach())[None]  # one axis more, so that there is always one to reduce
    spatial = len(getattr(layer, "kernel_size", ()))
    others = [axis for axis in range(x.ndim) if axis != x.ndim - 1 - spatial]
    largest = torch.linalg.vector_norm(x, math.inf, others).float()
    found[name] = torch.maximum(found[name], largest) if name in found else largest
