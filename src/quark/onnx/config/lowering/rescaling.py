"""Lowering of what the named configurations do unasked: equalization, and the correction of biases.

Both are for one scale a weight, which is too coarse for the small channels, whose rounding errors then have a mean.
`include_cle=True` is kept only where calibration data say that it pays. A CLEConfig, or a CLE option that differs from
its default, and a BiasCorrectionConfig ask for them by name: they are among the algorithms.
"""

from __future__ import annotations

from quark.core.granularity import PerTensor
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.extra_options import value_of
from quark.onnx.config.lowering.request import Request
from quark.onnx.config.settings import SpecSettings

POWER_OF_TWO_STEPS = 2
"""Unless CLESteps is given: a layer between two others is in two pairs, and the second undoes some of the first. Float
scales, which fit any range, gained nothing by more than the documented step."""


def lower_rescaling(request: Request, specs: SpecSettings) -> tuple[CLEConfig | None, bool]:
    """The equalization that is tried unasked, None for none; and whether biases are corrected unasked.

    Args:
        request: What the config asks for.
        specs: Only where all channels of a weight share a scale, of few bits, is one of them done.
    """
    return _equalization(request, specs), _corrects_biases(request, specs)


def _equalization(request: Request, specs: SpecSettings) -> CLEConfig | None:
    """The equalization that the config includes, unless it asks for one by name."""
    named = any(isinstance(algorithm, CLEConfig) for algorithm in request.algorithms)
    # Ranges that are given are those of the model as it is: equalized, it has others.
    given_ranges = any(each.scale is not None or each.low is not None for _, each in specs.overrides)
    if not request.include_cle or named or given_ranges or value_of(request.options, "QuantizeFP16"):
        return None
    if not _coarse(specs.layer):
        return None
    given = {key: request.options[key] for key in CLEConfig.keys.values() if key in request.options}
    steps = {"CLESteps": POWER_OF_TWO_STEPS} if _has_power_of_two(specs.layer) else {}
    return CLEConfig.from_options({**steps, **given})


def _corrects_biases(request: Request, specs: SpecSettings) -> bool:
    """A QConfig names its algorithms: only under powers of two it has this one without a word."""
    if value_of(request.options, "BiasCorrection") is not None or value_of(request.options, "QuantizeFP16"):
        return False
    npu = request.npu_cnn and _has_power_of_two(specs.layer)
    return npu or (request.legacy and _coarse(specs.layer))


def _coarse(layer: LayerSpec) -> bool:
    """Whether a weight has up to 8 bits and one scale, and so has what its layer reads."""
    weight, activation = layer.weight, layer.input
    if weight is None or activation is None:
        return False
    return weight.dtype.bits <= 8 and _one_scale(weight) and _one_scale(activation)


def _has_power_of_two(layer: LayerSpec) -> bool:
    return all(spec.scale_type is ScaleType.pof2 for spec in (layer.weight, layer.input) if spec is not None)


def _one_scale(spec: TensorSpec) -> bool:
    """Whether a tensor has integer codes under one scale, which is known before the model runs."""
    return spec.has_zero_point and not spec.dynamic and isinstance(spec.granularity, PerTensor)
