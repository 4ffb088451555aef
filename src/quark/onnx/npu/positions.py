"""Positions of power-of-two scales, and limits on them.

    position = -log2(scale)

A limit bounds a sum of positions, and names the positions that give way on either side. Aligned tensors (a Concat and
its inputs) are one class, hence one position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.qparams import ModelQParams
from quark.onnx.placement.placement import Placement

Key = Any
"""The tensor that stands for a class of activations, or (node, input index) of a weight or bias."""


@dataclass(frozen=True)
class Limit:
    """low <= sum(plus) - sum(minus) + constant <= high.

    Attributes:
        plus, minus: Positions that count.
        low, high: The bounds; None for none. One of each output channel where the weight has one scale of each.
        raises: The position that moves where the sum is too low.
        lowers: The position that moves where it is too high.
        constant: Part of the sum.
    """

    plus: tuple[Key, ...]
    minus: tuple[Key, ...] = ()
    low: Any = None
    high: Any = None
    raises: Key = None
    lowers: Key = None
    constant: int = 0


class Positions:
    """The positions of one graph.

    Args:
        placement: What is quantized.
        qparams: Scales; not changed.

    Raises:
        ConfigError: A scale that was asked to be a power of two is none.
    """

    def __init__(self, placement: Placement, qparams: ModelQParams) -> None:
        self.placement, self.nodes = placement, set(placement.nodes)
        params: dict[Key, QParams] = {**qparams.activations, **qparams.weights}
        specs: dict[Key, TensorSpec] = {**placement.activations, **placement.weights}
        # Layers with a config of their own may have other scales; to the rules they are as layers in float.
        self.values: dict[Key, NumpyArray] = {
            key: self._position(key, value)
            for key, value in params.items()
            if key not in specs or specs[key].scale_type is ScaleType.pof2
        }

    def _position(self, key: Key, params: QParams) -> NumpyArray:
        position = -np.log2(np.asarray(params.scale, np.float64))
        if not np.array_equal(position, np.rint(position)):
            raise ConfigError(
                f"The NPU's rules are for power-of-two scales; {describe(key)} has {params.scale}. Possible: "
                "ScaleType.PowerOf2 for every tensor, or EnableNPUCnn=False."
            )
        return position.astype(np.int64)

    def __getitem__(self, key: Key) -> NumpyArray:
        return self.values[key]

    def input(self, node: ir.Node, index: int) -> Key:
        """Return the key of input `index` of a node, or None where it is in float."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return None
        key = self.placement.root(value) if value in self.placement.activations else (node, index)
        return key if key in self.values else None

    def output(self, node: ir.Node) -> Key:
        """Return the key of what a node, or the activation fused into it, writes; None where that is in float."""
        value = node.outputs[0]
        if value not in self.placement.activations:
            follower = self.follower(node)
            return None if follower is None else self.output(follower)
        root = self.placement.root(value)
        return root if root in self.values else None

    def follower(self, node: ir.Node) -> ir.Node | None:
        """The quantized node that is fused into this one: it alone reads the unquantized output."""
        uses = list(node.outputs[0].uses())
        if len(uses) != 1 or uses[0].node not in self.nodes or node.outputs[0] in self.placement.activations:
            return None
        return uses[0].node

    def sum(self, limit: Limit) -> NumpyArray:
        """The sum that a limit bounds."""
        total = sum(self.values[key] for key in limit.plus) - sum(self.values[key] for key in limit.minus)
        return np.asarray(total + limit.constant)

    def kept(self, limit: Limit) -> bool:
        """Return True where a limit holds."""
        value = self.sum(limit)
        return bool((limit.low is None or np.all(value >= limit.low)) and
                    (limit.high is None or np.all(value <= limit.high)))  # fmt: skip

    def enforce(self, limit: Limit) -> bool:
        """Move the positions that give way; return whether any moved."""
        moved = False
        for bound, key, sign in ((limit.low, limit.raises, 1), (limit.high, limit.lowers, -1)):
            factor = limit.plus.count(key) - limit.minus.count(key)
            missing = 0 if bound is None else np.maximum(sign * (bound - self.sum(limit)), 0)
            if not np.any(missing) or not factor:
                continue
            steps = -(-missing // abs(factor))
            steps = steps if self.values[key].ndim else np.max(steps)
            self.values[key] = self.values[key] + int(np.sign(factor)) * sign * steps
            moved = True
        return moved


def describe(key: Key) -> str:
    """A position in words."""
    return f"input {key[1]} of {key[0].name}" if isinstance(key, tuple) else str(key.name)
