"""The named configurations: all there, fresh each time, as documented; each lowers or says what is missing."""

from __future__ import annotations

import pytest

from quark.errors import ConfigError
from quark.onnx.config import presets
from quark.onnx.config.config import Config, QConfig
from quark.onnx.config.enums import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantFormat,
    QuantType,
)
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.preset_rows import QROWS, ROWS
from quark.onnx.config.presets import get_default_config, get_default_config_mapping

OCP = ("MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3", "MXFP4E2M1", "MXINT8")


def test_the_documented_names() -> None:
    tuned = ("XINT8", "S8S8_AAWS", "U8S8_AAWS", "S16S8_ASWS", "U16S8_AAWS", "A8W8", "A16W8")
    with_adaquant = ("FP16", "BF16", "BFP16", "MX4", "MX6", "MX9", *OCP, "BF16_MIXED_BFP16", "BF16_MIXED_MXINT8")
    alone = ["UINT8_DYNAMIC_QUANT", "VINT8", "U8U8_AAWA", "S16S16_MIXED_S8S8", "BF16_BFP16", "BF16_MXINT8"]
    alone += ["MX9_INT8", "MATMUL_NBITS"]
    alone += [
        f"{t}_{m}_{k}" for t in ("INT8", "INT16") for m in ("CNN", "TRANSFORMER") for k in ("DEFAULT", "ACCURATE")
    ]
    names = {*alone, *tuned, *with_adaquant}
    names |= {f"{name}_ADAROUND" for name in tuned} | {f"{name}_ADAQUANT" for name in (*tuned, *with_adaquant)}
    own = {"INT8_CPU", "INT8_CPU_WEIGHTS", "INT8_CPU_DYNAMIC", "INT8_OPENVINO"}
    assert names == {*ROWS} - own
    assert len(names) == 65


def test_a8w8_and_a16w8() -> None:
    for name, kind in (("A8W8", ExtendedQuantType.QInt8), ("A16W8", ExtendedQuantType.QInt16)):
        config = get_default_config(name)
        assert config.calibrate_method is CalibrationMethod.MinMax
        assert config.quant_format is ExtendedQuantFormat.QDQ
        assert (config.activation_type, config.weight_type) == (kind, ExtendedQuantType.QInt8)
        assert config.include_cle is True
        expected = {
            "ActivationSymmetric": True,
            "ForceQuantizeNoInputCheck": True,
            "AlignSlice": False,
            "FoldRelu": True,
            "AlignConcat": True,
        }
        assert config.extra_options == expected | ({"AlignEltwiseQuantType": True} if name == "A16W8" else {})


def test_xint8_and_its_variants() -> None:
    plain, tuned = get_default_config("XINT8"), get_default_config("XINT8_ADAQUANT")
    assert plain.calibrate_method is PowerOfTwoMethod.MinMSE and plain.quant_format is QuantFormat.QDQ
    assert (plain.activation_type, plain.weight_type) == (QuantType.QUInt8, QuantType.QInt8)
    assert plain.enable_npu_cnn and tuned.include_fast_ft and not plain.include_fast_ft
    assert tuned.extra_options["FastFinetune"]["LearningRate"] == 1e-5
    assert get_default_config("XINT8_ADAROUND").extra_options["FastFinetune"]["LearningRate"] == 0.1


def test_each_call_makes_a_new_object() -> None:
    one = get_default_config("A8W8_ADAROUND")
    one.extra_options["FastFinetune"]["BatchSize"] = 99
    one.extra_options["UseRandomData"] = True
    other = get_default_config("A8W8_ADAROUND")
    assert other.extra_options["FastFinetune"]["BatchSize"] == 2
    assert "UseRandomData" not in other.extra_options
    assert presets.A8W8_QCONFIG is not presets.A8W8_QCONFIG
    presets.A8W8_QCONFIG.extra_options.clear()
    assert presets.A8W8_QCONFIG.extra_options["FoldRelu"] is True


@pytest.mark.parametrize("name", ROWS)
def test_named_configurations_lower(name: str) -> None:
    config = Config(global_quant_config=get_default_config(name))
    before = config.to_dict()
    assert bool(lower(config).specs.mixed) == ("_MIXED_" in name)
    assert config.to_dict() == before


@pytest.mark.parametrize("name", QROWS)
def test_qconfigs_lower_and_round_trip(name: str) -> None:
    config = getattr(presets, name)
    assert QConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert len(lower(config).algorithms) == ("ADA" in name)


def test_names_of_the_two_generations_differ_as_documented() -> None:
    old, new = lower(Config(get_default_config("A8W8"))), lower(presets.A8W8_QCONFIG)
    assert old.specs.layer.input is not None and new.specs.layer.input is not None
    assert (old.specs.layer.input.observer, new.specs.layer.input.observer) == ("min_max", "percentile")
    assert (old.qdq.contrib_domain, new.qdq.contrib_domain) == (True, False)


def test_addresses() -> None:
    from quark.onnx.quantization import config as address
    from quark.onnx.quantization.config import custom_config, data_type, spec
    from quark.onnx.quantization.config.algorithm import AdaQuantConfig
    from quark.onnx.quantization.config.config import Config, QConfig, QuantizationConfig
    from quark.onnx.quantization.config.maps import QCONFIG_ALL_PARAMS

    assert address.get_default_config is custom_config.get_default_config is get_default_config
    assert custom_config.XINT8_CONFIG.to_dict() == get_default_config("XINT8").to_dict()
    assert custom_config.BF16_QCONFIG.to_dict() == presets.BF16_QCONFIG.to_dict()
    assert {*address.DefaultConfigMapping} == {*get_default_config_mapping()} == {*ROWS}
    assert spec.Int8 is data_type.Int8 and "FoldRelu" in QCONFIG_ALL_PARAMS
    for cls in (AdaQuantConfig, Config, QConfig, QuantizationConfig):
        assert cls.__module__.startswith("quark.onnx.") and "quantization" not in cls.__module__


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'XINT8'"):
        get_default_config("XINT")
    with pytest.raises(AttributeError, match="Did you mean"):
        presets.A8W8_QCONFI  # noqa: B018
    assert get_default_config("XINT8_CONFIG").to_dict() == get_default_config("XINT8").to_dict()
