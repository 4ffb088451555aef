"""Lowering of the NPU's options: what is simulated, and which position rules are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.core.spec import LayerSpec, ScaleType
from quark.errors import ConfigError
from quark.onnx.config.extra_options import value_of

CONVERSION_OPTIONS = {
    "LeakyRelu": "ConvertLeakyReluToDPUVersion",
    "Sigmoid": "ConvertSigmoidToHardSigmoid",
    "HardSigmoid": "ConvertHardSigmoidToDPUVersion",
    "AvgPool": "ConvertAvgPoolToDPUVersion",
    "ReduceMean": "ConvertReduceMeanToDPUVersion",
}
"""Conversion of `npu/simulation.py` -> its option."""
RULE_OPTIONS = {
    "shift_cut": "AdjustShiftCut",
    "shift_bias": "AdjustShiftBias",
    "shift_read": "AdjustShiftRead",
    "shift_write": "AdjustShiftWrite",
    "hard_sigmoid": "AdjustHardSigmoid",
    "swish": "AdjustShiftSwish",
}
"""Rule of `npu/rules.py` -> its option."""


def npu_settings(options: Mapping[str, Any], npu_cnn: bool, layer: LayerSpec) -> dict[str, Any]:
    """The NPU's fields of Settings.

    Args:
        options: Extra options.
        npu_cnn: Whether the XINT8 path is asked for.
        layer: The specs of every node: the path is one of power-of-two scales.
    """
    rounds = value_of(options, "MaxLoopNum")
    if rounds < 1:
        raise ConfigError(f"MaxLoopNum={rounds}: at least one round is needed.")
    specs = [spec for spec in (layer.weight, layer.input) if spec is not None]
    positions = npu_cnn and all(spec.scale_type is ScaleType.pof2 for spec in specs)
    simulated = positions and value_of(options, "SimulateDPU")
    asked = {name: value_of(options, option) for name, option in CONVERSION_OPTIONS.items()}
    conversions = tuple(name for name, value in asked.items() if (simulated if value is None else value))
    rules = tuple(name for name, option in RULE_OPTIONS.items() if value_of(options, option))
    return {
        "dpu_conversions": conversions,
        "position_rules": rules if positions else (),
        "position_rounds": rounds,
        "check_positions": positions and value_of(options, "NPULimitationCheck"),
    }
