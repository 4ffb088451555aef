"""Search spaces, samplers, distances, and the record of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quark.compat.auto_search.search_space import RandomSampler, TPESampler, qconfig_of
from quark.compat.auto_search.trials import SearchTrials, Study
from quark.errors import ConfigError
from quark.onnx import QConfig, SearchSpace, generate_all_configs, get_auto_search_config
from quark.onnx.config.enums import CalibMethod, CalibrationMethod
from quark.onnx.search.evaluator import MEANS, SUMS, ssim
from quark.onnx.search.history import History

FLAT: dict[str, Any] = {
    "activation": ["Int8Spec"],
    "activation_params": {
        "symmetric": [True, False],
        "calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"],
        "only_if": "activation",
    },
    "weight": ["Int8Spec"],
    "weight_params": {"symmetric": [True], "calibration_method": ["MinMax"], "only_if": "weight"},
    "algorithms": ["adaquant", "adaround"],
    "adaquant_params": {
        "num_iterations": [10, 20],
        "learning_rate": [1e-6, 1e-3],
        "data_size": [1, 10],
        "only_if": {"algorithms": "adaquant"},
    },
    "cle_algo": ["cle"],
    "cle_params": {"cle_steps": [1], "only_if": {"cle_algo": "cle"}},
    "specific_layer_config": [None],
    "OptimizeModel": [False],
}


def test_a_flat_space_has_every_combination_that_its_conditions_allow() -> None:
    configs = generate_all_configs(FLAT)
    assert len(configs) == 6 * (2 * 2 * 2 + 1)  # adaquant with its parameters, adaround without
    assert all(("adaquant_params" in config) == (config["algorithms"] == "adaquant") for config in configs)
    assert [c["activation_params"]["symmetric"] for c in configs[::8][:6]] == [True, True, True, False, False, False]
    assert len({repr(config) for config in configs}) == len(configs)
    configs[0]["activation_params"]["symmetric"] = None
    assert generate_all_configs(FLAT)[0]["activation_params"]["symmetric"] is True


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"weight": "Int8Spec"}, "possible: a list of values"),
        ({"weight": []}, "possible: a list of values"),
        ({"weight_params": {"symmetric": [True]}}, "needs only_if"),
        ({"weight_params": {"symmetric": True, "only_if": "weight"}}, "possible: a list of values"),
        ({"w": [1], "g": {"n": {"type": "int", "low": 1, "high": 2}, "only_if": "w"}}, "is a range"),
    ],
)
def test_a_space_of_another_form_is_refused(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_all_configs(space)


def test_options_without_effect_are_left_out_of_a_nested_space() -> None:
    space = {
        "calibrate_method": [CalibrationMethod.MinMax, CalibrationMethod.Percentile],
        "include_sq": [False],
        "include_fast_ft": [False, True],
        "extra_options": {
            "CalibMovingAverage": [True, False],
            "CalibMovingAverageConstant": [0.01, 0.001],
            "Percentile": [99.99, 99.999],
            "SmoothAlpha": [0.5, 0.6],
            "FastFinetune": {"NumIterations": [10, 20], "LearningRate": [0.1]},
        },
    }
    configs = SearchSpace(space).get_all_configs()
    # MinMax: no average, or one with either constant. Percentile: two. Either without FastFinetune or with two of it.
    assert len(configs) == (3 + 2) * (1 + 2)
    for config in configs:
        options = config.get("extra_options", {})
        assert "SmoothAlpha" not in options
        assert ("Percentile" in options) == (config["calibrate_method"] is CalibrationMethod.Percentile)
        assert ("FastFinetune" in options) == config["include_fast_ft"]
        assert ("CalibMovingAverageConstant" in options) == options.get("CalibMovingAverage", False)


@pytest.mark.parametrize("name", ["ADVANCED_SEARCH", "XINT8_SEARCH", "A8W8_SEARCH", "A16W8_SEARCH"])
def test_every_config_of_a_named_search_is_a_qconfig(name: str) -> None:
    search = get_auto_search_config(name)
    sampler = RandomSampler(search["search_space"])
    configs = [sampler.suggest([]) for _ in range(20)]
    assert all(isinstance(qconfig_of(config), QConfig) for config in configs)
    assert {config["algorithms"] for config in configs} == {"adaround", "adaquant"}
    search["search_space"]["algorithms"] = []
    assert get_auto_search_config(name)["search_space"]["algorithms"]  # each is a new one
    with pytest.raises(ConfigError, match="Did you mean"):
        get_auto_search_config(name + "S")


def test_parameters_reach_the_config() -> None:
    config = qconfig_of(
        {
            "activation": "Int8Spec",
            "activation_params": {"symmetric": False, "calibration_method": "Percentile"},
            "weight": "Int8Spec",
            "algorithms": "adaround",
            "adaround_params": {"NumIterLR": [300, 0.2]},
            "exclude": "conv1",
            "FoldRelu": True,
        }
    )
    assert config.global_config.input_tensors.symmetric is False
    assert config.global_config.input_tensors.calibration_method is CalibMethod.Percentile
    (algorithm,) = config.algo_config
    assert (algorithm.num_iterations, algorithm.learning_rate) == (300, 0.2)  # type: ignore[attr-defined]
    assert config.exclude == ["conv1"] and config.extra_options == {"FoldRelu": True}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"weight": "Int8"}, "Did you mean 'Int8Spec'"),
        ({"weight": "Int8Spec", "weight_params": {"calibration_method": "MinMSEs"}}, "Did you mean 'MinMSE'"),
        ({"weight": "Int8Spec", "WeightsOnly": True, "algorithms": "adaroun"}, "Did you mean 'adaround'"),
        ({"weight": "Int8Spec", "WeightsOnly": True, "FoldRelus": True}, "FoldRelu"),
        ({"weight": "Int8Spec", "WeightsOnly": True, "cle_algo": "sle"}, "possible: 'cle'"),
        (
            {"weight": "Int8Spec", "WeightsOnly": True, "algorithms": "adaround", "adaround_params": {"NumIterLR": 3}},
            "iterations, learning rate",
        ),
    ],
)
def test_unknown_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qconfig_of(params)


def score(config: dict[str, Any]) -> float:
    """Least at kind "b", x = 0.001 and n = 40."""
    group = config["p"]
    return (config["kind"] != "b") + abs(np.log10(group["x"]) + 3) + abs(group["n"] - 40) / 40


def test_tpe_finds_better_parameters_than_chance() -> None:
    space = {
        "kind": ["a", "b", "c"],
        "p": {
            "x": {"type": "float", "low": 1e-6, "high": 1.0, "log": True},
            "n": {"type": "int", "low": 10, "high": 100, "step": 10},
            "only_if": "kind",
        },
    }
    found = {}
    for kind in (TPESampler, RandomSampler):
        means = []
        for seed in range(5):
            sampler, trials = kind(space, seed), []
            for _ in range(60):
                config = sampler.suggest(trials)
                assert 1e-6 <= config["p"]["x"] <= 1 and config["p"]["n"] in range(10, 101, 10)
                trials.append((config, score(config)))
            means.append(np.mean([value for _, value in trials[30:]]))
        found[kind] = np.mean(means)
    assert found[TPESampler] < 0.7 * found[RandomSampler]
    assert TPESampler(space, 3).suggest([]) == TPESampler(space, 3).suggest([])


def test_distances_by_their_formulas() -> None:
    x, y = np.array([3.0, 4.0, 5.0, 6.0]), np.array([2.0, 3.0, 4.0, 5.0])
    assert SUMS["L1"](x, y) == 4 and SUMS["L2"](x, y) == 2
    assert MEANS["L1"](x, y) == 1 and MEANS["L2"](x, y) == 1
    assert SUMS["psnr"](x, y) == pytest.approx(-20 * np.log10(255))
    # Means 4.5 and 3.5, equal deviations: (2 * 15.75 + 6.5025) / (20.25 + 12.25 + 6.5025).
    assert ssim(x, y) == pytest.approx(38.0025 / 39.0025)
    assert all(kinds[name](x, x) <= 1e-12 for kinds in (SUMS, MEANS) for name in kinds)


class ScoresAsAsked:
    """Trials whose score is what the config says; without one it cannot be met."""

    def run(self, config: dict[str, Any], path: Path) -> float:
        if "score" not in config:
            raise ConfigError(f"no {config['name']}")
        return float(config["score"])


@pytest.mark.parametrize(("sign", "best"), [(1.0, "a"), (-1.0, "b")])
def test_the_best_of_a_study_is_none_that_failed(sign: float, best: str) -> None:
    words = ("%d %s", "%d %g %s")
    study = Study(cast(SearchTrials, ScoresAsAsked()), History(), dict, lambda n: Path(f"{n}.onnx"), words, sign)
    choices = [{"name": "a", "score": 1}, {"name": "failed"}, {"name": "b", "score": 2}]
    assert study.best_of(choices)["name"] == best
    assert [trial.after for trial in study.history.trials] == [sign, float("inf"), 2 * sign]
    # Of a second stage of which every config fails, what the last one said; not a config that failed.
    with pytest.raises(ConfigError, match="no second"):
        study.best_of([{"name": "first"}, {"name": "second"}])
