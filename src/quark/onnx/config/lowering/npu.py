"""Lowering of the NPU's options: what is simulated, and which position rules are kept."""

from __future__ import annotations

from quark.core.spec import LayerSpec, ScaleType
from quark.errors import ConfigError
from quark.onnx.config.extra_options import NPU_CONVERSIONS, NPU_CONVERSIONS_ON_REQUEST, NPU_RULES, value_of
from quark.onnx.config.lowering.request import Request
from quark.onnx.config.settings import NPUSettings


def lower_npu(request: Request, layer: LayerSpec) -> NPUSettings:
    """The NPU's operators and rules.

    Args:
        request: What the config asks for.
        layer: The specs of every node: the XINT8 path is one of power-of-two scales.

    Raises:
        ConfigError: An option is out of range.
    """
    options = request.options
    rounds = value_of(options, "MaxLoopNum")
    if rounds < 1:
        raise ConfigError(f"MaxLoopNum={rounds}: at least one round is needed.")
    specs = [spec for spec in (layer.weight, layer.input) if spec is not None]
    positions = request.npu_cnn and all(spec.scale_type is ScaleType.pof2 for spec in specs)
    simulated = positions and value_of(options, "SimulateDPU")
    conversions = NPU_CONVERSIONS | NPU_CONVERSIONS_ON_REQUEST
    given = {name: value_of(options, option) for name, (option, _) in conversions.items()}
    rules = tuple(name for name, option in NPU_RULES.items() if value_of(options, option))
    return NPUSettings(
        conversions=tuple(name for name, value in given.items() if (simulated if value is None else value)),
        rules=rules if positions else (),
        rounds=rounds,
        check=positions and value_of(options, "NPULimitationCheck"),
    )
