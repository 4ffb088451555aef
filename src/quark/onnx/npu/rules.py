"""The NPU's position rules. i: an input, w: the weight, b: the bias, o: the output after a fused activation.

    shift_cut      w + i - o               0 .. 16                          Conv, ConvTranspose, Gemm, MatMul
    shift_bias     w + i - b               min(0, shift_cut - 16) .. 15     those with a bias; 0 .. 15 before LeakyRelu
    shift_read     i - i'                 -7 .. 7                           Add, Sub
    shift_write    min(i) - o             -7 .. 25                          Add, Sub
                   i + i' - o              0 .. 32                          Mul
    hard_sigmoid   i  0 .. 15     o  7 ..  14 + i - o  0 .. 31              HardSigmoid
    swish          i + gate - o            0 .. 15                          x * Sigmoid(x), x * HardSigmoid(x)

What gives way becomes coarser wherever a rule leaves the choice: a finer scale would clip values, while bits that an
adder or a shifter drops are lost in any case. A product that is coarser than its output thus moves the output, and a
bias that is much coarser than its products moves the weight.

Positions that keep the rules are found in rounds over all nodes, until nothing moves (`adjust`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.qparams import ModelQParams, rescaled
from quark.onnx.config.settings import Settings
from quark.onnx.npu.positions import Limit, Positions
from quark.onnx.operators import rule_of
from quark.onnx.placement.placement import Placement

CUT_BITS, READ_BITS = 16, 7


def shift_cut(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """From the accumulator to the output."""
    product = _product(at, node)
    output = at.output(node)
    if product and output is not None:
        yield Limit(product, (output,), 0, CUT_BITS, raises=output, lowers=product[1])


def shift_bias(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """From the bias to the accumulator."""
    product, index = _product(at, node), rule_of(node.op_type).bias
    bias = None if index is None else at.input(node, index)
    output, follower = at.output(node), at.follower(node)
    if not product or bias is None:
        return
    low: object = 0
    if output is not None and not (follower is not None and follower.op_type == "LeakyRelu"):
        low = np.minimum(0, at[product[0]] + at[product[1]] - at[output] - CUT_BITS)
    yield Limit(product, (bias,), low, 15, raises=bias, lowers=product[1])


def shift_read(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """Between the two inputs of a sum."""
    inputs = _inputs(at, node)
    if node.op_type in ("Add", "Sub") and len(inputs) == 2:
        one, other = inputs
        yield Limit((one,), (other,), -READ_BITS, READ_BITS, raises=other, lowers=one)


def shift_write(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """From the sum or product of two inputs to the output."""
    inputs, output = _inputs(at, node), at.output(node)
    if len(inputs) != 2 or output is None:
        return
    if node.op_type in ("Add", "Sub"):
        coarsest = min(inputs, key=lambda key: int(np.min(at[key])))
        yield Limit((coarsest,), (output,), -7, 25, raises=output, lowers=coarsest)
    elif node.op_type == "Mul":
        finest = max(inputs, key=lambda key: int(np.max(at[key])))
        yield Limit(inputs, (output,), 0, 32, raises=output, lowers=finest)


def hard_sigmoid(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """Its input and output: values beyond these ranges are flat in any case."""
    if node.op_type != "HardSigmoid":
        return
    source, output = at.input(node, 0), at.output(node)
    if source is not None:
        yield Limit((source,), low=0, high=15, raises=source, lowers=source)
    if output is not None:
        yield Limit((output,), low=7, raises=output)
    if source is not None and output is not None:
        yield Limit((source,), (output,), 0, 31, raises=output, lowers=source, constant=14)


def swish(at: Positions, node: ir.Node) -> Iterator[Limit]:
    """The product of a tensor and its own gate."""
    output = at.output(node)
    if node.op_type != "Mul" or output is None:
        return
    for index in (0, 1):
        source, gate = at.input(node, index), at.input(node, 1 - index)
        if source is not None and gate is not None and _gates(node.inputs[1 - index], node.inputs[index]):
            yield Limit((source, gate), (output,), 0, 15, raises=output, lowers=source)


def _product(at: Positions, node: ir.Node) -> tuple[object, ...]:
    """(input, weight) of a node with a quantized weight, else nothing."""
    index = rule_of(node.op_type).weight
    if index is None or (node, index) not in at.values:
        return ()
    source = at.input(node, 0)
    return () if source is None else (source, (node, index))


def _inputs(at: Positions, node: ir.Node) -> tuple[object, ...]:
    return tuple(key for key in (at.input(node, index) for index in range(len(node.inputs))) if key is not None)


def _gates(gate: ir.Value | None, source: ir.Value | None) -> bool:
    """Return True where `gate` is a sigmoid of `source`, over any constant factor."""
    node = None if gate is None else gate.producer()
    if node is not None and node.op_type == "Mul":
        node = next((v.producer() for v in node.inputs if v is not None and v.producer() is not None), None)
    return node is not None and node.op_type in ("Sigmoid", "HardSigmoid") and node.inputs[0] is source


RULES: dict[str, Callable[[Positions, ir.Node], Iterator[Limit]]] = {
    "shift_cut": shift_cut,
    "shift_bias": shift_bias,
    "shift_read": shift_read,
    "shift_write": shift_write,
    "hard_sigmoid": hard_sigmoid,
    "swish": swish,
}
"""Name in Settings -> rule, in the order of a round."""


# Rounds until nothing moves -------------------------------------------------------------------------------------------


def adjust(placement: Placement, qparams: ModelQParams, settings: Settings) -> ModelQParams:
    """Move positions until the rules that the settings name hold; returns new qparams.

    Raises:
        ConfigError: A scale is no power of two; or, where it is checked, a limit of any rule does not hold in the end:
            names each node, rule and sum.
    """
    if not settings.npu.rules and not settings.npu.check:
        return qparams
    positions = Positions(placement, qparams)
    for _ in range(settings.npu.rounds):
        moves = [
            positions.enforce(limit)
            for name in settings.npu.rules
            for node in placement.nodes
            for limit in RULES[name](positions, node)
        ]
        if not any(moves):
            break
    if settings.npu.check:
        _check(positions)
    specs, weights, moved = placement.activations, placement.weights, positions.values
    return ModelQParams(
        {key: _moved(p, specs[key], moved.get(key)) for key, p in qparams.activations.items() if key in specs},
        {key: _moved(p, weights[key], moved.get(key)) for key, p in qparams.weights.items()},
    )


def _check(positions: Positions) -> None:
    broken = [
        f"{name} of {node.name} is {positions.sum(limit)}, not in [{limit.low}, {limit.high}]"
        for name, rule in RULES.items()
        for node in positions.placement.nodes
        for limit in rule(positions, node)
        if not positions.kept(limit)
    ]
    if broken:
        raise ConfigError(
            f"{len(broken)} shifts are out of the NPU's reach: {'; '.join(broken[:5])}. Possible: leave the adjusting "
            "options on, a larger MaxLoopNum, exclude these nodes, or NPULimitationCheck=False to write them anyway."
        )


def _moved(params: QParams, spec: TensorSpec, position: NumpyArray | None) -> QParams:
    if position is None:
        return params
    return rescaled(params, spec, np.exp2(-position.astype(np.float64)))
