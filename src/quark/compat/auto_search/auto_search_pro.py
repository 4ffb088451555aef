"""AutoSearchPro: a search over QConfig, with samplers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.compat.auto_search.search_space import (
    ALGORITHMS,
    SAMPLERS,
    Config,
    check_space,
    default_search,
    generate_all_configs,
    qconfig_of,
)
from quark.compat.auto_search.trials import SearchTrials, Study
from quark.errors import CalibrationError, ConfigError, NotSupportedError, did_you_mean
from quark.onnx.search.evaluator import SUMS, distance
from quark.onnx.search.history import History, identity_of, logged_to

GRID = "Grid"
WORDS = ("Search: trial %d fails: %s", "Search: trial %d scores %.6g with %s.")
LEARNED = ("algorithms", *(f"{name}_params" for name in ALGORITHMS))
"""The fields that the second stage of a search chooses: the learned rounding."""


class AutoSearchPro:
    """Finds the QConfig with which a model loses least.

    Every trial is quantized from the float model, on statistics of one pass over the data; it is written to
    `output_dir/quantized_model_<trial>.onnx`, and what was tried to `study_storage_db` there, from which a search goes
    on. The best parameters go to `best_params.json`. Trials run one after another, each on all cores: `n_jobs` changes
    nothing of the result.

    Args:
        config: As `get_auto_search_config` gives it. Beside the search space: n_trials; search_algo "TPE", "Random" or
            "Grid"; search_metric "L2", "L1", "cos", "psnr" or "ssim" of the outputs, or search_evaluator, (path) ->
            quality, whose score is that of the float model minus that of the quantized one; direction of that score;
            two_stage_search: first all of the calibration, then the learned rounding on top of the best.

    Raises:
        ConfigError: A name is unknown, a value is none, or the model is missing.
        NotSupportedError: A sampler or a plot that this version does not have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = default_search()
        for name in config:
            if name not in (*settings, "search_space"):
                raise ConfigError(f"AutoSearchPro: {name!r}. {did_you_mean(name, [*settings, 'search_space'])}")
        # Where it is not asked for, nothing of an earlier run counts, as documented for each of these.
        settings |= {"load_study_if_exists": False, "two_stage_search": False, "study_storage_db": None}
        self.config = {**settings, **config}
        self.search_space: dict[str, Any] = deepcopy(dict(self.config.get("search_space") or {}))
        self._check()

    def _check(self) -> None:
        config = self.config
        if config["model_input"] is None:
            raise ConfigError("AutoSearchPro needs model_input: the path of a float model.")
        if config["base_framework"] != "onnx":
            raise NotSupportedError(f"base_framework: {config['base_framework']!r}; possible: 'onnx'.")
        if config["direction"] not in ("minimize", "maximize"):
            raise ConfigError(f"direction: {config['direction']!r}; possible: 'minimize' or 'maximize'.")
        if config["search_algo"] not in (*SAMPLERS, GRID):
            possible = did_you_mean(str(config["search_algo"]), [*SAMPLERS, GRID])
            raise NotSupportedError(f"search_algo: {config['search_algo']!r} is not part of this version. {possible}")
        if config["plot_results"]:
            raise NotSupportedError("plot_results: nothing is drawn; all trials and scores are in the study's file.")
        if not isinstance(config["n_trials"], int) or config["n_trials"] < 1:
            raise ConfigError(f"n_trials: {config['n_trials']!r}; possible: 1 or more.")
        if config["search_evaluator"] is None and config["direction"] == "maximize":
            raise ConfigError("direction: a search_metric is a distance, of which less is better; use 'minimize'.")
        if not self.search_space:
            raise ConfigError("AutoSearchPro needs a search_space; get_auto_search_config(name) gives one.")
        check_space(self.search_space)
        if "weight" not in self.search_space:
            raise ConfigError("The search_space has no 'weight'; for one: ['Int8Spec'].")
        if config["calib_data_reader"] is None and config["search_evaluator"] is None:
            raise CalibrationError("AutoSearchPro needs calib_data_reader.")

    def run(self) -> Config:
        """Search; returns the parameters of the best trial, in the form of the search space.

        Raises:
            QuarkError: No trial succeeded: what the last one said.
        """
        config, output = self.config, Path(self.config["output_dir"])
        for folder in (output, Path(config["temp_dir"])):
            folder.mkdir(parents=True, exist_ok=True)
        with logged_to(output / "auto_search.log"):
            evaluator, metric = config["search_evaluator"], config["search_metric"] or "L2"
            trials = SearchTrials(
                config["model_input"],
                config["calib_data_reader"],
                config["eval_data_reader"],
                distance(metric, SUMS) if evaluator is None else None,
                evaluator,
                config["temp_dir"],
            )
            sign = -1.0 if config["direction"] == "maximize" else 1.0
            measure = metric if evaluator is None else getattr(evaluator, "__qualname__", type(evaluator).__name__)
            identity = identity_of(config["model_input"], measure, sign, trials.data_digest)
            stored = config["study_storage_db"]
            path = (output / stored).with_suffix(".json") if stored else None
            history = History(path, config["study_name"], identity, config["load_study_if_exists"])
            study = Study(
                trials,
                history,
                qconfig_of,
                lambda number: output / f"quantized_model_{number}.onnx",
                WORDS,
                sign,
                once=True,
            )
            best = self._search(study)
            with atomic_file(output / "best_params.json") as temporary:
                temporary.write_text(json.dumps(best, default=repr, indent=2), "utf-8")
            logger.info("Search: the best parameters are %s.", best)
        return best

    def _search(self, study: Study) -> Config:
        space = self.search_space
        if self.config["two_stage_search"]:
            calibration = {name: values for name, values in space.items() if name not in LEARNED}
            best = study.best_of(generate_all_configs(calibration))
            if "algorithms" not in space:
                return best
            space = {name: space[name] for name in LEARNED if name in space} | _fixed(best, space)
        if self.config["search_algo"] == GRID:
            return study.best_of(generate_all_configs(space)[: self.config["n_trials"]])
        return study.sampled(SAMPLERS[self.config["search_algo"]](space), self.config["n_trials"])


def _fixed(best: Config, space: Mapping[str, Any]) -> dict[str, Any]:
    """A space with the values of a config alone."""
    fixed: dict[str, Any] = {}
    for name, value in best.items():
        group = isinstance(space[name], dict)
        fixed[name] = (
            {**{inner: [v] for inner, v in value.items()}, "only_if": space[name]["only_if"]} if group else [value]
        )
    return fixed
