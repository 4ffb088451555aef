"""causes: what lost outputs come from, in figures, before a cure is looked for.

channels    weights of one scale: the largest |w| of each output channel; ratio of the largest to the tenth smallest
in a hundred, of those that are not dead (`dead_channels.py`). With a ratio r the small channels have 127 / r codes on
each side
outliers    an activation: ratio of its largest |x| to that which one value in a thousand is above
spectra     what a logarithm reads: ratio of its largest value to its median. One scale of 8 bits tells 255 steps
masks       a value that stands for minus infinity, far from all others of its tensor

What a softmax or a sigmoid gives has no outliers: its largest values are what it is for, and its range is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, read, split_weights
from quark.onnx.graph.output_parts import BOUNDED
from quark.onnx.graph.sessions import ask_for, open_session, run_sample
from quark.onnx.operators import LAYERS, output_axis
from quark.onnx.search.history import TimeBudget
from quark.onnx.search.lost_outputs.dead_channels import dead_channels

UNEVEN = 16.0
"""Ratio of channels from which on small ones have 8 codes or fewer on each side."""
OUTLYING = 16.0
"""Ratio of an outlier, likewise."""
STEPS = 255.0
"""Of one scale."""
MASK = 1e4
_SMALL = 10
"""Percent of the channels that are smaller than what the largest is compared with."""
_NAMED = 3


def tensor_causes(model: ir.Model, tensors: Sequence[str], feeds: Sequence[Feed], budget: TimeBudget) -> list[str]:
    """Describe each cause that lies in values in a sentence; none once the time is up.

    Args:
        model: The float model.
        tensors: In which most is lost.
        feeds: Samples, of which the first is run.
        budget: The time that is left.
    """
    found = list[str]()
    logs = {node.inputs[0].name or "": node.name or "" for node in model.graph if is_op(node, "Log") and node.inputs[0]}
    if feeds and budget.left() >= 0:
        for name, array in _arrays(model, (*tensors, *logs), feeds[0]).items():
            found += _spectrum(logs[name], array) if name in logs else _outliers(name, array)
    return found


def _arrays(model: ir.Model, names: Iterable[str], feed: Feed) -> dict[str, NumpyArray]:
    """The values of float tensors that nodes make, for a sample; none of those that lie from 0 to 1."""
    made = {value.name for node in model.graph if not is_op(node, *BOUNDED) for value in node.outputs}
    wanted = [name for name in dict.fromkeys(names) if name in made]
    proto, weights = split_weights(model)
    ask_for(proto, wanted)
    arrays = run_sample(open_session(proto, weights=weights), wanted, feed) if wanted else []
    return {
        name: array
        for name, array in zip(wanted, arrays, strict=True)
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size
    }


def uneven_channels(model: ir.Model, quantized: onnx.ModelProto | Path, feeds: Sequence[Feed]) -> str | None:
    """Describe in a sentence where channels of one scale differ; None where they do not.

    Args:
        model: The float model.
        quantized: What was made of it.
        feeds: Samples, of which a few are run.
    """
    after = read(quantized)
    uneven = [name for name, ratio in channel_ratios(after) if ratio >= UNEVEN]
    dead = dead_channels(model, uneven, feeds) if uneven else {}
    ratios = sorted(channel_ratios(after, dead), key=lambda each: -each[1])
    named = [f"{name} ({ratio:.0f} times)" for name, ratio in ratios if ratio >= UNEVEN]
    if not named:
        return None
    return (
        f"One scale serves channels of very different ranges in {len(named)} of {len(ratios)} weights: "
        f"{', '.join(named[:_NAMED])}; the small channels keep few codes of it"
    )


def channel_ratios(quantized: ir.Model, dead: Mapping[str, NumpyArray] | None = None) -> Iterator[tuple[str, float]]:
    """Yield (layer, ratio of its channels) of each layer whose weight has one scale, by its codes.

    Args:
        quantized: The model.
        dead: Of some layers, which channels are left out, (channels,) of bool.
    """
    for node in quantized.graph:
        codes = _codes(node.inputs[1]) if is_op(node, *LAYERS) and len(node.inputs) > 1 else None
        if codes is None or codes.shape[output_axis(node)] < 2:
            continue
        rows = np.moveaxis(codes, output_axis(node), 0)
        largest = np.maximum(np.abs(rows).reshape(len(rows), -1).max(1), 0.5)  # half a code is rounded to none
        left_out = (dead or {}).get(node.name or "")
        if left_out is not None and left_out.shape == largest.shape:
            largest = largest[~left_out]
        yield node.name or "", float(largest.max() / np.percentile(largest, _SMALL))


def _codes(weight: ir.Value | None) -> NumpyArray | None:
    """Return the codes of a matrix of integers under one scale, without their zero point; None of any other weight."""
    node = None if weight is None else weight.producer()
    if node is None or not node.op_type.endswith("DequantizeLinear"):
        return None
    codes, scale, *zero = (constant(value) for value in node.inputs)
    if codes is None or scale is None or scale.size > 1 or codes.ndim < 2 or codes.dtype.kind not in "iu":
        return None
    return np.asarray(codes.astype(np.float64) - (0 if not zero or zero[0] is None else zero[0]))


def _outliers(name: str, array: NumpyArray) -> list[str]:
    """A sentence about a tensor whose largest value is far from the others."""
    size = np.abs(array[np.isfinite(array)])
    usual = float(np.percentile(size, 99.9)) if size.size else 0.0
    if not usual or size.max() < OUTLYING * usual:
        return []
    peak = float(size.max())
    kind = "a mask, which stands for minus infinity" if peak >= MASK else "an outlier"
    return [f"{name} holds {kind}: its largest value {peak:.3g} is {peak / usual:.0f} times what 99.9 % stay below"]


def _spectrum(log: str, array: NumpyArray) -> list[str]:
    """A sentence about what a logarithm reads, where steps of one scale do not tell its usual values from 0."""
    median, largest = float(np.median(array)), float(array.max())
    if median <= 0 or largest < STEPS * median:
        return []
    return [
        f"The logarithm {log} reads a spectrum whose largest value is {largest / median:.0f} times the median: "
        f"{STEPS:.0f} equal steps leave nothing of that"
    ]
