"""Which algorithms a config asks for: configs, options and legacy flags."""

from __future__ import annotations

from typing import Any

import pytest

from quark.errors import ConfigError
from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.config.config import Config
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from tests.onnx.config.test_lowering import new, old


def test_a_preference_changes_what_learns_and_nothing_else() -> None:
    given = [CLEConfig(), AdaRoundConfig(early_stop=True), AdaQuantConfig(early_stop=True)]
    algorithms = {
        preference: new(algo_config=given, QuantizationPreference=preference).algorithms
        for preference in ("accuracy", "speed", "resource_efficiency")
    }
    assert all(each[0] == CLEConfig() for each in algorithms.values())
    assert algorithms["accuracy"][1] == AdaRoundConfig(output_qdq=True)
    assert algorithms["accuracy"][2] == AdaQuantConfig(output_qdq=True, update_bias=True)
    assert algorithms["speed"][2] == AdaQuantConfig(early_stop=True, mem_opt_level=0)
    assert algorithms["resource_efficiency"][1] == AdaRoundConfig(early_stop=True, mem_opt_level=2)
    assert given[1] == AdaRoundConfig(early_stop=True)


def test_algorithms_that_the_config_holds() -> None:
    given = [CLEConfig(cle_steps=3), AdaQuantConfig(num_iterations=5)]
    settings = new(algo_config=given, FastFinetune={"OptimAlgorithm": "adaquant", "BatchSize": 4})
    assert settings.algorithms == (given[0], AdaQuantConfig(num_iterations=5, batch_size=4))
    assert settings.algorithms[0] is not given[0] and given[1] == AdaQuantConfig(num_iterations=5)


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({}, {}, []),
        ({"CLESteps": 1}, {}, []),
        ({"CLESteps": 2}, {}, [CLEConfig(cle_steps=2)]),
        ({"CLESteps": 2}, {"include_cle": False}, []),
        ({}, {"include_sq": True}, [SmoothQuantConfig()]),
        ({"SmoothAlpha": 0.7}, {"include_sq": True}, [SmoothQuantConfig(0.7)]),
        ({"RMatrixDim": 8}, {"include_rotation": True}, [QuarotConfig(8)]),
        ({"BiasCorrection": True}, {}, [BiasCorrectionConfig()]),
        ({"UseGPTQ": True, "GPTQParams": {"Bits": 4}}, {}, [GPTQConfig(bits=4)]),
        ({"FastFinetune": {"NumIterations": 7}}, {"include_fast_ft": True}, [AdaRoundConfig(num_iterations=7)]),
        ({"FastFinetune": {"OptimAlgorithm": "adaquant"}}, {"include_fast_ft": True}, [AdaQuantConfig()]),
        ({"FastFinetune": {"NumIterations": 7}}, {}, []),
    ],
)
def test_algorithms_that_legacy_options_ask_for(
    options: dict[str, Any], values: dict[str, Any], expected: list[Any]
) -> None:
    assert list(old(options, **values).algorithms) == expected


def test_finetune_entries_that_are_wrong() -> None:
    for entries in ({"NumIteration": 3}, {"OptimAlgorithm": "adam"}, {"BatchSize": "two"}):
        with pytest.raises(ConfigError):
            old({"FastFinetune": entries}, include_fast_ft=True)


def test_the_legacy_default_equalizes_where_a_weight_has_one_scale() -> None:
    """Under powers of two two steps, or what the options say; nothing where it is asked for by name."""
    for name, steps in (("XINT8", 2), ("A8W8", 1), ("U8S8_AAWS", 1), ("A16W8", 1)):
        settings = lower(Config(get_default_config(name)))
        assert settings.equalization == CLEConfig(cle_steps=steps) and settings.equalize_if_better, name
    for name in ("INT8_CPU", "S16S16_MIXED_S8S8", "BF16", "BFP16", "UINT8_DYNAMIC_QUANT", "INT8_CPU_WEIGHTS"):
        settings = lower(Config(get_default_config(name)))
        assert settings.equalization is None and not settings.equalize_if_better, name
    given = [({"CLESteps": 1}, True, CLEConfig()), ({"CLESteps": 3}, True, None), ({}, False, None)]
    given.append(({"CLEWeightThreshold": 0.5}, True, CLEConfig(cle_steps=2)))
    for options, include, expected in given:
        config = get_default_config("XINT8")
        config.include_cle = include
        config.extra_options.update(options)
        assert lower(Config(config)).equalization == expected, (options, include)
    assert new().equalization is None
