"""The documented schemes, row by row (reference of the documented system, appendix B)."""

from __future__ import annotations

import pytest

from quark.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import ConfigError

DOCUMENTED = {
    "int4_wo_32": ("int4 group 32", ""),
    "int4_wo_64": ("int4 group 64", ""),
    "int4_wo_128": ("int4 group 128", ""),
    "int4_wo_per_channel": ("int4 channel 0", ""),
    "int4_wa_64": ("int4 group 64", "int4 group 64 dynamic"),
    "uint4_wo_32": ("uint4 group 32 asymmetric", ""),
    "uint4_wo_64": ("uint4 group 64 asymmetric", ""),
    "uint4_wo_128": ("uint4 group 128 asymmetric", ""),
    "uint4_wo_per_channel": ("uint4 channel 0 asymmetric", ""),
    "int8": ("int8 tensor", "int8 tensor"),
    "fp8": ("fp8_e4m3 tensor", "fp8_e4m3 tensor"),
    # Documented as a scale per index of axis 1, which a runtime's per-token scales do not match (defect 6).
    "ptpc_fp8": ("fp8_e4m3 channel 0", "fp8_e4m3 token dynamic"),
    "mxfp4": ("fp4_e2m1 group 32 float8_e8m0fnu", "fp4_e2m1 group 32 float8_e8m0fnu dynamic"),
    "mxfp4_weight_only": ("fp4_e2m1 group 32 float8_e8m0fnu", ""),
    "mxfp6_e3m2": ("fp6_e3m2 group 32 float8_e8m0fnu", "fp6_e3m2 group 32 float8_e8m0fnu dynamic"),
    "mxfp6_e2m3": ("fp6_e2m3 group 32 float8_e8m0fnu", "fp6_e2m3 group 32 float8_e8m0fnu dynamic"),
    "mxfp4_mxfp6_e2m3": ("fp4_e2m1 group 32 float8_e8m0fnu", "fp6_e2m3 group 32 float8_e8m0fnu dynamic"),
    "mxfp4_fp8": ("fp4_e2m1 group 32 float8_e8m0fnu", "fp8_e4m3 tensor"),
    "amdfp4": ("fp4_e2m1 group 16 float8_e5m3", "fp4_e2m1 group 16 float8_e5m3 dynamic"),
    "amdfp4_g32": ("fp4_e2m1 group 32 float8_e5m3", "fp4_e2m1 group 32 float8_e5m3 dynamic"),
    "int4_fp8": ("fp8_e4m3 tensor codes (int4 channel 0)", "fp8_e4m3 tensor dynamic"),
    "mx6": ("mx6 group 16", "mx6 group 16 dynamic"),
    "mx9": ("mx9 group 16", "mx9 group 16 dynamic"),
    "bfp16": ("bfp16 group 8", "bfp16 group 8 dynamic"),
    "nvfp4": ("fp4_e2m1 group 16 scales (fp8_e4m3 tensor)", "fp4_e2m1 group 16 dynamic scales (fp8_e4m3 tensor)"),
    "amdfp4_global16": (
        "fp4_e2m1 group 16 scales (fp8_e5m3 tensor)",
        "fp4_e2m1 group 16 dynamic scales (fp8_e5m3 tensor)",
    ),
    "amdfp4_global32": (
        "fp4_e2m1 group 32 scales (fp8_e5m3 tensor)",
        "fp4_e2m1 group 32 dynamic scales (fp8_e5m3 tensor)",
    ),
}
DOCUMENTED["fp4_block16_scale_e4m3"] = DOCUMENTED["nvfp4"]


def brief(spec: TensorSpec | None) -> str:
    """The fields of a spec that the documented table has, in its order."""
    if spec is None:
        return ""
    split = spec.granularity
    words = [spec.dtype.name]
    words += {
        PerTensor: lambda: ["tensor"],
        PerToken: lambda: ["token"],
        PerChannel: lambda: [f"channel {split.axis}"],
        PerGroup: lambda: [f"group {split.size}"],
    }[type(split)]()
    assert not isinstance(split, PerGroup) or split.axis == -1
    words += [] if spec.symmetric else ["asymmetric"]
    words += [] if spec.scale_type in (ScaleType.float, ScaleType.float32) else [spec.scale_type.value]
    words += ["dynamic"] if spec.dynamic else []
    words += [f"scales ({brief(spec.scale_spec)})"] if spec.scale_spec else []
    words += [f"codes ({brief(spec.code_spec)})"] if spec.code_spec else []
    return " ".join(words)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_scheme(name: str) -> None:
    layer = SCHEMES[name]
    assert (brief(layer.weight), brief(layer.input)) == DOCUMENTED[name]
    assert layer.bias is None and layer.output is None


@pytest.mark.parametrize("name", SCHEMES)
def test_data_is_needed_exactly_for_static_activations(name: str) -> None:
    tensor = SCHEMES[name].input
    static = tensor is not None and (not tensor.dynamic or tensor.scale_spec is not None)
    assert SCHEMES[name].needs_data == static


def test_a_scheme_of_ones_own_is_one_call() -> None:
    SCHEMES.register("mine", LayerSpec(weight=SCHEMES["int8"].weight))
    try:
        assert SCHEMES["mine"].input is None and not SCHEMES["mine"].needs_data
    finally:
        SCHEMES.unregister("mine")
    with pytest.raises(ConfigError, match="Did you mean 'uint4_wo_128'"):
        SCHEMES["uint4_wo_12"]
