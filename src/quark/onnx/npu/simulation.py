"""Operators as the DPU computes them, so that calibration and accuracy see what the NPU will do.

    LeakyRelu       alpha = round(256 alpha) / 256
    Sigmoid         HardSigmoid with alpha 1/6 and beta 1/2
    HardSigmoid     (alpha 1/6) times 2731 * 6 / 16384
    AveragePool, ReduceMean     a mean of N values is a sum times k / 2^n: times N k / 2^n

    Clip            bounds rounded to integers in [-128, 127]
    Softmax, InstanceNormalization     in bfloat16: onnx_ops/dpu.py

    N       3x3    5x5      6x6      7x7       14x14       any other size
    N k/2^n 63/64  250/256  252/256  1029/1024 4116/4096   k/2^n nearest to 1/N, 2^n < 128 N

A factor is a Mul after the operator: the DPU's multiplier, not an operator of its own, so nothing is quantized
between the two and the constant stays float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.errors import ConfigError
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import axes_of, is_op
from quark.onnx.graph.model_file import infer_shapes
from quark.onnx.graph.pattern import clip_bounds
from quark.onnx.placement.placement import FACTOR
from quark.onnx.placement.select_nodes import select_nodes
from quark.onnx_ops.graph_writer import GraphWriter, producer_of
from quark.onnx_ops.operators import Operator, dpu_instance_norm, dpu_softmax

_MEAN_FACTORS = {(3, 3): 63 / 64, (5, 5): 250 / 256, (6, 6): 252 / 256, (7, 7): 1029 / 1024, (14, 14): 4116 / 4096}
_HARD_SIGMOID_FACTOR = 2731 * 6 / 16384


def simulate(model: ir.Model, settings: Settings) -> int:
    """Apply the conversions that the settings name to the nodes that will be quantized; return how many changed."""
    count = 0
    if {"AvgPool", "ReduceMean"} & set(settings.npu.conversions):
        infer_shapes(model)
    for name in settings.npu.conversions:
        nodes = select_nodes(model, settings)
        count += sum(CONVERSIONS[name](model, node) for node in nodes)
    return count


def leaky_relu(model: ir.Model, node: ir.Node) -> bool:
    """Round the slope of a LeakyRelu to 1/256."""
    if node.op_type != "LeakyRelu":
        return False
    alpha = node.attributes.get_float("alpha", 0.01)
    rounded = round(256 * alpha) / 256
    _set(node, "alpha", rounded)
    return rounded != alpha


def sigmoid(model: ir.Model, node: ir.Node) -> bool:
    """Turn a Sigmoid into the HardSigmoid that the DPU has."""
    if node.op_type != "Sigmoid":
        return False
    node.op_type = "HardSigmoid"
    _set(node, "alpha", 1 / 6)
    _set(node, "beta", 0.5)
    return True


def _hard_sigmoid_factor(model: ir.Model, node: ir.Node) -> bool:
    """Scale a HardSigmoid of slope 1/6 as the DPU's multiplication by 2731 / 2^14 does."""
    if node.op_type != "HardSigmoid":
        return False
    is_sixth = math.isclose(node.attributes.get_float("alpha", 0.2), 1 / 6, rel_tol=1e-4)
    return is_sixth and _scale(model, node, _HARD_SIGMOID_FACTOR)


def _average_pool(model: ir.Model, node: ir.Node) -> bool:
    """Scale an AveragePool or GlobalAveragePool."""
    if node.op_type == "AveragePool":
        return _scale(model, node, mean_factor(*node.attributes["kernel_shape"].as_ints()))
    if node.op_type != "GlobalAveragePool":
        return False
    return _scale(model, node, mean_factor(*_sizes(node, None)))


def _reduce_mean(model: ir.Model, node: ir.Node) -> bool:
    """Scale a ReduceMean."""
    if node.op_type != "ReduceMean":
        return False
    shape, axes = None if node.inputs[0] is None else node.inputs[0].shape, axes_of(node)
    is_open = shape is not None and len(shape) > 0 and not isinstance(shape[0], int)
    if shape is not None and is_open and (axes is None or {0, -len(shape)} & set(axes)):
        logger.warning("%s averages over the batch, whose size is open: it is not simulated.", node.name)
        return False
    return _scale(model, node, mean_factor(*_sizes(node, axes_of(node))))


def clip(model: ir.Model, node: ir.Node) -> bool:
    """Round the bounds of a Clip to whole numbers from -128 to 127, which stand for those that are left out."""
    if not is_op(node, "Clip"):
        return False
    bounds = clip_bounds(node)
    if any(math.isnan(bound) for bound in bounds):
        logger.warning("%s: the bounds of this Clip are no constants: it is not simulated.", node.name)
        return False
    rounded = [min(127, max(-128, bound)) for bound in bounds]
    writer = GraphWriter(model)
    values = [np.array(round(bound), np.float32) for bound in rounded]
    constants = [
        writer.constant(f"{node.name}_dpu_{name}", value) for name, value in zip(("min", "max"), values, strict=True)
    ]
    node.attributes.clear()
    node.resize_inputs(3)
    for index, value in enumerate(constants, 1):
        node.replace_input_with(index, value)
    return tuple(float(value) for value in values) != bounds


def softmax(model: ir.Model, node: ir.Node) -> bool:
    """Turn a Softmax into the DPU's."""
    if not is_op(node, "Softmax"):
        return False
    return _call(model, node, dpu_softmax(node.attributes.get_int("axis", -1)))


def instance_norm(model: ir.Model, node: ir.Node) -> bool:
    """Turn an InstanceNormalization into the DPU's."""
    if not is_op(node, "InstanceNormalization"):
        return False
    return _call(model, node, dpu_instance_norm(node.attributes.get_float("epsilon", 1e-5)))


def _call(model: ir.Model, node: ir.Node, operator: Operator) -> bool:
    """Put an extended operator in the place of a node, under its name."""
    writer, old = GraphWriter(model), node.outputs[0]
    inputs = [value for value in node.inputs if value is not None]
    new = writer.call(operator, inputs, f"{node.name}_dpu")
    new.type, new.shape = old.type, old.shape
    writer.replace(node, new, keep_name=True)
    producer_of(new).name = node.name
    return True


def mean_factor(*sizes: int) -> float:
    """Return the DPU's mean over a window of these sizes, divided by the true mean."""
    if sizes in _MEAN_FACTORS:
        return _MEAN_FACTORS[sizes]
    count = math.prod(sizes)
    powers = [2**n for n in range(math.ceil(math.log2(128 * count)))]
    power = min(powers, key=lambda power: abs(round(power / count) / power - 1 / count))
    return count * round(power / count) / power


def _sizes(node: ir.Node, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of the averaged axes; of all but the first two if None is given to a pool."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    sizes: list[object] = [None]
    if shape is not None:
        first = 2 if node.op_type == "GlobalAveragePool" else 0
        sizes = [shape[axis] for axis in (range(first, len(shape)) if axes is None else axes)]
    if not all(isinstance(size, int) for size in sizes):
        raise ConfigError(
            f"How many values {node.name} ({node.op_type}) averages is not fixed: {shape}. Possible: fix the input "
            "shapes, exclude the node, or set ConvertAvgPoolToDPUVersion and ConvertReduceMeanToDPUVersion to False."
        )
    return tuple(size for size in sizes if isinstance(size, int))


def _scale(model: ir.Model, node: ir.Node, factor: float) -> bool:
    """Multiply the output of a node, which keeps its name."""
    if factor == 1 or any(FACTOR in use.node.meta for use in node.outputs[0].uses()):
        return False
    writer = GraphWriter(model)
    constant = writer.constant(f"{node.outputs[0].name}_Factor", np.array(factor, np.float32))
    writer.multiply(node, constant, "_Mul").meta[FACTOR] = True
    return True


def _set(node: ir.Node, name: str, value: float) -> None:
    node.attributes[name] = ir.AttrFloat32(name, value)


CONVERSIONS: dict[str, Callable[[ir.Model, ir.Node], bool]] = {
    "LeakyRelu": leaky_relu,
    "Sigmoid": sigmoid,
    "HardSigmoid": _hard_sigmoid_factor,
    "AvgPool": _average_pool,
    "ReduceMean": _reduce_mean,
    "Clip": clip,
    "Softmax": softmax,
    "InstanceNorm": instance_norm,
}
"""Name in Settings -> conversion of one node, in order: a Sigmoid is first a HardSigmoid. Not in PASSES, whose entries
keep the model's outputs."""
