"""Lowering of the legacy `include_cle=True`: a default, which is kept only where calibration data say that it pays.

It is one under scales that are powers of two (XINT8), whose steps cost small channels most. Under other scales it is
without effect: of two networks with A8W8 and U8S8_AAWS one lost by it, for twice the time. A CLEConfig, or a CLE option
that differs from its default, asks for equalization by name: it is one of the algorithms.
"""

from __future__ import annotations

from quark.core.granularity import PerTensor
from quark.core.spec import ScaleType, TensorSpec
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.request import Request
from quark.onnx.config.settings import SpecSettings

STEPS = 2
"""Unless CLESteps is given: a layer between two others is in two pairs, and the second undoes some of the first."""


def lower_equalization(request: Request, specs: SpecSettings) -> CLEConfig | None:
    """The equalization that the config includes, unless it asks for one by name; None for none.

    Args:
        request: What the config asks for.
        specs: Only where all channels of a weight share a power of two as scale, of few bits, are they equalized.
    """
    named = any(isinstance(algorithm, CLEConfig) for algorithm in request.algorithms)
    # Ranges that are given are those of the model as it is: equalized, it has others.
    given_ranges = any(each.scale is not None or each.low is not None for _, each in specs.overrides)
    if not request.include_cle or named or given_ranges or value_of(request.options, "QuantizeFP16"):
        return None
    weight, activation = specs.layer.weight, specs.layer.input
    if (
        weight is None
        or activation is None
        or weight.dtype.bits > 8
        or not (_one_scale(weight) and _one_scale(activation))
    ):
        return None
    given = {key: request.options[key] for key in CLEConfig.keys.values() if key in request.options}
    return CLEConfig.from_options({"CLESteps": STEPS, **given})


def _one_scale(spec: TensorSpec) -> bool:
    """Whether a tensor has integer codes under one power of two, which is known before the model runs."""
    static = spec.has_zero_point and not spec.dynamic
    return static and spec.scale_type is ScaleType.pof2 and isinstance(spec.granularity, PerTensor)
