"""QTensorConfig, QLayerConfig, QConfig: what passes the door, what does not, and what is written to disk."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quark.compat.torch_names.shorthand_specs import FP8E4M3PerTensorSpec, Int4PerGroupSpec, Int8PerTensorSpec
from quark.core.schemes import SCHEMES
from quark.errors import ConfigError, FormatError
from quark.torch.config import named_algorithms
from quark.torch.config.algo_configs import AWQConfig, GPTQConfig, QuaRotConfig, RotationConfig
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.config.named_algorithms import ALGO_CONFIGS
from quark.torch.config.tensor.enums import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantizationMode,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark.torch.config.tensor.observer_classes import (
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PlaceholderObserver,
)
from quark.torch.config.tensor.tensor_config import QTensorConfig

INT8: dict[str, Any] = {
    "dtype": Dtype.int8,
    "qscheme": QSchemeType.per_tensor,
    "observer_cls": PerTensorMinMaxObserver,
    "symmetric": True,
    "scale_type": ScaleType.float,
    "round_method": RoundType.half_even,
    "is_dynamic": False,
}
# The tensor object of section 3.1 of the format: key order included.
INT4_JSON = {
    "dtype": "int4",
    "is_dynamic": False,
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 128,
    "block_size": None,
    "symmetric": True,
    "round_method": "half_even",
    "scale_type": "float",
    "zero_point_type": "int32",
    "scale_format": None,
    "scale_calculation_mode": None,
    "mx_element_dtype": None,
    "observer_cls": "PerGroupMinMaxObserver",
    "is_scale_quant": False,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
}


def int8(**changes: Any) -> QTensorConfig:
    return QTensorConfig(**{**INT8, **changes})


def test_the_guides_names_and_snippet() -> None:
    from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
    from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver

    assert (Config, QuantizationConfig, QuantizationSpec) == (QConfig, QLayerConfig, QTensorConfig)
    spec = QuantizationSpec(
        dtype=Dtype.int8,
        qscheme=QSchemeType.per_tensor,
        observer_cls=PerTensorMinMaxObserver,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
    )
    config = Config(global_quant_config=QuantizationConfig(weight=spec))
    assert config.global_quant_config.weight == spec == int8()
    assert config.exclude == [] and config.algo_config is None


def test_documented_fields_and_defaults() -> None:
    def defaults(cls: Any) -> dict[str, Any]:
        made = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
        return {f.name: made.get(f.name, "required or a factory") for f in dataclasses.fields(cls)}

    optional = (
        "observer_cls is_dynamic qscheme ch_axis group_size block_size symmetric round_method "
        "scale_type scale_format scale_calculation_mode qat_spec mx_element_dtype"
    )
    none = dict.fromkeys(optional.split())
    last = {
        "zero_point_type": ZeroPointType.int32,
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }
    assert list(defaults(QTensorConfig)) == ["dtype", *none, *last]
    assert defaults(QTensorConfig) == {"dtype": "required or a factory", **none, **last}
    layer = dict.fromkeys(["input_tensors", "output_tensors", "weight", "bias", "target_device"])
    assert defaults(QLayerConfig) == layer
    documented = [
        "global_quant_config",
        "exclude",
        "algo_config",
        "log_severity_level",
        "version",
        "layer_type_quant_config",
        "layer_quant_config",
        "kv_cache_quant_config",
        "kv_cache_group",
        "min_kv_scale",
        "kv_cache_post_rope",
        "shared_scale_groups",
        "softmax_quant_spec",
        "quant_mode",
        "quant_flow",
        "gpu_resident_blocks",
        "sync_moe_expert_input_amax",
        "keep_prequantized_layers",
    ]
    assert list(defaults(QConfig))[: len(documented)] == documented
    assert defaults(QConfig)["quant_mode"] is QuantizationMode.eager_mode
    assert defaults(QConfig)["keep_prequantized_layers"] is True


def test_positional_arguments() -> None:
    by_place = QTensorConfig(Dtype.int8, PerChannelMinMaxObserver, False, QSchemeType.per_channel, 0, None, None, True,
                             RoundType.half_even, ScaleType.float)  # fmt: skip
    by_name = int8(qscheme="per_channel", observer_cls="PerChannelMinMaxObserver", ch_axis=0)
    assert by_place == by_name
    layer = QLayerConfig(None, None, by_place)
    assert layer.weight == by_place
    assert QConfig(layer, ["lm_head"]).exclude == ["lm_head"]


def test_names_are_accepted_for_enums_and_observers() -> None:
    named = QTensorConfig("int8", "PerTensorMinMaxObserver", False, "per_tensor", None, None, None, True,
                          "half_even", "float")  # fmt: skip
    assert named == int8()
    assert int8(scale_type="power_of_2").scale_type is int8(scale_type="pof2").scale_type is ScaleType.pof2
    assert QLayerConfig(target_device="CPU").target_device is DeviceType.CPU


MX6: dict[str, Any] = {"dtype": "mx6", "ch_axis": -1, "group_size": 16}
FP4: dict[str, Any] = {
    "dtype": "fp4",
    "is_dynamic": True,
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "observer_cls": "PerBlockMXObserver",
}
BAD_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({**INT8, "simmetric": True}, r"QTensorConfig has no field 'simmetric'. Did you mean 'symmetric'"),
    "unknown dtype": ({**INT8, "dtype": "itn8"}, r"QTensorConfig.dtype: unknown Dtype 'itn8'. Did you mean .*'int8'"),
    "unknown qscheme": ({**INT8, "qscheme": "per_tensr"}, r"qscheme.*Did you mean 'per_tensor'"),
    "unknown observer": ({**INT8, "observer_cls": "PerTensorMinMax"}, r"Did you mean 'PerTensorMinMaxObserver'"),
    "missing dtype": ({}, r"QTensorConfig.dtype is required"),
    "wrong type": ({**INT8, "symmetric": "yes"}, r"QTensorConfig.symmetric: expected bool \| None, got 'yes' \(str\)"),
    "int for bool": ({**INT8, "is_dynamic": 0}, r"QTensorConfig.is_dynamic: expected bool \| None, got 0 \(int\)"),
    "class no observer": ({**INT8, "observer_cls": nn.Linear}, r"QTensorConfig.observer_cls: expected"),
    "float axis": ({**FP4, "ch_axis": 1.0}, r"QTensorConfig.ch_axis: expected int \| None, got 1.0 \(float\)"),
    "no is_dynamic": ({**INT8, "is_dynamic": None}, r"is_dynamic is required for dtype int8"),
    "no scale type": ({**INT8, "scale_type": None}, r"scale_type is required for dtype int8"),
    "no observer": ({**FP4, "observer_cls": None}, r"observer_cls is required for dtype fp4"),
    "no group size": ({**FP4, "group_size": None}, r"group_size is required for qscheme per_group"),
    "group size 0": ({**FP4, "group_size": 0}, r"group_size must be positive, or -1"),
    "no axis": ({**INT8, "qscheme": "per_channel"}, r"ch_axis is required for qscheme per_channel"),
    "stray axis": ({**INT8, "ch_axis": 0}, r"ch_axis=0 has no meaning with qscheme per_tensor"),
    "stray group size": ({**INT8, "group_size": 32}, r"group_size=32 has no meaning with qscheme per_tensor"),
    "wrong family": ({**INT8, "observer_cls": PerChannelMinMaxObserver}, r"per_tensor.*PerTensorMSEObserver"),
    "no block size": ({**FP4, "qscheme": "per_block", "group_size": None, "ch_axis": None}, r"block_size is required"),
    "int with e8m0": ({**INT8, "scale_format": "e8m0"}, r"scale_format='e8m0' has no meaning with dtype int8"),
    "int with e5m3": ({**INT8, "scale_type": "float8_e5m3"}, r"scale_type=float8_e5m3 has no meaning"),
    "unknown format": ({**FP4, "scale_format": "e8m"}, r"scale_format: unknown 'e8m'. Did you mean 'e8m0'"),
    "unknown mode": ({**FP4, "scale_format": "e8m0", "scale_calculation_mode": "evn"}, r"Did you mean 'even'"),
    "mode without e8m0": ({**FP4, "scale_calculation_mode": "even"}, r"scale_calculation_mode='even' has no meaning"),
    "two scale types": ({**FP4, "scale_format": "e8m0", "scale_type": "float16"}, r"scale_type=float16"),
    "asymmetric float": ({**FP4, "symmetric": False}, r"symmetric=False has no meaning with dtype fp4"),
    "symmetric float zero": ({**INT8, "zero_point_type": "float32"}, r"zero_point_type=float32 needs symmetric=False"),
    "element of no mx": ({**INT8, "mx_element_dtype": "int8"}, r"mx_element_dtype=int8 has no meaning"),
    "mx without element": ({"dtype": "mx", "ch_axis": -1, "group_size": 32}, r"mx_element_dtype is required"),
    "no mx element": (
        {"dtype": "mx", "ch_axis": -1, "group_size": 32, "mx_element_dtype": "int4"},
        r"int4 is no OCP MX element. Possible: int8, fp8_e4m3",
    ),
    "mx6 without axis": ({**MX6, "ch_axis": None}, r"ch_axis is required for dtype mx6"),
    "mx6 per channel": ({**MX6, "qscheme": "per_channel"}, r"qscheme=per_channel has no meaning with dtype mx6"),
    "mx6 floor": ({**MX6, "scale_calculation_mode": "floor"}, r"scale_calculation_mode='floor' has no meaning"),
    "cast with groups": ({"dtype": "bfloat16", "group_size": 32}, r"group_size=32 has no meaning with dtype bfloat16"),
    "cast observed": ({"dtype": "float16", "observer_cls": PerTensorMinMaxObserver}, r"Use PlaceholderObserver"),
}


@pytest.mark.parametrize("case", BAD_TENSORS, ids=str)
def test_a_wrong_tensor_config_says_what_and_where(case: str) -> None:
    fields, message = BAD_TENSORS[case]
    with pytest.raises(ConfigError, match=message):
        QTensorConfig(**fields)


def test_wrong_layer_and_model_configs() -> None:
    layer = QLayerConfig(weight=int8())
    for build, message in [
        (lambda: QLayerConfig(weights=int8()), "QLayerConfig has no field 'weights'. Did you mean 'weight'"),
        (lambda: QLayerConfig(weight="int8"), r"QLayerConfig.weight: expected .*QTensorConfig.*, got 'int8' \(str\)"),
        (lambda: QLayerConfig(weight=[int8()] * 3), "QLayerConfig.weight: a list has two stages, got 3"),
        (lambda: QLayerConfig(weight=int8(is_scale_quant=True)), "is for the second of two"),
        (lambda: QLayerConfig(input_tensors=Int4PerGroupSpec(-1, 32)), "input_tensors.*is_dynamic=True"),
        (lambda: QLayerConfig(None, None, None, None, None, None), "at most 5 values, got 6"),
        (lambda: QLayerConfig(None, input_tensors=None), "QLayerConfig.input_tensors is given twice"),
        (lambda: QConfig(), "QConfig.global_quant_config is required"),
        (lambda: QConfig(int8()), "QConfig.global_quant_config: expected QLayerConfig, got"),
        (lambda: QConfig(layer, exclude="lm_head"), r"QConfig.exclude: expected list\[str\], got 'lm_head' \(str\)"),
        (lambda: QConfig(layer, exclude=[1]), r"QConfig.exclude"),
        (
            lambda: QConfig(layer, exclude=["@outputhead"]),
            "unknown selector '@outputhead'. Did you mean '@output_head'",
        ),
        (lambda: QConfig(layer, layer_quant_config={"a": int8()}), "QConfig.layer_quant_config: expected"),
        (
            lambda: QConfig(layer, layer_type_quant_config={"Linear": layer}),
            "QConfig.layer_type_quant_config: expected",
        ),
        (lambda: QConfig(layer, algo_config=["awq"]), "QConfig.algo_config: expected"),
        (lambda: QConfig(layer, pre_quant_opt_config=[]), "QConfig has no field 'pre_quant_opt_config'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build()


def test_what_is_accepted_beside_the_documented_types() -> None:
    config = QConfig(
        QLayerConfig(weight=Int8PerTensorSpec(), input_tensors=[FP8E4M3PerTensorSpec(), int8(is_scale_quant=True)]),
        exclude=("lm_head", "@router"),
        algo_config=AWQConfig(),
        layer_type_quant_config={nn.Linear: QLayerConfig()},
        softmax_quant_spec=FP8E4M3PerTensorSpec(),
    )
    assert config.global_quant_config.weight == int8()
    assert config.exclude == ["lm_head", "@router"]
    assert config.algo_config == [AWQConfig()]
    assert config.softmax_quant_spec is not None and config.softmax_quant_spec.dtype is Dtype.fp8_e4m3
    assert QTensorConfig(Dtype.bfloat16).observer_cls is None
    assert QTensorConfig(Dtype.float16, PlaceholderObserver, symmetric=True, scale_type=ScaleType.float)


def test_a_config_shares_nothing_with_what_it_was_made_of() -> None:
    given: dict[str, Any] = {"exclude": ["a"], "layer_quant_config": {"b": QLayerConfig()}, "kv_cache_group": ["c"]}
    config = QConfig(QLayerConfig(), **given)
    given["exclude"].append("z")
    given["layer_quant_config"]["z"] = QLayerConfig()
    assert config.exclude == ["a"] and list(config.layer_quant_config) == ["b"]
    with pytest.raises(ConfigError, match="Did you mean 'exclude'"):
        config.exclud = []
    assert dataclasses.replace(config, exclude=["d"]).exclude == ["d"]
    assert config.exclude == ["a"]
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))


def test_set_group_size_is_the_one_setter() -> None:
    config = Int4PerGroupSpec(-1, 128).to_quantization_spec()
    config.set_group_size(64)
    assert config.group_size == 64
    with pytest.raises(ConfigError, match="group_size"):
        config.set_group_size(-2)
    with pytest.raises(ConfigError, match="per_tensor"):
        int8().set_group_size(32)
    assert config.group_size == 64


def test_is_ocp_mxfp4() -> None:
    mxfp4 = config_of_layer(SCHEMES["mxfp4"]).weight
    assert isinstance(mxfp4, QTensorConfig) and mxfp4.is_ocp_mxfp4()
    assert not int8().is_ocp_mxfp4() and not QTensorConfig(**FP4).is_ocp_mxfp4()
    assert QTensorConfig(Dtype.mx, ch_axis=-1, group_size=32, mx_element_dtype=Dtype.fp4).is_ocp_mxfp4()


def test_tensor_json_has_the_17_keys_in_order() -> None:
    config = Int4PerGroupSpec(-1, 128).to_quantization_spec()
    assert config.to_dict() == INT4_JSON and list(config.to_dict()) == list(INT4_JSON)
    assert QTensorConfig.from_dict(INT4_JSON) == config
    assert QTensorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    blocks = QTensorConfig(Dtype.fp8_e4m3, "PerBlock2DMinMaxObserver", False, "per_block", block_size=[128, 128])
    assert blocks.to_dict()["block_size"] == [128, 128]
    assert QTensorConfig.from_dict(blocks.to_dict()) == blocks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_survives_json(scheme: str) -> None:
    config = QConfig(config_of_layer(SCHEMES[scheme]), exclude=["lm_head"])
    text = json.dumps(config.to_dict())
    assert QConfig.from_dict(json.loads(text)) == config


def test_model_json() -> None:
    layer = QLayerConfig(weight=int8(), target_device=DeviceType.CPU)
    config = QConfig(
        layer,
        exclude=["lm_head"],
        algo_config=[GPTQConfig(damp_percent=0.1), QuaRotConfig()],
        layer_quant_config={"*.fc1": QLayerConfig()},
        layer_type_quant_config={nn.Conv2d: layer, nn.Embedding: layer},
        kv_cache_quant_config={"*k_proj": QLayerConfig(output_tensors=int8())},
        softmax_quant_spec=int8(),
    )
    data = config.to_dict()
    assert list(data) == [
        "quant_method", "quant_mode", "version", "global_quant_config", "exclude", "layer_quant_config",
        "layer_type_quant_config", "kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec", "algo_config",
        "algo_config_of_quark",
    ]  # fmt: skip
    assert data["quant_method"] == "quark" and data["quant_mode"] == "eager_mode"
    assert list(data["layer_type_quant_config"]) == ["Conv2d", "Embedding"]
    assert data["global_quant_config"]["target_device"] == "CPU"
    assert data["algo_config"][0]["damp_percent"] == 0.1
    before = copy.deepcopy(data)
    export = {"kv_cache_group": ["*k_proj"], "min_kv_scale": 0.5, "pack_method": "reorder", "weight_merge_groups": None}
    loaded = QConfig.from_dict({**data, "export": export, "exclude_patterns": ["lm_*"]})
    assert dataclasses.replace(loaded, kv_cache_group=[], min_kv_scale=0.0) == config
    assert loaded.kv_cache_group == ["*k_proj"] and loaded.min_kv_scale == 0.5
    assert data == before


def test_older_checkpoints_load() -> None:
    tensor = {"dtype": "fp8_e4m3", "dynamic": False, "qscheme": "per_tensor", "axis": None, "group_size": None,
              "symmetric": None, "round_method": None, "scale_type": None}  # fmt: skip
    old = {
        "quant_method": "quark",
        "global_quant_config": {"input_tensors": None, "output_tensors": None, "weight": tensor, "bias": None},
        "exclude": None,
        "layer_quant_config": None,
        "layer_type_quant_config": None,
        "algo_config": {"name": "gptq", "damp_percent": 0.02, "true_sequential": True},
        "export": None,
    }
    config = QConfig.from_dict(old)
    weight = config.global_quant_config.weight
    assert isinstance(weight, QTensorConfig) and weight.observer_cls is PerTensorMinMaxObserver
    assert config.exclude == [] and config.quant_mode is QuantizationMode.eager_mode
    # The record of an algorithm that this version does not know in this form is kept as it came.
    assert config.to_dict()["algo_config"] == [old["algo_config"]]
    for data, message in [
        ({**old, "excluded": []}, "QConfig has no field 'excluded'. Did you mean 'exclude'"),
        ({"global_quant_config": {"wieght": tensor}}, "QLayerConfig has no field 'wieght'. Did you mean 'weight'"),
        ({"global_quant_config": {"weight": {**tensor, "axs": 0}}}, "QTensorConfig has no field 'axs'"),
        ({"layer_type_quant_config": {"Linaer": {}}}, "torch.nn has no layer 'Linaer'. Did you mean 'Linear'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            QConfig.from_dict(data)


def test_algorithm_configs() -> None:
    assert {name: cls().to_dict()["name"] for name, cls in ALGO_CONFIGS.items()} == {
        name: "smooth" if name == "smoothquant" else name for name in ALGO_CONFIGS
    }
    gptq = {"name": "gptq", "block_size": 128, "damp_percent": 0.01, "desc_act": True, "static_groups": True,
            "inside_layer_modules": [], "model_decoder_layers": "",
            "group_aware_order": False, "refine_passes": 1, "fisher": False}  # fmt: skip
    assert GPTQConfig().to_dict() == gptq and list(GPTQConfig().to_dict()) == list(gptq)
    assert RotationConfig({"first_layer": []}).r2 is False and QuaRotConfig().r4 is True
    assert (
        QConfig(QLayerConfig(), algo_config=[AWQConfig(), RotationConfig()]).get_rotation_config() == RotationConfig()
    )
    with pytest.raises(ConfigError, match="GPTQConfig: desc_act=True needs static_groups=True"):
        GPTQConfig(static_groups=False)
    with pytest.raises(ConfigError, match="GPTQConfig has no field 'true_sequential'"):
        GPTQConfig(true_sequential=True)
    with pytest.raises(ConfigError, match=r"AWQConfig.scaling_layers: expected"):
        AWQConfig(scaling_layers={})


def test_algorithm_configs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "algo.json"
    file.write_text(json.dumps({"name": "quarot", "r3": False, "scaling_layers": {"first_layer": []}}))
    loaded = named_algorithms.load_quant_algo_config_from_file(file)
    assert loaded == QuaRotConfig({"first_layer": []}, r3=False)
    assert named_algorithms.load_pre_optimization_config_from_file(str(file)) == loaded
    file.write_text(json.dumps(AWQConfig(model_decoder_layers="model.layers").to_dict()))
    assert named_algorithms.load_quant_algo_config_from_file(file) == AWQConfig(model_decoder_layers="model.layers")
    with pytest.raises(ConfigError, match="AWQConfig, which is no pre-quantization"):
        named_algorithms.load_pre_optimization_config_from_file(file)
    for text, error, message in [
        ('{"name": "gpqt"}', ConfigError, "Unknown algorithm 'gpqt'. Did you mean 'gptq'"),
        ('{"name": "gptq", "damp": 1}', ConfigError, "GPTQConfig has no field 'damp'"),
        ("{}", ConfigError, "needs a 'name'"),
        ("[]", FormatError, "not one JSON object"),
        ("{", FormatError, "is not JSON"),
    ]:
        file.write_text(text)
        with pytest.raises(error, match=message):
            named_algorithms.load_quant_algo_config_from_file(file)


NO_CONFIGS: list[Any] = [
    5, "", ["a"], {"global_quant_config": ""}, {"global_quant_config": {"weight": "int8"}},
    {"global_quant_config": {"weight": [3]}}, {"export": 1}, {"layer_quant_config": 1},
    {"layer_quant_config": {"a": 1}}, {"layer_type_quant_config": 1}, {"algo_config": False}, {"algo_config": ["awq"]},
]  # fmt: skip


@pytest.mark.parametrize("data", NO_CONFIGS, ids=str)
def test_what_is_no_dict_is_refused_where_one_belongs(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"got .* \((int|str|list|bool)\)"):
        QConfig.from_dict(data)


@pytest.mark.parametrize("size", [0, -4])
def test_a_rotation_has_a_positive_size(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"rotation_size: {size} is below 1"):
        RotationConfig(rotation_size=size)
