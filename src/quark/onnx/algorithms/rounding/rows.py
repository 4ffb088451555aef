"""The rows that a layer is trained on, gathered from a visit of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.solvers.reconstruct import Activation, Rows
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import Visit
from quark.onnx.algorithms.rounding.patches import Product
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.graph.pattern import clip_bounds

_ACTIVATED_ROWS = 1 << 14
"""Targets that go through the activation at a time."""


@dataclass(frozen=True)
class Space:
    """Where rows wait.

    Attributes:
        bytes, rows: Most of them, of which every sample gets its share; None for no bound.
        folder: A folder for files that hold them; None for memory.
    """

    bytes: int | None
    rows: int | None = None
    folder: Path | None = None

    def empty(self, name: str, shape: tuple[int, ...]) -> NumpyArray:
        """An array to be filled, float32."""
        if self.folder is None:
            return np.empty(shape, np.float32)
        return np.lib.format.open_memmap(self.folder / f"{name}.npy", "w+", np.float32, shape)


def gather(
    visit: Visit, product: Product, activation: Activation | None, share: float, space: Space, seed: int
) -> Rows:
    """Rows of numpy arrays: some positions of every sample, in random order.

    Args:
        visit: Of a layer.
        product: What its rows are.
        activation: What follows it, which the targets have gone through.
        share: Of the inputs that come from the quantized model: 1 and 0 leave the others away.
        space: Where the rows wait, and how many may.
        seed: Of the choice.

    Raises:
        CalibrationError: There is no output at all.
    """
    groups, outputs, columns = product.matrix(visit.layer.weight).shape
    sizes = [(len(y), math.prod(product.shape(y))) for y in map(np.atleast_2d, visit.outputs)]
    mixes = 0 < share < 1
    limit = _positions_per_sample(sizes, space, 4 * groups * (columns * (1 + mixes) + outputs))
    starts = np.cumsum([0, *(min(limit, positions) for count, positions in sizes for _ in range(count))])
    inputs = space.empty("inputs", (int(starts[-1]), groups * columns))
    targets = space.empty("targets", (len(inputs), groups * outputs))
    filled = [(inputs, visit.inputs if share > 0 else visit.float_inputs)]
    if mixes:
        filled.append((space.empty("floats", inputs.shape), visit.float_inputs))
    random = np.random.default_rng(seed)
    start = 0
    for feed, (count, positions) in enumerate(sizes):
        # A MatMul may read a vector: one sample of one position.
        y = np.atleast_2d(visit.outputs[feed])
        xs = [(array, np.atleast_2d(np.asarray(source[feed], np.float32))) for array, source in filled]
        shape = product.shape(y)
        for sample in range(count):
            taken = random.permutation(positions)[:limit]
            part = slice(start, start + len(taken))
            for array, x in xs:
                array[part] = product.rows(x, sample, shape, taken)
            targets[part] = product.outputs(y, sample, taken)
            start = part.stop
    if activation is not None:
        for begin in range(0, len(targets), _ACTIVATED_ROWS):
            part = slice(begin, begin + _ACTIVATED_ROWS)
            targets[part] = activation(targets[part])
    return Rows(inputs, targets, starts.tolist(), filled[1][0] if mixes else None)


def _positions_per_sample(sizes: Sequence[tuple[int, int]], space: Space, row_bytes: int) -> int:
    """How many positions of a sample become rows, at least 1.

    Args:
        sizes: Samples, and positions of each, of every feed.
        space: Its bounds hold for all samples together.
        row_bytes: What a row takes.

    Raises:
        CalibrationError: There is no sample, or none has a position.
    """
    samples = sum(count for count, _ in sizes)
    widest = max((positions for _, positions in sizes), default=0)
    if not samples or not widest:
        raise CalibrationError("the calibration data gives it no output")
    bounds = [widest]
    if space.bytes is not None:
        bounds.append(space.bytes // row_bytes // samples)
    if space.rows is not None:
        bounds.append(space.rows // samples)
    return max(1, min(bounds))


def activation_of(node: ir.Node | None, outputs: int) -> Activation | None:
    """A Relu, Clip, LeakyRelu or PRelu as one formula; None for none, or one that differs from position to position."""
    if node is None:
        return None
    if node.op_type == "Relu":
        return Activation(low=0.0)
    if node.op_type == "LeakyRelu":
        return Activation(slope=float(node.attributes.get_float("alpha", 0.01) or 0.0))
    if node.op_type == "Clip":
        low, high = clip_bounds(node)
        return None if math.isnan(low) or math.isnan(high) else Activation(low, high)
    slope = np.ravel(constant(node.inputs[1])) if is_constant(node.inputs[1]) else np.empty(0)
    return Activation(slope=np.asarray(slope, np.float32)) if slope.size in (1, outputs) else None
