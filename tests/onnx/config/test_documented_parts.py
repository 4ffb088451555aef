"""What is documented beside the named configurations."""

from __future__ import annotations

import importlib

from quark.onnx import CalibrationMethod, PowerOfTwoMethod
from quark.onnx.quantization.config import custom_config

FINETUNE = {
    "BatchSize": 2,
    "DataSize": 1000,
    "EarlyStop": True,
    "FixedSeed": 1705472343,
    "InferDevice": "cpu",
    "LearningRate": 0.1,
    "NumIterations": 1000,
    "OptimAlgorithm": "adaround",
    "OptimDevice": "cpu",
}


def test_parameters_have_the_documented_values_and_are_new_each_time() -> None:
    assert custom_config.DEFAULT_ADAROUND_PARAMS == FINETUNE
    assert custom_config.DEFAULT_ADAQUANT_PARAMS == FINETUNE | {"LearningRate": 1e-5, "OptimAlgorithm": "adaquant"}
    bfp = {"axis": 1, "bfp_method": "to_bfp", "bit_width": 16, "block_size": 8, "rounding_mode": 2}
    assert bfp == custom_config.DEFAULT_BFP_PARAMS
    micro = {"bfp_method": "to_bfp_prime", "bit_width": 13, "block_size": 16}
    assert bfp | micro | {"sub_block_size": 2, "sub_block_shift_bits": 1} == custom_config.DEFAULT_MICROEXPONENTS_PARAMS
    scaling = {"axis": 1, "block_size": 32, "element_dtype": "int8", "rounding_mode": 2}
    assert scaling == custom_config.DEFAULT_MICROSCALING_PARAMS
    custom_config.DEFAULT_ADAROUND_PARAMS["BatchSize"] = 7
    assert custom_config.DEFAULT_ADAROUND_PARAMS["BatchSize"] == 2


def test_weights_alone_with_adaround() -> None:
    config = custom_config.XINT8_WEIGHTSONLY_ADAROUND_CONFIG
    assert config.include_fast_ft and config.enable_npu_cnn and config.extra_options["WeightsOnly"]
    assert config.extra_options["FastFinetune"] == FINETUNE
    assert config.calibrate_method is PowerOfTwoMethod.MinMSE is not CalibrationMethod.MinMax


def test_addresses_of_the_search() -> None:
    for module, name in (
        ("auto_search_v1", "AutoSearchConfig"),
        ("auto_search_pro", "AutoSearchPro"),
        ("config_generator", "generate_all_configs"),
        ("qconfig_mapping", "get_auto_search_config"),
    ):
        assert hasattr(importlib.import_module(f"quark.onnx.quantization.auto_search.{module}"), name)
