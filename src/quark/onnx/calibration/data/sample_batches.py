"""Samples of one file cut into batches, along the axis of each input on which they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from quark.core.array import NumpyArray
from quark.errors import CalibrationError
from quark.onnx.calibration.data.inputs import Feed, Input

Axes = dict[str, int | None]
"""Input -> the axis along which its samples lie; None: one value, which is that of every sample."""


def rebatch(feeds: Iterable[Feed], size: int | None, inputs: Mapping[str, Input]) -> Iterator[Feed]:
    """Feeds of `size` samples; the last may have fewer, and so has the last before a scalar changes.

    Args:
        feeds: Arrays by input.
        size: Samples in a batch; None: the size that the model gives to the axis of samples, or 1.
        inputs: Those of the model.

    Raises:
        CalibrationError: Inputs of one feed differ in their number of samples.
    """
    rest: Feed = {}
    axes: Axes = {}
    for feed in feeds:
        found = sample_axes(feed, inputs)
        if rest and (found != axes or any(axis is None and rest[n] != feed[n] for n, axis in axes.items())):
            yield rest
            rest = {}
        axes = found
        whole = {name: _joined(rest[name], array, axes[name]) for name, array in feed.items()} if rest else feed
        count = next(whole[name].shape[axis] for name, axis in axes.items() if axis is not None)
        step = size or _model_batch(axes, inputs)
        for start in range(0, count - step + 1, step):
            yield rows_of(whole, axes, start, start + step)
        rest = rows_of(whole, axes, count - count % step, count) if count % step else {}
    if rest:
        yield rest


def sample_axes(feed: Feed, inputs: Mapping[str, Input]) -> Axes:
    """The axis of samples: the first; where the inputs differ in it, the first whose size the model leaves open.

    So the state of a recurrent layer, [layers, batch, features], goes with an input [batch, time].

    Raises:
        CalibrationError: The inputs differ in both, or none has an axis.
    """
    first = {name: 0 if array.ndim else None for name, array in feed.items()}
    for axes in (first, {name: _first_open(array, inputs.get(name)) for name, array in feed.items()}):
        if len({feed[name].shape[axis] for name, axis in axes.items() if axis is not None}) == 1:
            return axes
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
    raise CalibrationError(
        "Samples are counted along the first axis, or the first that the model leaves open, and the inputs differ in "
        f"both: {shapes}. Possible: a folder with an .npz for each sample."
    )


def _first_open(array: NumpyArray, entry: Input | None) -> int | None:
    sizes = () if entry is None or entry.shape is None else entry.shape[: array.ndim]
    return next((axis for axis, size in enumerate(sizes) if not isinstance(size, int)), 0 if array.ndim else None)


def _model_batch(axes: Axes, inputs: Mapping[str, Input]) -> int:
    for name, axis in axes.items():
        shape = inputs[name].shape if name in inputs else None
        size = shape[axis] if shape and axis is not None and axis < len(shape) else None
        if isinstance(size, int) and size > 0:
            return size
    return 1


def _joined(before: NumpyArray, after: NumpyArray, axis: int | None) -> NumpyArray:
    return after if axis is None else np.concatenate([before, after], axis)


def rows_of(feed: Feed, axes: Axes, start: int, stop: int) -> Feed:
    """Some samples of a feed, whose axes are those of `sample_axes`."""
    return {
        name: array if (axis := axes[name]) is None else array[(slice(None),) * axis + (slice(start, stop),)]
        for name, array in feed.items()
    }
