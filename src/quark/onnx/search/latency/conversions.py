"""Conversions: what it takes to quantize, to decode and to lay out a tensor anew, from a few tensors that are timed.

    seconds = fixed + per_value * values

The two numbers are those of least squares of the relative errors, neither of them below zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.search.latency.kernels import ProfiledModel

KINDS = {
    "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
    "Transpose": "Transpose",
    "ReorderInput": "Reorder",
    "ReorderOutput": "Reorder",
}
"""Op type of a kernel -> the conversion that it is."""
SIDES = (8, 32, 128, 256)
"""Heights of the images that are converted: from what fits the first cache to what fits none."""
CHANNELS = 16
"""A multiple of what blocked layouts have in a block."""


@dataclass(frozen=True)
class Line:
    """Seconds of a conversion: `fixed + per_value * values`."""

    fixed: float
    per_value: float

    def __call__(self, values: int) -> float:
        return self.fixed + self.per_value * values


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (values, seconds)."""
    if not points:
        return Line(0.0, 0.0)
    values, seconds = (np.asarray(column, np.float64) for column in zip(*points, strict=True))
    weights = 1 / np.maximum(seconds, 1e-7)  # the runtime counts in microseconds
    columns = np.stack([np.ones_like(values), values], axis=1) * weights[:, None]
    fixed, slope = np.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if slope < 0:
        return Line(float(seconds.mean()), 0.0)
    if fixed < 0:
        relative = columns[:, 1]
        return Line(0.0, float(relative @ (seconds * weights) / (relative @ relative)))
    return Line(float(fixed), float(slope))


def probes(threads: int) -> Iterator[ProfiledModel]:
    """Convolutions in float and in integers, whose runs have every conversion."""
    for side in SIDES:
        feed = {"x": np.linspace(-1, 1, CHANNELS * side * side, dtype=np.float32).reshape(1, CHANNELS, side, side)}
        for quantized in (False, True):
            yield ProfiledModel(_convolution(side, quantized), feed, threads)


def lines(models: Sequence[ProfiledModel], times: Sequence[Mapping[str, float]]) -> dict[str, Line]:
    """The line of each conversion, from the kernels of the probes."""
    points: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS.values()}
    for model, seconds in zip(models, times, strict=True):
        for kernel in model.kernels:
            if kernel.op_type in KINDS:
                points[KINDS[kernel.op_type]].append((kernel.elements, seconds[kernel.name]))
    return {kind: fit(found) for kind, found in points.items()}


def _convolution(side: int, quantized: bool) -> ir.Model:
    shape = [1, CHANNELS, side, side]
    x = ir.val("x", ir.DataType.FLOAT, shape)
    weight = np.linspace(-1, 1, CHANNELS * CHANNELS, dtype=np.float32).reshape(CHANNELS, CHANNELS, 1, 1)
    constants, nodes = dict[str, ir.Value](), list[ir.Node]()

    def add(name: str, array: Any) -> ir.Value:
        constants[name] = ir.val(name, const_value=ir.tensor(array, name=name))
        return constants[name]

    def node(op_type: str, *inputs: ir.Value) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, name=f"{op_type}_{len(nodes)}"))
        nodes[-1].outputs[0].name = f"t{len(nodes)}"
        return nodes[-1].outputs[0]

    if quantized:
        scale = add("scale", np.float32(0.01))
        zero, signed = add("zero", np.uint8(128)), add("signed", np.int8(0))
        codes = add("codes", np.round(weight * 100).astype(np.int8))
        data = node("DequantizeLinear", node("QuantizeLinear", x, scale, zero), scale, zero)
        y = node("Conv", data, node("DequantizeLinear", codes, scale, signed))
        y = node("DequantizeLinear", node("QuantizeLinear", y, scale, zero), scale, zero)
    else:
        y = node("Conv", x, add("weight", weight))
    y.type, y.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph = ir.Graph([x], [y], nodes=nodes, initializers=list(constants.values()), opset_imports={"": 17}, name="probe")
    return ir.Model(graph, ir_version=8)
