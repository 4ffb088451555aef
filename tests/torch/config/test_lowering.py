"""Configs to core specs and back: the split, the scale, the observer, two stages."""

from __future__ import annotations

from typing import Any

import pytest

from quark.compat.torch_names import shorthand_specs as specs
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleRule, ScaleType, TensorSpec, spec
from quark.errors import ConfigError
from quark.torch.config.config import QLayerConfig
from quark.torch.config.lowering import config_of_layer, config_of_tensor, lower_layer, lower_tensor
from quark.torch.config.tensor.tensor_config import QTensorConfig

ACTIVATION_KEYS = ("input", "output")


def lower(config: Any, **options: Any) -> TensorSpec:
    if hasattr(config, "to_quantization_spec"):
        config = config.to_quantization_spec()
    made = lower_tensor(config, **options)
    assert made is not None
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_raise_then_lower_is_the_identity(scheme: str) -> None:
    layer = SCHEMES[scheme]
    assert lower_layer(config_of_layer(layer), per_token=True) == layer
    for name in ("weight", "input"):
        tensor = getattr(layer, name)
        assert lower_tensor(config_of_tensor(tensor), per_token=name == "input") == tensor


# dtype, qscheme, ch_axis, group_size, symmetric, scale_type, scale_format, observer: appendix B, run on the peer.
JSON = {
    ("int4_wo_128", "weight"): "int4 per_group -1 128 True float None PerGroupMinMaxObserver False",
    ("int4_wa_64", "input_tensors"): "int4 per_group -1 64 True float None PerGroupMinMaxObserver True",
    ("uint4_wo_per_channel", "weight"): "uint4 per_channel 0 None False float None PerChannelMinMaxObserver False",
    ("int8", "input_tensors"): "int8 per_tensor None None True float None PerTensorMinMaxObserver False",
    ("fp8", "weight"): "fp8_e4m3 per_tensor None None True float None PerTensorMinMaxObserver False",
    ("ptpc_fp8", "weight"): "fp8_e4m3 per_channel 0 None True float None PerChannelMinMaxObserver False",
    ("ptpc_fp8", "input_tensors"): "fp8_e4m3 per_channel 1 None True float None PerChannelMinMaxObserver True",
    ("mxfp4", "weight"): "fp4 per_group -1 32 None float e8m0 PerBlockMXObserver False",
    ("mxfp6_e2m3", "input_tensors"): "fp6_e2m3 per_group -1 32 None float e8m0 PerBlockMXObserver True",
    ("amdfp4", "weight"): "fp4 per_group -1 16 None float8_e5m3 e5m3 PerBlockMXObserver False",
    ("mx6", "input_tensors"): "mx6 None -1 16 None None None None None",
    ("bfp16", "weight"): "bfp16 None -1 8 None None None None None",
    ("mxint8", "weight"): "mx None -1 32 None None None None None",
    ("bfloat16", "weight"): "bfloat16 None None None None None None PlaceholderObserver None",
}
KEYS = [
    "dtype",
    "qscheme",
    "ch_axis",
    "group_size",
    "symmetric",
    "scale_type",
    "scale_format",
    "observer_cls",
    "is_dynamic",
]


@pytest.mark.parametrize(("scheme", "tensor"), JSON, ids="-".join)
def test_json_of_the_schemes(scheme: str, tensor: str) -> None:
    data = config_of_layer(SCHEMES[scheme]).to_dict()[tensor]
    assert " ".join(str(data[key]) for key in KEYS) == JSON[scheme, tensor]


def test_json_of_the_two_level_schemes() -> None:
    nvfp4 = config_of_layer(SCHEMES["nvfp4"]).to_dict()
    for tensor, dynamic in (("weight", False), ("input_tensors", True)):
        first, second = nvfp4[tensor]
        assert (first["scale_format"], first["scale_type"], first["is_dynamic"]) == ("float32", "float32", dynamic)
        assert first["observer_cls"] == "PerBlockMXObserver" and first["is_scale_quant"] is False
        assert (second["dtype"], second["scale_type"], second["is_scale_quant"]) == ("fp8_e4m3", "float32", True)
        assert second["is_dynamic"] is False
    first, second = config_of_layer(SCHEMES["int4_fp8"]).to_dict()["weight"]
    assert (first["dtype"], second["dtype"], second["ch_axis"]) == ("fp8_e4m3", "int4", 0)
    assert second["is_scale_quant"] is False and second["scale_type"] == first["scale_type"] == "float32"


INT8 = DTYPES["int8"]
LOWERED = {
    "per tensor": (specs.Int8PerTensorSpec(), TensorSpec(INT8, scale_type=ScaleType.float)),
    "per channel": (
        specs.Int8PerChannelSpec(1, scale_type="float16"),
        TensorSpec(INT8, PerChannel(1), symmetric=False, scale_type=ScaleType.float16),
    ),
    "per group": (
        specs.Uint4PerGroupSpec(-1, 64, round_method="floor"),
        spec("uint4", PerGroup(-1, 64), symmetric=False, scale_type=ScaleType.float),  # as documented: no code is cut
    ),
    "float zero point": (
        specs.Uint4PerChannelSpec(0, is_dynamic=False, zero_point_type="float32"),
        spec("uint4", PerChannel(0), symmetric=False, scale_type=ScaleType.float, float_zero_point=True),
    ),
    "no scale type": (specs.FP8E4M3PerTensorSpec(), spec("fp8_e4m3", scale_type=ScaleType.float)),
    "float32 groups": (
        specs.FP4PerGroupSpec(-1, 16, is_dynamic=False),
        spec("fp4_e2m1", PerGroup(-1, 16), scale_type=ScaleType.float32, observer="block"),
    ),
    "e4m3 scales": (
        specs.FP4PerGroupSpec(-1, 16, "e4m3"),
        spec("fp4_e2m1", PerGroup(-1, 16), dynamic=True, scale_type=ScaleType.float8_e4m3, observer="block"),
    ),
    "e8m0 scales": (
        specs.FP6E3M2PerGroupSpec(-1, 32, "e8m0", "ceil", False),
        spec(
            "fp6_e3m2",
            PerGroup(-1, 32, pad=True),
            scale_type=ScaleType.float8_e8m0fnu,
            scale_rule=ScaleRule.ceil,
            observer="block",
        ),
    ),
    "diffs": (
        specs.OCP_MXFP4DiffsSpec(-1),
        spec("fp4_e2m1", PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, observer="mx_diffs"),
    ),
    "mx of a float": (
        QTensorConfig("mx", ch_axis=-1, group_size=32, mx_element_dtype="fp6_e2m3"),
        spec("fp6_e2m3", PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, observer="block"),
    ),
    "mx of int8": (
        specs.OCP_MXINT8Spec(-1),
        spec("mxint8", PerGroup(-1, 32, pad=True), scale_type=ScaleType.float8_e8m0fnu, observer="block"),
    ),
    "mx9": (specs.MX9Spec(-1, 16), spec("mx9", PerGroup(-1, 16, pad=True), observer="block")),
    "cast": (specs.Bfloat16Spec(), spec("bfloat16", observer="placeholder")),
    "blocks": (
        QTensorConfig("fp8_e4m3", "PerBlock2DMinMaxObserver", False, "per_block", block_size=(64, 128)),
        spec("fp8_e4m3", PerBlock((64, 128), pad=True), scale_type=ScaleType.float),
    ),
    "percentile": (
        specs.Int8PerTensorSpec("percentile"),
        TensorSpec(INT8, scale_type=ScaleType.float, observer="percentile"),
    ),
    "power of two": (
        QTensorConfig("int8", "PerTensorPowOf2MinMSEObserver", False, "per_tensor", None, None, None, True,
                      "half_even", "float"),
        TensorSpec(INT8, scale_type=ScaleType.pof2, observer="pof2_min_mse"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_lowering(case: str) -> None:
    config, expected = LOWERED[case]
    assert lower(config) == expected
    # Everything that can be lowered can be written to a checkpoint and read again as the same thing.
    raised = config_of_tensor(expected)
    assert isinstance(raised, QTensorConfig)
    assert lower(QTensorConfig.from_dict(raised.to_dict())) == expected


def test_dynamic_per_channel_of_a_linear_layer_is_per_token() -> None:
    for axis in (0, 1, 2):
        config = specs.FP8E4M3PerChannelSpec(axis, is_dynamic=True)
        assert lower(config, per_token=True).granularity == PerToken()
        assert lower(config).granularity == PerChannel(axis)
    # The last axis asks for one scale for each feature, which is something else.
    assert lower(specs.FP8E4M3PerChannelSpec(-1, is_dynamic=True), per_token=True).granularity == PerChannel(-1)
    assert lower(specs.FP8E4M3PerChannelSpec(1), per_token=True).granularity == PerChannel(1)


def test_layers() -> None:
    assert lower_layer(None) == LayerSpec() == lower_layer(QLayerConfig())
    assert config_of_layer(LayerSpec()) == QLayerConfig()
    mx6 = specs.MX6Spec(-1, 16)
    layer = lower_layer(QLayerConfig(input_tensors=mx6, output_tensors=mx6, weight=mx6, bias=specs.Int8PerTensorSpec()))
    assert layer.input and layer.output and layer.weight and layer.bias
    # The block formats have no is_dynamic: what lives is dynamic, what is constant is not.
    assert layer.input.dynamic and layer.output.dynamic and not layer.weight.dynamic
    assert layer.bias.granularity == PerTensor()


def test_a_weight_is_never_dynamic() -> None:
    dynamic = specs.OCP_MXFP4Spec(-1)
    assert dynamic.is_dynamic is True
    layer = lower_layer(QLayerConfig(weight=dynamic, input_tensors=dynamic))
    assert layer == SCHEMES["mxfp4"]
    two = lower_layer(
        QLayerConfig(weight=specs.ScaleQuantSpec(specs.FP4PerGroupSpec(-1, 16), specs.FP8E4M3PerTensorSpec()))
    )
    assert two.weight is not None and not two.weight.dynamic and two.weight.scale_spec is not None


def test_two_stages() -> None:
    config = config_of_tensor(SCHEMES["nvfp4"].weight)
    assert isinstance(config, list)
    assert lower(config).scale_spec == spec("fp8_e4m3")
    assert lower(config[:1]).scale_spec is None
    progressive = lower(specs.ProgressiveSpec(specs.FP8E4M3PerTensorSpec(), specs.Int4PerChannelSpec(0)))
    assert progressive.code_spec is not None and progressive.code_spec.dtype.name == "int4"


def test_what_would_have_no_effect_is_refused() -> None:
    percentile = specs.Int8PerTensorSpec("percentile", is_dynamic=True)
    with pytest.raises(ConfigError, match="PerTensorPercentileObserver would have no effect"):
        lower(percentile)
    assert lower_layer(QLayerConfig(weight=percentile)).weight is not None
    with pytest.raises(ConfigError, match="PerBlockMXDiffsObserver would have no effect"):
        lower(specs.OCP_MXFP4DiffsSpec(-1, True))
