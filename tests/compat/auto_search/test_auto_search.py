"""Searches on a small network: each trial is the model of the quantizer, and the best is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.compat.auto_search import AutoSearchConfig, generate_all_configs
from quark.compat.auto_search.search_space import qconfig_of
from quark.errors import CalibrationError, ConfigError, NotSupportedError, QuarkError
from quark.onnx import AutoSearch, AutoSearchPro, Config, ModelQuantizer, auto_search, get_default_config
from quark.onnx.config.enums import CalibrationMethod, QuantType
from tests.models.onnx_zoo import Reader, cnn, images, run

pytestmark = pytest.mark.slow
DATA = images(3)


@pytest.fixture
def source(tmp_path: Path) -> str:
    onnx.save(cnn(), tmp_path / "float.onnx")
    return str(tmp_path / "float.onnx")


def distance(model: Path) -> float:
    """The mean Euclidean distance of the outputs from the float ones."""
    quantized = onnx.load(model)
    return float(np.mean([np.linalg.norm(run(cnn(), x).astype(float) - run(quantized, x)) for x in DATA]))


def pro(source: str, folder: Path, **changes: Any) -> dict[str, Any]:
    space = {
        "activation": ["Int8Spec", "Int16Spec"],
        "activation_params": {
            "symmetric": [True, False],
            "calibration_method": ["MinMax", "Percentile"],
            "only_if": "activation",
        },
        "weight": ["Int8Spec"],
        "weight_params": {"symmetric": [True], "only_if": "weight"},
        "FoldRelu": [True],
    }
    return {
        "search_space": space,
        "n_trials": 100,
        "search_algo": "Grid",
        "model_input": source,
        "calib_data_reader": Reader(DATA),
        "output_dir": str(folder / "out"),
        "temp_dir": str(folder / "temp"),
        **changes,
    }


def test_a_grid_gives_the_models_of_the_quantizer_and_the_best_of_them(source: str, tmp_path: Path) -> None:
    wanted = pro(source, tmp_path)
    best = AutoSearchPro(wanted).run()
    configs = generate_all_configs(wanted["search_space"])
    files = [tmp_path / "out" / f"quantized_model_{number}.onnx" for number in range(len(configs))]
    scores = [distance(file) for file in files]
    assert best == configs[int(np.argmin(scores))] == json.loads((tmp_path / "out" / "best_params.json").read_text())
    assert len(set(scores)) > 4
    for number in (0, 3, 6):
        quantizer = ModelQuantizer(qconfig_of(configs[number]))
        alone = quantizer.quantize_model(source, None, Reader(DATA))
        assert alone.SerializeToString() == onnx.load(files[number]).SerializeToString()  # type: ignore[union-attr]
    assert "Search: trial 7 scores" in (tmp_path / "out" / "auto_search.log").read_text()


def test_an_evaluator_judges_in_the_place_of_the_metric(source: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def evaluator(path: str) -> float:
        seen.append(path)
        return -float(len(seen))

    wanted = pro(source, tmp_path, search_evaluator=evaluator, n_trials=3)
    best = AutoSearchPro(wanted).run()
    # The quality falls with each call, so the first trial is the least below the float model.
    assert seen[0] == source and len(seen) == 4
    assert best == generate_all_configs(wanted["search_space"])[0]
    seen.clear()
    again = AutoSearchPro({**wanted, "calib_data_reader": Reader(DATA), "direction": "maximize"}).run()
    assert again == generate_all_configs(wanted["search_space"])[2]


def test_two_stages_choose_the_calibration_first(source: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    wanted = pro(source, tmp_path, two_stage_search=True)
    wanted["search_space"] |= {
        "activation": ["Int8Spec"],
        "algorithms": ["adaquant"],
        "adaquant_params": {
            "num_iterations": [1],
            "learning_rate": [1e-6, 1e-3],
            "data_size": [2],
            "only_if": {"algorithms": "adaquant"},
        },
    }
    best = AutoSearchPro(wanted).run()
    scores = [distance(tmp_path / "out" / f"quantized_model_{number}.onnx") for number in range(6)]
    space = {k: v for k, v in wanted["search_space"].items() if k not in ("algorithms", "adaquant_params")}
    calibration = generate_all_configs(space)[int(np.argmin(scores[:4]))]
    assert {name: best[name] for name in calibration} == calibration
    assert best["adaquant_params"]["learning_rate"] == [1e-6, 1e-3][int(np.argmin(scores[4:]))]


@pytest.mark.parametrize("sampler", ["TPE", "Random"])
def test_a_search_goes_on_where_it_stopped(sampler: str, source: str, tmp_path: Path) -> None:
    def search(count: int, **changes: Any) -> dict[str, Any]:
        options = {"search_algo": sampler, "n_trials": count, "study_storage_db": "auto_search.db", **changes}
        return AutoSearchPro(pro(source, tmp_path, calib_data_reader=Reader(DATA), **options)).run()

    search(2)
    first = json.loads((tmp_path / "out" / "auto_search.json").read_text())["trials"]
    search(2, load_study_if_exists=True)
    second = json.loads((tmp_path / "out" / "auto_search.json").read_text())["trials"]
    assert second[: len(first)] == first and 1 <= len(first) <= 2
    with pytest.raises(ConfigError, match="trials of another model, data, metric or study"):
        search(2, load_study_if_exists=True, search_metric="L1")
    search(1)  # begins anew
    assert len(json.loads((tmp_path / "out" / "auto_search.json").read_text())["trials"]) == 1


def test_a_trial_that_fails_does_not_end_the_search(source: str, tmp_path: Path) -> None:
    wanted = pro(source, tmp_path)
    wanted["search_space"] |= {"exclude": ["no_such_node", None]}
    best = AutoSearchPro(wanted).run()
    assert best["exclude"] is None
    wanted["search_space"] |= {"exclude": ["no_such_node"]}
    with pytest.raises(QuarkError, match="no_such_node"):
        AutoSearchPro({**wanted, "calib_data_reader": Reader(DATA)}).run()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"search_algos": "TPE"}, ConfigError, "Did you mean 'search_algo'"),
        ({"model_input": None}, ConfigError, "needs model_input"),
        ({"calib_data_reader": None}, CalibrationError, "needs calib_data_reader"),
        ({"search_algo": "CmaEs"}, NotSupportedError, "Possible: 'Grid', 'Random', 'TPE'"),
        ({"direction": "up"}, ConfigError, "'minimize' or 'maximize'"),
        ({"direction": "maximize"}, ConfigError, "less is better"),
        ({"plot_results": True}, NotSupportedError, "nothing is drawn"),
        ({"base_framework": "pytorch"}, NotSupportedError, "possible: 'onnx'"),
        ({"n_trials": 0}, ConfigError, "1 or more"),
        ({"search_space": {}}, ConfigError, "needs a search_space"),
        ({"search_space": {"activation": ["Int8Spec"]}}, ConfigError, "no 'weight'"),
    ],
)
def test_wrong_searches_are_refused(changes: Any, kind: Any, message: str, source: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        AutoSearchPro(pro(source, tmp_path, **changes))
    assert not (tmp_path / "out").exists()


# AutoSearch -----------------------------------------------------------------------------------------------------------


def searching(folder: Path, **values: Any) -> Any:
    """An object as the documented examples make them: a class with some of the attributes."""
    space = {
        "calibrate_method": [CalibrationMethod.MinMax, CalibrationMethod.Percentile],
        "activation_type": [QuantType.QInt8, QuantType.QInt16],
        "weight_type": [QuantType.QInt8],
        "include_cle": [False],
        "include_fast_ft": [False],
        "extra_options": {"ActivationSymmetric": [True, False], "CalibMovingAverage": [False]},
    }
    attributes = {
        "search_space": space,
        "search_output_dir": str(folder / "out"),
        "search_cache_dir": str(folder / "cache"),
        "search_log_path": str(folder / "search.log"),
        **values,
    }
    return type("AutoSearchConfig_Default", (), attributes)()


def search(source: str, wanted: Any) -> AutoSearch:
    config = Config(global_quant_config=get_default_config("S8S8_AAWS"))
    return auto_search.AutoSearch(
        config=config, auto_search_config=wanted, model_input=source, calibration_data_reader=Reader(DATA)
    )


def assert_same_but_for_biases(one: onnx.ModelProto, other: onnx.ModelProto) -> None:
    """Biases are corrected by means that a session with other extra outputs rounds in another way."""
    first, second = ({x.name: onnx.numpy_helper.to_array(x) for x in m.graph.initializer} for m in (one, other))
    assert list(first) == list(second)
    for name, array in first.items():
        allowed = 1 + 1e-4 * np.abs(array).max() if array.dtype == np.int32 else 0
        assert np.abs(array.astype(float) - second[name]).max(initial=0) <= allowed, name
    for model in (one, other):
        del model.graph.initializer[:]
    assert one.SerializeToString() == other.SerializeToString()


@pytest.mark.slow
def test_candidates_lie_within_the_tolerance(source: str, tmp_path: Path) -> None:
    every = search(source, searching(tmp_path))
    found = every.search_model()
    assert len(found) == len(every.all_configs) == 8
    for candidate in found:
        model = onnx.load(candidate["model_path"])
        errors = [np.mean((run(cnn(), x).astype(float) - run(model, x)) ** 2) for x in DATA]
        assert candidate["difference"] == pytest.approx(float(np.mean(errors)), rel=1e-6)
        config = every._config(every.all_configs[candidate["config_index"]])
        alone = ModelQuantizer(config).quantize_model(source, None, Reader(DATA))
        assert_same_but_for_biases(alone, model)
    limit = float(np.median([candidate["difference"] for candidate in found]))
    few = search(source, searching(tmp_path / "few", search_metric_tolerance=limit)).search_model()
    assert few == [
        {**c, "model_path": c["model_path"].replace("/out/", "/few/out/")} for c in found if c["difference"] <= limit
    ]
    assert len(list((tmp_path / "few" / "out").iterdir())) == len(few) == 4
    assert "differs by" in (tmp_path / "search.log").read_text()


@pytest.mark.parametrize("condition", ["find_n_candidates", "iteration_limit"])
def test_a_stop_condition_ends_the_search(condition: str, source: str, tmp_path: Path) -> None:
    made = search(source, searching(tmp_path, search_stop_condition={condition: 2}))
    assert len(made.search_model()) == len(made.searched_space) == 2
    timed = search(source, searching(tmp_path, search_stop_condition={"time_limit": 0}))
    assert len(timed.search_model()) == 1


def test_spaces_are_joined_and_tried_in_an_order(source: str, tmp_path: Path) -> None:
    made = search(source, searching(tmp_path, search_algo="random", search_stop_condition={"iteration_limit": 3}))
    first = made.build_all_configs({"activation_type": [QuantType.QInt16], "weight_type": [QuantType.QInt8]})
    made.all_configs = first + made.all_configs
    order = made.sampler(made.all_configs)
    assert order != made.all_configs and sorted(map(repr, order)) == sorted(map(repr, made.all_configs))
    assert len(made.search_model()) == 3


def test_two_stages_and_ranges_of_the_tuning(source: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    wanted = searching(tmp_path, two_stage_search=True)
    wanted.search_space = {
        "calibrate_method": [CalibrationMethod.MinMax, CalibrationMethod.Percentile],
        "include_fast_ft": [True],
        "extra_options": {"FastFinetune": {"NumIterLR": [[1, 0.1], [2, 0.01]], "OptimAlgorithm": ["adaround"]}},
    }
    (best,) = search(source, wanted).search_model()
    assert best["include_fast_ft"] and best["extra_options"]["FastFinetune"]["NumIterLR"] in ([1, 0.1], [2, 0.01])
    ranged = searching(
        tmp_path,
        advanced_fastft_search=True,
        advanced_fastft_params={"sampler_algo": "TPE", "direction": "minimize", "n_trials": 2},
        n_jobs=1,
        search_devices="cpu",
    )
    ranged.search_space = {"extra_options": {"FastFinetune": {"NumIterations": [1, 3], "LearningRate": [1e-3, 1e-1]}}}
    found = search(source, ranged).search_model()
    assert 1 <= found["NumIterations"] <= 3 and 1e-3 <= found["LearningRate"] <= 1e-1
    with pytest.raises(ConfigError, match="no FastFinetune"):
        search(source, searching(tmp_path, two_stage_search=True)).search_model()


def test_wrong_auto_searches_are_refused(source: str, tmp_path: Path) -> None:
    for values, message in (
        ({"search_algo": "grid"}, "Possible: 'grid_search', 'random'"),
        ({"search_stop_condition": {"time_limits": 1}}, "Did you mean 'time_limit'"),
        ({"search_stop_condition": {"find_best_candidate": 1}}, "not part of this version"),
        ({"search_metric": "L3"}, "no search_metric"),
        ({"search_space": {"crypto_mode": [True]}}, "crypto_mode"),
        ({"search_space": {"weight_type": QuantType.QInt8}}, "a list of values"),
    ):
        with pytest.raises(QuarkError, match=message):
            search(source, searching(tmp_path, **values))
    with pytest.raises(ConfigError, match="takes a Config"):
        AutoSearch(source, "A8W8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'include_cle'"):
        search(source, searching(tmp_path, search_space={"include_cles": [True]})).search_model()
    assert len(AutoSearch(source, Config(get_default_config("A8W8")), AutoSearchConfig).all_configs) > 1000
