"""Configs to Settings: the specs, the formats, the biases, the options, the algorithms; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.rounding import RoundType
from quark.core.spec import LayerSpec, ScaleRule, TensorSpec, spec
from quark.core.spec import ScaleType as CoreScale
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.config import tensor_specs as specs
from quark.onnx.config.algo_configs import CLEConfig
from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.enums import (
    CalibMethod,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantGranularity,
    QuantType,
    ScaleType,
    VitisQuantFormat,
)
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.lowering.tensors import lower_tensor
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.config.tensor_specs import (
    BFloat16Spec,
    Float16Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    QTensorConfig,
    UInt8Spec,
    XInt8Spec,
)
from quark.onnx.passes import PASSES

MIN_MAX = CalibMethod.MinMax
POF2 = CoreScale.pof2


def new(activation: Any = None, weight: Any = None, /, **options: Any) -> Settings:
    """The settings of a QConfig; asymmetric uint8 activations and int8 weights by default."""
    layer = QLayerConfig(input_tensors=activation or UInt8Spec(), weight=weight or Int8Spec())
    return lower(QConfig(layer, **options))


def on_for_npus(settings: Settings) -> set[object]:
    """What the settings say of the passes that NPUs need."""
    return {settings.passes[name] for name, row in PASSES.items() if row.for_npu}


def old(options: dict[str, Any] | None = None, **values: Any) -> Settings:
    return lower(Config(QuantizationConfig(**values, extra_options=options or {})))


def named(name: str) -> Settings:
    return lower(Config(global_quant_config=get_default_config(name)))


def tensor(config: QTensorConfig, weight: bool = False, **options: Any) -> TensorSpec:
    return lower_tensor(config, options, weight=weight)


def test_a8w8() -> None:
    int8 = spec("int8")
    assert named("A8W8") == Settings(
        SpecSettings(LayerSpec(weight=int8, input=int8, output=int8), int32_bias=True),
        qdq=QDQSettings(fold_relu=True, align=("Concat",), force_pass_through=True, contrib_domain=True, target="npu"),
        passes={name: row.for_npu or row.default for name, row in PASSES.items()},
        equalization=CLEConfig(),
        equalize_if_better=True,
        correct_biases=True,
    )


def test_a16w8() -> None:
    wide = named("A16W8")
    int16 = spec("int16")
    assert wide.specs.layer == LayerSpec(weight=spec("int8"), input=int16, output=int16)
    assert wide.specs.int32_bias and wide.qdq.contrib_domain and wide.qdq.align == ("Concat",)


def test_xint8() -> None:
    weight = spec("int8", scale_type=POF2, observer="pof2_min_mse")
    legacy = named("XINT8")
    middle = spec("uint8", scale_type=POF2, observer="pof2_min_mse")
    assert legacy.specs.layer == LayerSpec(weight, weight, middle, middle)
    assert (legacy.qdq.target, legacy.specs.int32_bias, legacy.qdq.contrib_domain) == ("npu", False, False)
    assert legacy.qdq.align == ("Concat", "Pool", "Pad", "Slice")
    today = new(XInt8Spec(), XInt8Spec())
    assert today.specs.layer == LayerSpec(weight, weight, weight, weight)
    assert (today.qdq.target, today.specs.int32_bias, today.qdq.align) == ("npu", False, legacy.qdq.align)
    assert new(XInt8Spec(), XInt8Spec(), EnableNPUCnn=False).specs.int32_bias is True


def test_bf16() -> None:
    cast = spec("bfloat16", observer="placeholder")
    assert named("BF16").specs.layer == LayerSpec(cast, cast, cast, cast)
    written = new(BFloat16Spec(), BFloat16Spec(), BF16QDQToCast=True)
    assert written.qdq.cast_bfloat16 and not written.specs.int32_bias and not written.qdq.contrib_domain
    assert not written.specs.layer.needs_data


def test_u8s8() -> None:
    settings = named("INT8_CNN_DEFAULT")
    activation = spec("uint8", symmetric=False)
    assert settings.specs.layer == LayerSpec(weight=spec("int8"), input=activation, output=activation)
    assert (settings.qdq.target, settings.qdq.contrib_domain, settings.specs.int32_bias) == ("generic", False, True)
    assert new(Target="ort_x64").qdq.target == "ort_x64"
    assert named("S8S8_AAWS").calibration.percentile == 99.9999


def test_configs_are_not_changed() -> None:
    config = get_default_config("A8W8_ADAROUND")
    before = config.to_dict()
    assert lower(Config(config)) == lower(config)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("method", "scale", "activation", "weight"),
    [
        (CalibMethod.MinMax, ScaleType.Float32, "min_max", "min_max"),
        (CalibMethod.Percentile, ScaleType.Float32, "percentile", "min_max"),
        (CalibMethod.Entropy, ScaleType.Float32, "entropy", "min_max"),
        (CalibMethod.MinMSE, ScaleType.Float32, "mse", "mse"),
        (CalibMethod.MinMax, ScaleType.PowerOf2, "pof2_non_overflow", "pof2_non_overflow"),
        (CalibMethod.MinMSE, ScaleType.PowerOf2, "pof2_min_mse", "pof2_min_mse"),
    ],
)
def test_calibration_methods(method: CalibMethod, scale: ScaleType, activation: str, weight: str) -> None:
    config = Int8Spec(scale_type=scale, calibration_method=method)
    assert tensor(config).observer == activation
    assert tensor(config, weight=True).observer == weight
    assert tensor(config).scale_type is (POF2 if scale is ScaleType.PowerOf2 else CoreScale.float32)


def test_calibration_methods_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not go with"):
        tensor(Int8Spec(scale_type=ScaleType.PowerOf2))
    with pytest.raises(ConfigError, match="Int16Scale=True with scales that are powers of two"):
        tensor(XInt8Spec(), Int16Scale=True)
    for name in ("MinMSEModePof2Scale", "MinMSEModeFloatScale"):
        scale = ScaleType.PowerOf2 if "Pof2" in name else ScaleType.Float32
        with pytest.raises(ConfigError, match=f"{name}='Most'"):
            tensor(
                Int8Spec(scale_type=scale, calibration_method=CalibMethod.MinMSE),
                scale is ScaleType.Float32,
                **{name: "Most"},
            )


def test_kinds_of_scales_and_modes_of_mse() -> None:
    found = old(calibrate_method=Int16Method.MinMax).specs.layer
    assert found.input is not None and found.weight is not None
    assert found.input.scale_type is found.weight.scale_type is CoreScale.int16
    for weight in (False, True):
        assert tensor(Int8Spec(scale_type=ScaleType.Int16), weight).scale_type is CoreScale.int16
        assert tensor(Int8Spec(), weight, Int16Scale=True).scale_type is CoreScale.int16
        floats = tensor(XInt8Spec(), weight, UsePowerOf2Scale=False)
        assert (floats.scale_type, floats.observer) == (CoreScale.float32, "mse")
    modes = {"All": "pof2_min_mse", "MostCommon": "pof2_most_common", "Percentile": "pof2_mse_percentile"}
    for mode, observer in modes.items():
        assert tensor(XInt8Spec(), False, MinMSEModePof2Scale=mode).observer == observer
        assert tensor(XInt8Spec(), True, MinMSEModePof2Scale=mode).observer == "pof2_min_mse"
    modes = {"All": "mse", "Percentile": "mse_percentile", "HistCenter": "mse_centers"}
    for mode, observer in modes.items():
        spec = Int8Spec(calibration_method=CalibMethod.MinMSE)
        assert tensor(spec, True, MinMSEModeFloatScale=mode).observer == observer
        assert tensor(spec, False, MinMSEModeFloatScale=mode).observer == "mse"


def test_layerwise_percentile_and_distribution() -> None:
    assert tensor(Int8Spec(calibration_method=CalibMethod.LayerwisePercentile)).observer == "layerwise_percentile"
    assert tensor(Int8Spec(calibration_method=CalibMethod.Distribution)).observer == "distribution"
    options = {"LWPMetric": "mse", "PercentileCandidates": [99.0, 99.9]}
    settings = old(options, calibrate_method=LayerWiseMethod.LayerWisePercentile)
    assert settings.calibration.percentile_metric == "mse" and settings.calibration.percentile_candidates == (
        99.0,
        99.9,
    )
    assert settings.specs.layer.input is not None and settings.specs.layer.input.observer == "layerwise_percentile"
    assert old(calibrate_method=CalibrationMethod.Distribution).specs.layer.input.observer == "distribution"  # type: ignore[union-attr]


def test_granularity() -> None:
    channel = Int8Spec(quant_granularity=QuantGranularity.Channel)
    settings = new(None, channel)
    assert settings.specs.layer.weight is not None and settings.specs.layer.weight.granularity == PerChannel(0)
    legacy = old(per_channel=True).specs.layer.weight
    assert legacy is not None and legacy.granularity == PerChannel(0)
    with pytest.raises(ConfigError, match="Channel is for weights"):
        tensor(channel)
    with pytest.raises(ConfigError, match="Group is for weights"):
        tensor(Int8Spec(quant_granularity=QuantGranularity.Group))
    group = new(None, Int8Spec(quant_granularity=QuantGranularity.Group), BlockSize=64).specs.layer.weight
    assert group is not None and group.granularity == PerGroup(0, 64, pad=True)
    with pytest.raises(NotSupportedError, match="MinMSE"):
        tensor(QTensorConfig(True, ScaleType.Float32, CalibMethod.MinMSE, QuantGranularity.Channel), weight=True)


def test_bias_of_a_power_of_two_scheme_has_one_scale() -> None:
    settings = new(XInt8Spec(), XInt8Spec(quant_granularity=QuantGranularity.Channel))
    assert settings.specs.layer.bias is not None and settings.specs.layer.bias.granularity == PerTensor()


@pytest.mark.parametrize("kind", [kind for kind in specs.DATA_TYPES.values() if kind.block])
def test_block_formats(kind: specs.DataType) -> None:
    ocp = kind.block == 32
    scale = CoreScale.float8_e8m0fnu if ocp else CoreScale.float32
    expected = TensorSpec(
        DTYPES[kind.core],
        PerGroup(1, kind.block, pad=True),
        scale_type=scale,
        scale_rule=ScaleRule.floor if ocp else ScaleRule.even,
        observer="block",
    )
    assert tensor(QTensorConfig(data_type=kind), weight=True) == expected
    assert tensor(QTensorConfig(data_type=kind)).dynamic


def test_block_attributes() -> None:
    settings = old(
        {"BFPAttributes": {"bfp_method": "to_bfp_prime", "bit_width": 13, "axis": -1, "rounding_mode": 0}},
        quant_format=ExtendedQuantFormat.QDQ,
        activation_type=ExtendedQuantType.QBFP,
        weight_type=ExtendedQuantType.QBFP,
    )
    weight = settings.specs.layer.weight
    assert weight is not None
    assert (weight.dtype.name, weight.granularity, weight.rounding) == ("mx6", PerGroup(-1, 16, True), RoundType.round)
    mx = old(quant_format=VitisQuantFormat.MXFixNeuron).specs.layer.weight
    assert mx is not None and mx.dtype.name == "onnx_mxint8"
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ConfigError, {"bfp_method": "to_bfp", "bit_width": 12}),
        (ConfigError, {"bit_with": 16}),
        (ConfigError, {"axis": "64"}),
        (ConfigError, {"block_size": None}),
        (ConfigError, {"block_size": 0}),
        (ConfigError, {"rounding_mode": 3}),
        (NotSupportedError, {"sub_block_size": 4}),
        (NotSupportedError, {"convert_to_bfloat_before_bfp": 1}),
    ]
    for error, attributes in wrong:
        with pytest.raises(error):
            old({"BFPAttributes": attributes}, quant_format=VitisQuantFormat.BFPFixNeuron)


def test_symmetry_options_overrule_the_specs() -> None:
    settings = new(ActivationSymmetric=True, WeightSymmetric=False)
    assert settings.specs.layer.input is not None and settings.specs.layer.weight is not None
    assert settings.specs.layer.input.symmetric and not settings.specs.layer.weight.symmetric
    unsigned = old(weight_type=QuantType.QUInt8).specs.layer.weight
    assert unsigned is not None and not unsigned.symmetric


def test_weight_calibration() -> None:
    for method in (ExtendedCalibrationMethod.MinMSE, CalibMethod.MinMSE, PowerOfTwoMethod.MinMSE):
        weight = old({"WeightCalibrateMethod": method}).specs.layer.weight
        assert weight is not None and weight.observer == "mse"
    with pytest.raises(ConfigError, match="possible: MinMax, MinMSE"):
        old({"WeightCalibrateMethod": CalibrationMethod.Entropy})
    assert old({"CalibMovingAverage": True}).specs.layer.input == spec(
        "int8", symmetric=False, observer="moving_average"
    )


def test_biases() -> None:
    assert new().specs.layer.bias is None and new().specs.int32_bias
    floating = new(QuantizeBias=False)
    assert floating.specs.layer.bias is None and not floating.specs.int32_bias
    like_weight = new(Int32Bias=False)
    assert like_weight.specs.layer.bias == like_weight.specs.layer.weight and not like_weight.specs.int32_bias
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec(), bias=Int32Spec())
    assert lower(QConfig(layer)).specs.int32_bias
    layer.bias = Int16Spec()
    own = lower(QConfig(layer))
    assert own.specs.layer.bias == spec("int16") and not own.specs.int32_bias
    with pytest.raises(ConfigError, match="needs integer"):
        new(BFloat16Spec(), BFloat16Spec(), Int32Bias=True)
    layer = QLayerConfig(input_tensors=BFloat16Spec(), weight=Int8Spec(), bias=Int32Spec())
    with pytest.raises(ConfigError, match="both must be integers"):
        lower(QConfig(layer))


def test_weights_only_has_no_activations() -> None:
    settings = lower(QConfig(QLayerConfig(weight=Int8Spec()), WeightsOnly=True))
    assert settings.specs.layer == LayerSpec(weight=spec("int8"))
    assert settings.specs.weights_only and not settings.specs.int32_bias and not settings.specs.layer.needs_data


def test_layers_of_their_own_inherit_what_they_do_not_say() -> None:
    wide = QLayerConfig(input_tensors=Int16Spec(calibration_method=MIN_MAX))
    settings = new(
        specific_layer_config={wide: ["conv1", (["a"], ["b", "c"])]},
        layer_type_config={None: ["Softmax"], QLayerConfig(weight=Int16Spec()): ["MatMul"]},
        exclude=["^/head.*", (["d"], ["e"])],
    )
    layer = settings.specs.layer
    assert settings.specs.by_name == (
        (("conv1", (("a",), ("b", "c"))), LayerSpec(layer.weight, None, spec("int16"), spec("int16"))),
    )
    assert settings.specs.by_type[0] == (("Softmax",), None)
    assert settings.specs.by_type[1] == (("MatMul",), LayerSpec(spec("int16"), None, layer.input, layer.output))
    assert settings.specs.exclude == ("^/head.*", (("d",), ("e",)))


def test_float_layers_among_integer_ones_have_a_float_bias() -> None:
    cast = spec("bfloat16", observer="placeholder")
    settings = new(layer_type_config={QLayerConfig(BFloat16Spec(), weight=BFloat16Spec()): ["MatMul"]})
    own = settings.specs.by_type[0][1]
    assert own is not None and (own.weight, own.bias, own.input) == (cast, cast, cast)
    settings = new(specific_layer_config={QLayerConfig(weight=Int8Spec(), bias=Int16Spec()): ["a"]})
    own = settings.specs.by_name[0][1]
    assert own is not None and own.bias == spec("int16") and settings.specs.int32_bias


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"OpTypesToQuantize": ["Conv"]}, "specs.op_types", ("Conv",)),
        ({"OpTypesToQuantize": ["Conv"], "QuantizeAllOpTypes": True}, "specs.all_op_types", True),
        ({"ExtraOpTypesToQuantize": ["Sin"]}, "specs.extra_op_types", ("Sin",)),
        ({"NodesToQuantize": ["a"]}, "specs.nodes", ("a",)),
        ({"EnableNPUTransformer": True}, "specs.op_types", ("Gemm", "MatMul")),
        ({"EnableNPUTransformer": True}, "specs.matmul_const_only", True),
        ({"MatMulConstBOnly": True}, "specs.matmul_const_only", True),
        ({"FoldBatchNorm": False}, "passes.fold_batch_norm", False),
        ({"OptimizeModel": False}, "passes.fold_batch_norm", False),
        ({"SkipPreprocess": True}, "passes.fold_batch_norm", None),
        ({"SkipPreprocess": True, "FoldBatchNorm": True}, "passes.fold_batch_norm", True),
        ({"SkipPreprocess": True}, "passes.simplify", None),
        ({"SkipPreprocess": True}, "passes.copy_bias_init", None),
        ({"SkipPreprocess": True, "CopyBiasInit": ["Conv"]}, "passes.copy_bias_init", ("Conv",)),
        ({"CopySharedInit": []}, "passes.copy_shared_init", ()),
        ({"ConvertOpsetVersion": 17}, "passes.convert_opset_version", 17),
        ({"FixShapes": "x:[1,3]"}, "passes.fix_shapes", "x:[1,3]"),
        ({"ConvertFP16ToFP32": True}, "passes.convert_fp16_to_fp32", True),
        ({"ConvertNCHWToNHWC": True}, "passes.convert_nchw_to_nhwc", True),
        ({"FuseGelu": False}, "passes.fuse_gelu", False),
        ({"RemoveInputInit": False}, "passes.remove_input_init", False),
        ({"ReplaceClip6Relu": True}, "passes.replace_clip6_relu", True),
        ({"ConvertClipToRelu": True}, "passes.convert_clip_to_relu", True),
        ({"EnableNPUTransformer": True}, "passes.convert_split_to_slice", True),
        ({"EnableNPUCnn": True}, "passes.convert_bn_to_conv", True),
        ({"EnableNPUCnn": True, "ConvertBNToConv": False}, "passes.convert_bn_to_conv", False),
        ({"EnableNPUCnn": True, "SkipPreprocess": True}, "passes.split_large_pool", None),
        ({"FoldRelu": True}, "qdq.fold_relu", True),
        ({"AlignPool": True, "AlignPad": True}, "qdq.align", ("Pool", "Pad")),
        ({"ForceQuantizeNoInputCheck": True}, "qdq.force_pass_through", True),
        ({"UseQDQContribOps": True}, "qdq.contrib_domain", True),
        ({"Percentile": 99}, "calibration.percentile", 99.0),
        ({"CalibDataSize": 8}, "calibration.samples", 8),
        ({"UseRandomData": True}, "calibration.random_data", True),
        ({"RandomDataReaderInputShape": {"x": [1, 3]}}, "calibration.random_shapes", (("x", (1, 3)),)),
        ({"RandomDataReaderInputDataRange": {"x": [0, 1]}}, "calibration.random_ranges", (("x", (0, 1)),)),
        ({"ExecutionProviders": ["CUDAExecutionProvider"]}, "calibration.providers", ("CUDAExecutionProvider",)),
        ({"EnableNPUCnn": True}, "qdq.target", "npu"),
    ],
)
def test_options_reach_the_settings_of_both_generations(options: dict[str, Any], field: str, value: Any) -> None:
    part, _, name = field.rpartition(".")
    for settings in (new(extra_options=options), old(options)):
        holder = getattr(settings, part) if part else settings
        assert (holder[name] if part == "passes" else getattr(holder, name)) == value


def test_legacy_fields() -> None:
    settings = old(
        op_types_to_quantize=["Conv"],
        extra_op_types_to_quantize=["Sin"],
        nodes_to_quantize=["a"],
        nodes_to_exclude=["b", "^c.*"],
        subgraphs_to_exclude=[(["d"], ["e"])],
        execution_providers=["X"],
        optimize_model=False,
        use_external_data_format=True,
    )
    specs = settings.specs
    assert (specs.op_types, specs.extra_op_types, specs.nodes) == (("Conv",), ("Sin",), ("a",))
    assert settings.specs.exclude == ("b", "^c.*", (("d",), ("e",)))
    assert settings.calibration.providers == ("X",) and settings.external_data
    assert settings.passes["fold_batch_norm"] is False
    assert old(enable_npu_transformer=True) == old({"EnableNPUTransformer": True})
    assert new(extra_options={}, use_external_data_format=True).external_data


def test_passes_for_npus_are_on_by_default_where_documented() -> None:
    assert on_for_npus(named("A8W8")) == on_for_npus(named("XINT8")) == {True}
    assert on_for_npus(named("INT8_CNN_DEFAULT")) == {False}
    extended = new(BFloat16Spec(), BFloat16Spec())
    written = new(BFloat16Spec(), BFloat16Spec(), BF16QDQToCast=True)
    assert (on_for_npus(extended), on_for_npus(written)) == ({True}, {False})
    converted = old(convert_fp16_to_fp32=True, convert_nchw_to_nhwc=True).passes
    assert converted["convert_fp16_to_fp32"] is converted["convert_nchw_to_nhwc"] is True


def test_domains() -> None:
    assert not new().qdq.contrib_domain
    assert new(Int16Spec()).qdq.contrib_domain
    assert not new(Int16Spec(), UseQDQContribOps=False).qdq.contrib_domain
    assert not named("FP16").qdq.contrib_domain


@pytest.mark.parametrize(
    "values",
    [
        {"reduce_range": True},
    ],
)
def test_legacy_fields_that_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedError, match=next(iter(values))):
        old(**values)
    with pytest.raises(NotSupportedError, match="QOperator"):
        old(quant_format=QuantFormat.QOperator)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="WeightScaled=True is for BFloat16, got Float16"):
        new(BFloat16Spec(), Float16Spec(), WeightScaled=True)
    with pytest.raises(NotSupportedError, match="ActivationScaled=True goes with CalibMethod.MinMax or Percentile"):
        new(BFloat16Spec(calibration_method=CalibMethod.Entropy), BFloat16Spec(), ActivationScaled=True)
    with pytest.raises(ConfigError, match="Percentile"):
        new(Percentile=20)
    with pytest.raises(ConfigError, match="CalibDataSize"):
        new(CalibDataSize=0)
    with pytest.raises(ConfigError, match="Did you mean 'npu'"):
        new(Target="npus")
    with pytest.raises(ConfigError, match="Expected a QConfig or a Config"):
        lower("A8W8")  # type: ignore[arg-type]
    config = QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec()))
    config.extra_options["FoldRelo"] = True
    with pytest.raises(ConfigError, match="Did you mean 'FoldRelu'"):
        lower(config)


def test_float_weights_always_have_a_pair() -> None:
    assert new(BFloat16Spec(), BFloat16Spec(), AddQDQPairToWeight=True) == new(BFloat16Spec(), BFloat16Spec())
    assert new(AddQDQPairToWeight=True).qdq.float_weights and not new().qdq.float_weights


def test_settings_have_every_field() -> None:
    assert {entry.name for entry in fields(Settings)} == {*vars(new())}


@pytest.mark.slow
def test_configs_load_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, quark.onnx.config.lowering.lower, quark.onnx.config.presets\n"
        "assert not {'torch', 'pydantic', 'quark.torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
