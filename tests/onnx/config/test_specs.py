"""Tensor specs, data types, algorithm configs: defaults, setters, refusals, round trips."""

from __future__ import annotations

import dataclasses
import re

import pytest

from quark.core.dtypes import DTYPES
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.config import algo_configs
from quark.onnx.config import tensor_specs as specs
from quark.onnx.config.algo_configs import (
    ALGO_CONFIGS,
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    CLEConfig,
    GPTQConfig,
)
from quark.onnx.config.enums import (
    CalibMethod,
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    QuantFormat,
    QuantGranularity,
    QuantType,
    ScaleType,
    VitisQuantFormat,
    VitisQuantType,
    element_type,
    is_extended,
)
from quark.onnx.config.tensor_specs import DATA_TYPES, Int8Spec, QTensorConfig, UInt8Spec, XInt8Spec, parse_data_type

PERCENTILE, MIN_MAX, MIN_MSE = CalibMethod.Percentile, CalibMethod.MinMax, CalibMethod.MinMSE
SPECS = {name: cls for name, cls in vars(specs).items() if name.endswith("Spec") and name[0] != "_"}


def test_every_data_type_has_a_spec_and_a_row() -> None:
    assert {*SPECS} == {f"{name}Spec" for name in DATA_TYPES} | {"XInt8Spec"}
    for kind in DATA_TYPES.values():
        assert kind.core in DTYPES
        assert kind() is kind is parse_data_type(kind.name) is getattr(specs, kind.name)
    assert parse_data_type("Int5") is None


@pytest.mark.parametrize("name", SPECS)
def test_defaults_are_the_documented_ones(name: str) -> None:
    spec = SPECS[name]()
    plain = name.removeprefix("U") in ("Int8Spec", "Int16Spec", "Int32Spec")
    assert spec.data_type.name == ("Int8" if name == "XInt8Spec" else name.removesuffix("Spec"))
    assert spec.symmetric is not name.startswith("UInt")
    assert spec.scale_type is (ScaleType.PowerOf2 if name == "XInt8Spec" else ScaleType.Float32)
    assert spec.calibration_method is (PERCENTILE if plain else MIN_MSE if name == "XInt8Spec" else MIN_MAX)
    assert spec.quant_granularity is QuantGranularity.Tensor


@pytest.mark.parametrize("name", SPECS)
def test_round_trip(name: str) -> None:
    spec = SPECS[name](symmetric=False, quant_granularity=QuantGranularity.Channel)
    data = spec.to_dict()
    assert data["scale_type"].startswith("ScaleType.")
    assert QTensorConfig.from_dict(data).to_dict() == data == SPECS[name].from_dict(data).to_dict()


def test_arguments_by_position_and_by_name_win_over_the_row() -> None:
    spec = XInt8Spec(False, ScaleType.Float32, calibration_method="Entropy")
    assert (spec.symmetric, spec.scale_type, spec.calibration_method) == (
        False,
        ScaleType.Float32,
        CalibMethod.Entropy,
    )
    assert isinstance(XInt8Spec(), Int8Spec)


def test_setters_change_one_object_only() -> None:
    spec, other = UInt8Spec(), UInt8Spec()
    spec.set_symmetric(True)
    spec.set_scale_type(ScaleType.PowerOf2)
    spec.set_calibration_method(CalibrationMethod.MinMax)
    spec.set_quant_granularity(QuantGranularity.Channel)
    spec.set_data_type(specs.Int16)
    assert spec.to_dict() == {
        "symmetric": True,
        "scale_type": "ScaleType.PowerOf2",
        "calibration_method": "CalibMethod.MinMax",
        "quant_granularity": "QuantGranularity.Channel",
        "data_type": "Int16",
    }
    assert other.to_dict() == UInt8Spec().to_dict()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"symetric": True}, "Did you mean 'symmetric'"),
        ({"symmetric": 1}, "expected bool, got 1"),
        ({"scale_type": "PowerOf3"}, "PowerOf2"),
        ({"calibration_method": CalibMethod}, "calibration_method"),
        ({"data_type": "Int9"}, "Did you mean 'Int"),
        ({"data_type": int}, "expected DataType"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Int8Spec(**values)  # type: ignore[arg-type]


def test_refused_assignment_changes_nothing() -> None:
    spec = Int8Spec()
    with pytest.raises(ConfigError, match="Int8Spec.symmetric: expected bool"):
        spec.set_symmetric("no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no field 'symetric'"):
        spec.symetric = False  # type: ignore[attr-defined]
    assert spec.symmetric is True


def test_types_of_both_generations_normalise() -> None:
    assert element_type(QuantType.QUInt8, QuantFormat.QDQ) is ExtendedQuantType.QUInt8
    assert element_type(VitisQuantType.QInt16, VitisQuantFormat.QDQ) is ExtendedQuantType.QInt16
    assert element_type(QuantType.QInt8, VitisQuantFormat.BFPFixNeuron) is ExtendedQuantType.QBFP
    assert element_type(QuantType.QInt8, VitisQuantFormat.MXFixNeuron) is ExtendedQuantType.QMX
    with pytest.raises(ConfigError, match="QInt4"):
        element_type(QuantType.QInt4, QuantFormat.QDQ)
    assert is_extended(VitisQuantFormat.FixNeuron) and is_extended(ExtendedQuantFormat.QDQ)
    assert not is_extended(QuantFormat.QDQ)
    assert {m.name: m.value for m in ExtendedQuantType} == {m.name: m.value for m in VitisQuantType}


def test_tensor_types_are_onnx_s() -> None:
    import onnx

    for kind in ExtendedQuantType:
        name = kind.name.removeprefix("Q").upper() if kind.name not in ("QBFP", "QMX") else "UNDEFINED"
        assert kind.tensor_type == onnx.TensorProto.DataType.Value(name)
        assert ExtendedQuantType.from_string(str(kind)) is kind


@pytest.mark.parametrize("name", [name for name in ALGO_CONFIGS if name != "auto_mixprecision"])
def test_algorithms_round_trip_as_dict_and_as_options(name: str) -> None:
    made = ALGO_CONFIGS[name]()
    assert made.to_dict() == {"name": name}
    assert AlgoConfig.from_dict(made.to_dict()) == made
    options = {key: getattr(made, field) for field, key in made.keys.items()}
    assert ALGO_CONFIGS[name].from_options({**made.flag, **options}) == made


def test_every_parameter_reaches_the_options() -> None:
    for cls in (AdaRoundConfig, AdaQuantConfig, CLEConfig, GPTQConfig, algo_configs.QuarotConfig):
        assert {*cls.keys} == {entry.name for entry in dataclasses.fields(cls)}


def test_algorithm_defaults_of_the_guides() -> None:
    round_, quant = AdaRoundConfig(), AdaQuantConfig()
    assert (round_.num_iterations, round_.learning_rate) == (1000, 0.1)
    assert (quant.num_iterations, quant.learning_rate, quant.batch_size) == (3000, 1e-5, 1)
    assert AdaQuantConfig(learning_rate=1).learning_rate == 1.0
    quant.learning_rate = 1e-6
    assert quant.to_dict() == {"name": "adaquant", "learning_rate": 1e-6}


def test_mixed_precision_needs_a_target_and_known_metrics() -> None:
    with pytest.raises(ConfigError, match="target_layer_config is required"):
        algo_configs.AutoMixprecisionConfig()
    with pytest.raises(ConfigError, match="metric_default: 'l3'"):
        algo_configs.AutoMixprecisionConfig(object(), metric_default="l3")


@pytest.mark.parametrize("name", algo_configs.FORMER_MIX_FIELDS)
def test_former_names_of_mixed_precision_say_what_says_it_today(name: str) -> None:
    fields = {entry.name for entry in dataclasses.fields(algo_configs.AutoMixprecisionConfig)}
    with pytest.raises(NotSupportedError, match=f"{name} belongs to versions before") as told:
        algo_configs.AutoMixprecisionConfig(object(), **{name: 1})
    possible = str(told.value).partition("Possible: ")[2]
    assert name not in fields and (fields & set(re.findall(r"\w+", possible)) or "algo_config" in possible)


def test_unknown_algorithms_and_entries_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'adaround'"):
        AlgoConfig.from_dict({"name": "adarund"})
    with pytest.raises(ConfigError, match="Did you mean 'NumIterations'"):
        AdaRoundConfig.from_options({"NumIteration": 3})
    with pytest.raises(ConfigError, match="needs a 'name'"):
        AlgoConfig.from_dict({})
