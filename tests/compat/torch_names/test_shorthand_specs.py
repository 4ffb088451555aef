"""The shorthand specs: names, order and defaults of the arguments, and the config each one gives."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from quark.compat.torch_names import shorthand_specs as specs
from quark.core.spec import ScaleType
from quark.errors import ConfigError
from quark.torch.config.config import QLayerConfig
from quark.torch.config.lowering import lower_tensor
from quark.torch.config.tensor.enums import Dtype, QSchemeType, RoundType, TQTThresholdInitMeth, ZeroPointType
from quark.torch.config.tensor.tensor_config import QTensorConfig
from quark.torch.quantization.config import config as address

REQUIRED = object()
_RULES = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
_AXIS = {"ch_axis": REQUIRED}
_GROUP = {"ch_axis": REQUIRED, "group_size": REQUIRED}
_EARLY = {"is_dynamic": False, "scale_type": "float", "round_method": "half_even"}
_LAST_AXIS = {"ch_axis": -1}  # required in 0.13, and -1 in the versions before it
_FLOAT_GROUP = {
    **_LAST_AXIS,
    "group_size": None,
    "scale_format": "float32",
    "scale_calculation_mode": None,
    "is_dynamic": True,
}
_MX = {**_LAST_AXIS, "is_dynamic": True, "scale_calculation_mode": "even"}
_FP8 = {"observer_method": "min_max", "scale_type": None, "is_dynamic": False}


def _tensor(symmetric: bool) -> dict[str, Any]:
    return {"observer_method": "min_max", "symmetric": symmetric, **_RULES}


# Documented arguments with their defaults, dtype, qscheme, observer (appendix A of the reference).
TABLE: dict[str, tuple[dict[str, Any], str, str | None, str | None]] = {
    "Uint4PerTensorSpec": (_tensor(False), "uint4", "per_tensor", "PerTensorMinMaxObserver"),
    "Uint4PerChannelSpec": (
        {**_AXIS, "symmetric": False, **_RULES, "is_dynamic": None, "zero_point_type": "int32"},
        "uint4",
        "per_channel",
        "PerChannelMinMaxObserver",
    ),
    "Uint4PerGroupSpec": ({**_GROUP, "symmetric": False, **_EARLY}, "uint4", "per_group", "PerGroupMinMaxObserver"),
    "Int3PerGroupSpec": ({**_GROUP, "symmetric": True, **_RULES}, "int3", "per_group", "PerGroupMinMaxObserver"),
    "Int3PerChannelSpec": ({**_AXIS, "symmetric": False, **_RULES}, "int3", "per_channel", "PerChannelMinMaxObserver"),
    "Int2PerGroupSpec": ({**_GROUP, "symmetric": True, **_RULES}, "int2", "per_group", "PerGroupMinMaxObserver"),
    "Int4PerTensorSpec": (_tensor(True), "int4", "per_tensor", "PerTensorMinMaxObserver"),
    "Int4PerChannelSpec": ({**_AXIS, "symmetric": True, **_RULES}, "int4", "per_channel", "PerChannelMinMaxObserver"),
    "Int4PerGroupSpec": ({**_GROUP, "symmetric": True, **_EARLY}, "int4", "per_group", "PerGroupMinMaxObserver"),
    "Uint8PerTensorSpec": (_tensor(False), "uint8", "per_tensor", "PerTensorMinMaxObserver"),
    "Uint8PerChannelSpec": ({**_AXIS, "symmetric": True, **_RULES}, "uint8", "per_channel", "PerChannelMinMaxObserver"),
    "Uint8PerGroupSpec": ({**_GROUP, "symmetric": False, **_RULES}, "uint8", "per_group", "PerGroupMinMaxObserver"),
    "Int8PerTensorSpec": (_tensor(True), "int8", "per_tensor", "PerTensorMinMaxObserver"),
    "Int8PerChannelSpec": ({**_AXIS, "symmetric": False, **_RULES}, "int8", "per_channel", "PerChannelMinMaxObserver"),
    "Int8PerGroupSpec": ({**_GROUP, "symmetric": True, **_RULES}, "int8", "per_group", "PerGroupMinMaxObserver"),
    "FP8E4M3PerTensorSpec": (_FP8, "fp8_e4m3", "per_tensor", "PerTensorMinMaxObserver"),
    "FP8E5M3PerTensorSpec": (_FP8, "fp8_e5m3", "per_tensor", "PerTensorMinMaxObserver"),
    "FP8E4M3PerChannelSpec": (
        {**_AXIS, "symmetric": True, **_RULES}, "fp8_e4m3", "per_channel", "PerChannelMinMaxObserver"
    ),
    "FP8E4M3PerGroupSpec": (_FLOAT_GROUP, "fp8_e4m3", "per_group", "PerBlockMXObserver"),
    "FP8E5M2PerTensorSpec": (_tensor(True), "fp8_e5m2", "per_tensor", "PerTensorMinMaxObserver"),
    "FP8E5M2PerChannelSpec": (
        {**_AXIS, "symmetric": True, **_RULES}, "fp8_e5m2", "per_channel", "PerChannelMinMaxObserver"
    ),
    "FP8E5M2PerGroupSpec": (_FLOAT_GROUP, "fp8_e5m2", "per_group", "PerBlockMXObserver"),
    "FP4PerGroupSpec": ({**_FLOAT_GROUP, "scale_type": "float"}, "fp4", "per_group", "PerBlockMXObserver"),
    "AmdFP4Spec": ({**_GROUP, "is_dynamic": True}, "fp4", "per_group", "PerBlockMXObserver"),
    "FP6E2M3PerGroupSpec": (_FLOAT_GROUP, "fp6_e2m3", "per_group", "PerBlockMXObserver"),
    "FP6E3M2PerGroupSpec": (_FLOAT_GROUP, "fp6_e3m2", "per_group", "PerBlockMXObserver"),
    "Float16Spec": ({}, "float16", None, "PlaceholderObserver"),
    "Bfloat16Spec": ({}, "bfloat16", None, "PlaceholderObserver"),
    "OCP_MXFP8E4M3Spec": (_MX, "fp8_e4m3", "per_group", "PerBlockMXObserver"),
    "OCP_MXFP8E5M2Spec": (_MX, "fp8_e5m2", "per_group", "PerBlockMXObserver"),
    "OCP_MXFP6E3M2Spec": (_MX, "fp6_e3m2", "per_group", "PerBlockMXObserver"),
    "OCP_MXFP6E2M3Spec": (_MX, "fp6_e2m3", "per_group", "PerBlockMXObserver"),
    "OCP_MXFP4Spec": (_MX, "fp4", "per_group", "PerBlockMXObserver"),
    "OCP_MXINT8Spec": (_MX, "mx", None, None),
    "OCP_MXFP4DiffsSpec": ({**_MX, "is_dynamic": False}, "fp4", "per_group", "PerBlockMXDiffsObserver"),
    "MX6Spec": ({**_AXIS, "block_size": REQUIRED, "scale_calculation_mode": "even"}, "mx6", None, None),
    "MX9Spec": ({**_AXIS, "block_size": REQUIRED, "scale_calculation_mode": "even"}, "mx9", None, None),
    "BFP16Spec": ({**_AXIS, "scale_calculation_mode": "even"}, "bfp16", None, None),
}  # fmt: skip
GIVEN = {"ch_axis": -1, "group_size": 32, "block_size": 16}


def shorthand(name: str, **options: Any) -> specs.DataTypeSpec:
    arguments = TABLE[name][0]
    required = {key: GIVEN[key] for key, default in arguments.items() if default is REQUIRED or key == "group_size"}
    if name == "Uint4PerChannelSpec":
        required["is_dynamic"] = False
    made = getattr(specs, name)(**{**required, **options})
    assert isinstance(made, specs.DataTypeSpec)
    return made


def build(name: str, **options: Any) -> QTensorConfig:
    return shorthand(name, **options).to_quantization_spec()


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_a_class_of_its_own(name: str) -> None:
    made = shorthand(name)
    kind = type(made)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == (name, name, specs.__name__)
    assert kind.__doc__ and not kind.__doc__.startswith(f"{name}(")  # what a dataclass says of itself
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("name", TABLE)
def test_arguments_and_result(name: str) -> None:
    arguments, dtype, qscheme, observer = TABLE[name]
    parameters = inspect.signature(getattr(specs, name)).parameters
    found = {key: REQUIRED if p.default is p.empty else p.default for key, p in parameters.items()}
    assert found == arguments and list(found) == list(arguments)
    data = build(name).to_dict()
    assert (data["dtype"], data["qscheme"], data["observer_cls"]) == (dtype, qscheme, observer)
    for key in ("ch_axis", "symmetric", "is_dynamic", "scale_format"):
        if key in arguments and name != "OCP_MXINT8Spec" and arguments[key] is not None:
            assert data[key] == GIVEN.get(key, arguments[key]), key
    assert getattr(address, name) is getattr(specs, name)
    assert lower_tensor(build(name)) is not None


def test_positional_arguments() -> None:
    assert specs.Int8PerTensorSpec("MSE", False, "float32", "floor", True) == specs.Int8PerTensorSpec(
        observer_method="MSE", symmetric=False, scale_type="float32", round_method="floor", is_dynamic=True
    )
    assert specs.Uint4PerGroupSpec(1, 64, True, True).is_dynamic is True
    assert specs.Int8PerGroupSpec(1, 64, True, "float32").scale_type == "float32"
    assert build("Int4PerGroupSpec").to_dict() == specs.Int4PerGroupSpec(-1, 32).to_quantization_spec().to_dict()


def test_the_axis_of_float_groups_is_the_last_one() -> None:
    made = specs.FP4PerGroupSpec(group_size=32, scale_format="e8m0", scale_calculation_mode="even")
    assert made.to_quantization_spec() == build("FP4PerGroupSpec", scale_format="e8m0", scale_calculation_mode="even")
    assert specs.OCP_MXFP4Spec().to_quantization_spec() == build("OCP_MXFP4Spec")


def test_fixed_parts_of_the_block_formats() -> None:
    mx = build("OCP_MXFP4Spec", scale_calculation_mode="floor")
    assert (mx.group_size, mx.scale_format, mx.scale_calculation_mode, mx.symmetric) == (32, "e8m0", "floor", None)
    amd = build("AmdFP4Spec")
    assert (amd.scale_format, amd.scale_type) == ("e5m3", ScaleType.float8_e5m3)
    assert build("MX6Spec").group_size == 16 and build("BFP16Spec").group_size == 8
    mxint8 = build("OCP_MXINT8Spec")
    assert (mxint8.mx_element_dtype, mxint8.group_size, mxint8.is_dynamic) == (Dtype.int8, 32, None)


@pytest.mark.parametrize("method", specs.OBSERVER_METHODS)
def test_observer_methods(method: str) -> None:
    config = build("Int8PerTensorSpec", observer_method=method)
    assert config.observer_cls is specs.OBSERVER_METHODS[method]


def test_strings_become_what_they_name() -> None:
    config = build("Uint4PerChannelSpec", zero_point_type="float32", scale_type="power_of_2", round_method="round")
    assert (config.zero_point_type, config.scale_type) == (ZeroPointType.float32, ScaleType.pof2)
    assert config.round_method is RoundType.round
    spec = lower_tensor(build("Int8PerTensorSpec", scale_type="power_of_2"))
    assert spec is not None and spec.scale_type is ScaleType.pof2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (specs.FP4PerGroupSpec, "FP4PerGroupSpec: .*group_size is required"),
        (lambda: specs.Int8PerTensorSpec("minmax"), "Int8PerTensorSpec: .*'minmax'. Did you mean 'min_max'"),
        (lambda: specs.Int8PerTensorSpec(scale_type="float23"), "scale_type: unknown .*'float23'. Did you mean"),
        (lambda: specs.Int8PerTensorSpec(round_method="even"), "round_method: unknown .*'half_even'"),
        (lambda: specs.Uint4PerChannelSpec(0, is_dynamic=False, zero_point_type="int"), "zero_point_type: unknown"),
        (lambda: specs.Uint4PerChannelSpec(0), "Uint4PerChannelSpec: .*is_dynamic is required"),
        (lambda: specs.Int8PerTensorSpec(simmetric=True), "Int8PerTensorSpec has no field 'simmetric'. Did you mean"),
        (lambda: specs.Int8PerChannelSpec(), "Int8PerChannelSpec.ch_axis is required"),
        (lambda: specs.Int8PerChannelSpec("0"), "Int8PerChannelSpec.ch_axis: expected int, got '0'"),
        (lambda: specs.AmdFP4Spec(-1, 64), "group_size must be 16 or 32, got 64"),
        (lambda: specs.FP4PerGroupSpec(-1, 32, "e8m0", "odd"), "scale_calculation_mode: unknown 'odd'"),
        (lambda: specs.ScaleQuantSpec(specs.Float16Spec(), None), "ScaleQuantSpec.second_stage: expected"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_stages() -> None:
    first, second = specs.FP4PerGroupSpec(-1, 16, is_dynamic=False), specs.FP8E4M3PerTensorSpec()
    config = second.to_quantization_spec()
    for given in (second, config):
        stages = specs.ScaleQuantSpec(first, given).to_quantization_spec()
        assert [stage.is_scale_quant for stage in stages] == [False, True]
    assert config.is_scale_quant is False
    progressive = specs.ProgressiveSpec(second, specs.Int4PerChannelSpec(0))
    assert [stage.is_scale_quant for stage in progressive.to_quantization_spec()] == [False, False]
    assert QLayerConfig(weight=progressive).weight == progressive.to_quantization_spec()
    assert isinstance(progressive, specs.TwoStageSpec) and isinstance(first, specs.DataTypeSpec)


def test_qat_values() -> None:
    assert specs.TQTSpec().threshold_init_meth is None
    assert specs.TQTSpec(TQTThresholdInitMeth._KL_J) == specs.TQTSpec("_KL_J")
    assert isinstance(specs.TQTSpec(), specs.QATSpec)


def test_a_spec_of_ones_own() -> None:
    class Int16PerTensorSpec(specs.Int8PerTensorSpec):
        dtype = Dtype.int16

    config = Int16PerTensorSpec(scale_type="float32").to_quantization_spec()
    assert (config.dtype, config.qscheme) == (Dtype.int16, QSchemeType.per_tensor)
