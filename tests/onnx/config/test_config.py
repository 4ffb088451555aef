"""QLayerConfig, QConfig and the legacy classes: both spellings, refusals, round trips, assignments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quark.errors import ConfigError, QuarkError
from quark.onnx.config.algo_configs import AdaQuantConfig, AutoMixprecisionConfig, CLEConfig
from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.enums import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    QuantFormat,
    QuantType,
    VitisQuantFormat,
    VitisQuantType,
)
from quark.onnx.config.tensor_specs import BFloat16Spec, Int8Spec, Int16Spec, Int32Spec, UInt8Spec

LAYER = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())


def full() -> QConfig:
    return QConfig(
        QLayerConfig(activation=UInt8Spec(), weight=Int8Spec(), bias=Int32Spec()),
        specific_layer_config={
            QLayerConfig(input_tensors=Int16Spec()): ["conv1", "^/block.*", (["a"], ["b"])],
            QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()): ["conv2"],
        },
        layer_type_config={QLayerConfig(weight=Int16Spec()): ["MatMul"], None: ["Softmax"]},
        exclude=["head", (["c", "d"], ["e"])],
        algo_config=[CLEConfig(cle_steps=2), AdaQuantConfig(num_iterations=10)],
        use_external_data_format=True,
        WeightCalibrateMethod=ExtendedCalibrationMethod.MinMSE,
        extra_options={"FoldRelu": True, "FastFinetune": {"BetaRange": (20, 2)}},
    )


def test_activation_is_input_tensors() -> None:
    one, other = QLayerConfig(activation=UInt8Spec(), weight=Int8Spec()), LAYER
    assert one.to_dict() == other.to_dict()
    assert one.activation is one.input_tensors
    spec = Int16Spec()
    one.activation = spec
    assert one.input_tensors is spec
    assert QLayerConfig(None, spec, Int8Spec()).to_dict()["input_tensors"]["data_type"] == "Int16"
    with pytest.raises(ConfigError, match="give one of them"):
        QLayerConfig(input_tensors=UInt8Spec(), activation=Int8Spec())
    with pytest.raises(ConfigError, match="no tensor has a spec"):
        QLayerConfig()


def test_from_dict_reads_activation() -> None:
    data = LAYER.to_dict()
    both = {**data, "activation": data["input_tensors"]}
    old = {"activation": data["input_tensors"], "weight": data["weight"]}
    for form in (data, both, old):
        assert QLayerConfig.from_dict(form).to_dict() == data
    with pytest.raises(ConfigError, match="Did you mean 'weight'"):
        QLayerConfig.from_dict({"weights": data["weight"]})


def test_options_by_keyword_and_in_extra_options_are_one() -> None:
    direct = QConfig(LAYER, BF16QDQToCast=True, CalibDataSize=4)
    inside = QConfig(LAYER, extra_options={"BF16QDQToCast": True, "CalibDataSize": 4})
    mixed = QConfig(LAYER, extra_options={"BF16QDQToCast": True}, CalibDataSize=4)
    assert direct.extra_options == inside.extra_options == mixed.extra_options
    with pytest.raises(ConfigError, match="'FoldRelu' is given twice"):
        QConfig(LAYER, extra_options={"FoldRelu": True}, FoldRelu=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"BF16QDQToCasts": True}, "Did you mean 'BF16QDQToCast'"),
        ({"excludes": []}, "Did you mean 'exclude'"),
        ({"extra_options": {"FoldRelo": True}}, "Did you mean 'FoldRelu'"),
        ({"extra_options": {"FoldRelu": 1}}, "FoldRelu: expected bool, got 1"),
        ({"extra_options": 3}, "extra_options: expected dict"),
        ({"exclude": [3]}, "got 3"),
        ({"exclude": [("a", "b")]}, "end nodes"),
        ({"exclude": "conv1"}, "exclude: expected list"),
        ({"specific_layer_config": {"Int16": ["conv1"]}}, "specific_layer_config"),
        ({"algo_config": ["cle"]}, "algo_config"),
    ],
)
def test_wrong_configs_are_refused_where_they_are_made(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        QConfig(LAYER, **options)


def test_the_global_config_needs_its_specs() -> None:
    with pytest.raises(ConfigError, match="weight has no spec"):
        QConfig(QLayerConfig(input_tensors=Int8Spec()))
    with pytest.raises(ConfigError, match="input_tensors has no spec"):
        QConfig(QLayerConfig(weight=Int8Spec()))
    assert QConfig(QLayerConfig(weight=Int8Spec()), WeightsOnly=True).extra_options == {"WeightsOnly": True}
    with pytest.raises(ConfigError, match="global_config is required"):
        QConfig()  # type: ignore[call-arg]


def test_qconfig_round_trip_through_json() -> None:
    config = full()
    data = json.loads(json.dumps(config.to_dict()))
    again = QConfig.from_dict(data)
    assert json.loads(json.dumps(again.to_dict())) == data
    assert len(again.specific_layer_config) == 2
    assert again.extra_options["WeightCalibrateMethod"] is ExtendedCalibrationMethod.MinMSE
    assert again.algo_config == config.algo_config
    assert again.global_config.input_tensors is not None


def test_mixed_precision_target_round_trip() -> None:
    targets = (LAYER, [LAYER], {LAYER: ["a"], QLayerConfig(weight=Int16Spec()): []})
    for target in targets:
        config = QConfig(LAYER, algo_config=[AutoMixprecisionConfig(target, data_size=3)])
        data = json.loads(json.dumps(config.to_dict()))
        assert QConfig.from_dict(data).to_dict() == config.to_dict()


def test_none_and_single_values_mean_lists() -> None:
    config = QConfig(LAYER, None, None, None, None)
    assert (config.specific_layer_config, config.layer_type_config) == ({}, {})
    assert (config.exclude, config.algo_config) == ([], [])
    assert QConfig(LAYER, algo_config=CLEConfig(), exclude=("a",)).exclude == ["a"]  # type: ignore[arg-type]
    assert list(QConfig(LAYER, layer_type_config={None: "Add"}).layer_type_config.values()) == [["Add"]]  # type: ignore[dict-item]


def test_given_lists_are_copied_and_specs_kept() -> None:
    exclude, options = ["a"], {"FoldRelu": True}
    config = QConfig(LAYER, exclude=exclude, extra_options=options)
    exclude.append("b")
    options["Nonsense"] = True
    assert config.exclude == ["a"] and config.extra_options == {"FoldRelu": True}
    assert config.global_config is LAYER


def test_assignments_are_checked() -> None:
    config = full()
    config.exclude = ["a"]
    with pytest.raises(ConfigError, match="expected list"):
        config.exclude = "a"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no field 'exlude'"):
        config.exlude = []  # type: ignore[attr-defined]
    assert config.exclude == ["a"]


def test_the_guide_s_quantization_config() -> None:
    config = QuantizationConfig(
        calibrate_method=CalibrationMethod.MinMax,
        quant_format=VitisQuantFormat.QDQ,
        activation_type=VitisQuantType.QInt16,
        weight_type=QuantType.QInt8,
        include_fast_ft=True,
        extra_options={
            "ActivationSymmetric": True,
            "AlignSlice": False,
            "FoldRelu": True,
            "AlignConcat": True,
            "AlignEltwiseQuantType": True,
            "FastFinetune": {"NumIterations": 1000, "LearningRate": 0.1, "OptimAlgorithm": "adaround"},
        },
    )
    data = json.loads(json.dumps(Config(global_quant_config=config).to_dict()))
    again = Config.from_dict(data)
    assert again.to_dict() == data
    assert again.global_quant_config.activation_type is VitisQuantType.QInt16


def test_legacy_defaults_are_fresh_and_assignable() -> None:
    one, other = QuantizationConfig(), QuantizationConfig()
    one.extra_options["UseRandomData"] = True
    one.nodes_to_exclude.append("a")
    one.include_cle = False
    assert other.to_dict() == QuantizationConfig().to_dict()
    assert other.include_cle is True and other.quant_format is QuantFormat.QDQ
    assert other.execution_providers == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"calibrate_method": QuantType.QInt8}, "calibrate_method: expected CalibrationMethod or"),
        ({"activation_type": QuantType.QInt4}, "QInt4"),
        ({"per_channels": True}, "Did you mean 'per_channel'"),
        ({"per_channel": 1}, "expected bool"),
        ({"extra_options": {"AlignConkat": True}}, "Did you mean 'AlignConcat'"),
        ({"subgraphs_to_exclude": [("a", "b", "c")]}, "end nodes"),
    ],
)
def test_wrong_legacy_configs_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        QuantizationConfig(**values)  # type: ignore[arg-type]


def test_config_takes_the_name_of_a_configuration() -> None:
    named = Config(global_quant_config="A8W8")  # type: ignore[arg-type]
    assert named.to_dict() == QConfig.get_default_config("A8W8").to_dict()
    with pytest.raises(QuarkError, match="Did you mean"):
        QConfig.get_default_config("A8W9")


def test_bfloat16_guide() -> None:
    spec = BFloat16Spec()
    config = QConfig(global_config=QLayerConfig(activation=spec, weight=spec), BF16QDQToCast=True)
    assert config.global_config.activation is spec
    assert config.extra_options == {"BF16QDQToCast": True}


NO_CONFIGS: list[Any] = [
    5,
    {"global_config": 5},
    {"specific_layer_config": 5},
    {"specific_layer_config": [5]},
    {"specific_layer_config": [[None]]},
    {"layer_type_config": [[5, ["Conv"]]]},
    {"algo_config": 5},
    {"algo_config": ["cle"]},
    {"algo_config": [{"name": "auto_mixprecision", "target_layer_config": [[5, 5]]}]},
]


@pytest.mark.parametrize("data", NO_CONFIGS, ids=str)
def test_what_is_no_dict_or_list_is_refused_where_one_belongs(data: Any) -> None:
    if isinstance(data, dict):
        data = {"global_config": LAYER.to_dict(), **data}
    with pytest.raises(ConfigError, match="expected"):
        QConfig.from_dict(data)
