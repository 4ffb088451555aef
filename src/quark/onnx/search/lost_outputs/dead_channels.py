"""dead_channels: channels that a layer has and nobody hears of, as training let their weights go to zero.

    dead    std(x of the channel) <= 1e-4 max over channels of std(x)

over the positions of some samples, x: what the layer gives after its bias, its normalization and its activation, so
that a channel is dead, too, where its activation never fires. A channel of 1e-4 has an eighth of a step of 8 bits even
where its weights have a scale for themselves; what is constant, a bias gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.algorithms.rescaling.gates import gate_of, is_pointwise
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.graph.edit import is_op, read_once
from quark.onnx.graph.model_file import is_constant, split_weights
from quark.onnx.graph.sessions import ask_for, open_session, run_sample
from quark.onnx.operators import result_axis

DEAD = 1e-4
"""Share of the largest deviation of a channel: most of what trained models have is above 1e-2, or below 1e-5."""
SAMPLES = 4
"""Samples that are run where a channel has few positions in one."""
_POSITIONS = 64
"""Values of a channel that tell its deviation."""
_AFTER = ("BatchNormalization", "Add", "Mul", "Relu", "LeakyRelu", "PRelu", "Clip", "HardSwish")
"""Op types that a layer is followed by, where their other inputs are constant."""


def dead_channels(model: ir.Model, layers: Collection[str], feeds: Sequence[Feed]) -> dict[str, NumpyArray]:
    """Find the dead channels of some layers of a float model.

    Args:
        model: The float model.
        layers: Names of its nodes; others are left out.
        feeds: Samples, of which as few are run as tell it.

    Returns:
        Of each layer that was found, which of its channels are dead, (channels,) of bool; a layer of which too few
        values were seen is left out.
    """
    ends: dict[str, tuple[str, int]] = {}
    for node in model.graph:
        axis = result_axis(node) if node.name in layers else None
        if axis is not None:
            ends[node.name or ""] = _end(node.outputs[0]).name or "", axis
    seen = _values(model, ends, feeds) if ends and feeds else {}
    return {name: _is_dead(np.concatenate(rows, 1)) for name, rows in seen.items() if _tells(rows)}


def _values(model: ir.Model, ends: Mapping[str, tuple[str, int]], feeds: Sequence[Feed]) -> dict[str, list[NumpyArray]]:
    """The values of some layers for each sample that was run, (channels, positions).

    Args:
        model: The float model.
        ends: The tensor of each layer, and the axis of its channels.
        feeds: Samples, of which as few are run as give enough values.
    """
    names = list(dict.fromkeys(tensor for tensor, _ in ends.values()))
    proto, weights = split_weights(model)
    ask_for(proto, names)
    session = open_session(proto, weights=weights)
    seen: dict[str, list[NumpyArray]] = {name: [] for name in ends}
    for feed in feeds[:SAMPLES]:
        arrays = dict(zip(names, run_sample(session, names, feed), strict=True))
        for name, (tensor, axis) in ends.items():
            rows = np.moveaxis(np.asarray(arrays[tensor], np.float64), axis, 0)
            seen[name].append(rows.reshape(len(rows), -1))
        if all(sum(rows.shape[1] for rows in each) >= _POSITIONS for each in seen.values()):
            break
    return seen


def _tells(rows: Sequence[NumpyArray]) -> bool:
    """Return True where the rows of some samples are of the same channels, and more than one value of each."""
    return len({len(each) for each in rows}) == 1 and sum(each.shape[1] for each in rows) > 1


def _is_dead(rows: NumpyArray) -> NumpyArray:
    """Which channels are dead, of all their values, (channels, values); none where nothing deviates."""
    deviation = np.nan_to_num(rows.std(1))
    return np.asarray(deviation <= DEAD * deviation.max()) & bool(deviation.max())


def _end(value: ir.Value) -> ir.Value:
    """The tensor after the bias, the normalization and the activation of a layer that gives `value`."""
    while True:
        if read_once(value):
            ((node, index),) = value.uses()
            others = [each for place, each in enumerate(node.inputs) if place != index and each is not None]
            if not is_op(node, *_AFTER) or not all(map(is_constant, others)):
                return value
            value = node.outputs[0]
        else:
            found = gate_of(value)
            if found is None or not is_pointwise(found[0]):
                return value
            value = found[2]
