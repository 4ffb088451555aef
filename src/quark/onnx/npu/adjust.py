"""The search for positions that keep the NPU's rules: rounds over all nodes until nothing moves."""

from __future__ import annotations

import numpy as np

from quark.core.array import NumpyArray
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.onnx.calibration.qparams import ModelQParams, rescaled
from quark.onnx.config.settings import Settings
from quark.onnx.npu.positions import Positions
from quark.onnx.npu.rules import RULES
from quark.onnx.placement.placement import Placement


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
