"""AutoSearch: a search over QuantizationConfig, until enough candidates are found or a limit is reached."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.base.log import logger
from quark.compat.auto_search.search_space import JOINT, SAMPLERS, SEED, SearchSpace, joint
from quark.compat.auto_search.search_space import Config as Choice
from quark.compat.auto_search.trials import SearchTrials, Study
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.calibration.data.path_reader import PathDataReader
from quark.onnx.config.config import Config
from quark.onnx.config.enums import CalibrationMethod, LayerWiseMethod, PowerOfTwoMethod, QuantType
from quark.onnx.search.evaluator import MEANS, distance
from quark.onnx.search.history import History, TimeBudget, logged_to, text_of

ALGORITHMS = ("grid_search", "random")
CONDITIONS = ("find_n_candidates", "find_best_candidate", "iteration_limit", "time_limit")
WORDS = ("Search: config %d fails: %s", "Search: config %d differs by %.6g: %s.")
NONE = -1
"""A stop condition that does not count."""


class AutoSearchConfig:
    """The settings of AutoSearch; any object with some of these attributes will do, the others are as here.

    Attributes:
        search_space: Field of QuantizationConfig -> values; within "extra_options" and "FastFinetune" the options.
        search_metric: "L2", "L1", "cos", "psnr" or "ssim", as a distance of which less is better.
        search_algo: "grid_search": in order; "random": in an order of its own, the same each time.
        search_evaluator: Instead of a metric: (path) -> quality; the difference to the float model's is compared.
        search_metric_tolerance: The largest difference of a candidate.
        search_cache_dir: Where outputs wait that memory does not hold.
        search_output_dir: Where the models of candidates go, `iter_<number>.onnx`.
        search_log_path: A file that what is logged goes to as well.
        two_stage_search: First the best calibration without FastFinetune, then the best FastFinetune on top of it.
        advanced_fastft_search: Search FastFinetune's NumIterations and LearningRate between the least and the largest
            value of their lists, by `advanced_fastft_params`.
        advanced_fastft_params: sampler_algo "TPE" or "Random", direction, n_trials.
        n_jobs, search_devices: Trials run one after another, each on all of what OptimDevice and InferDevice name, so
            that these change nothing of the result.
        search_stop_condition: find_n_candidates, iteration_limit, time_limit in seconds; -1 for none.
    """

    search_space: Mapping[str, Any] = {
        "calibrate_method": [
            PowerOfTwoMethod.MinMSE,
            PowerOfTwoMethod.NonOverflow,
            CalibrationMethod.MinMax,
            CalibrationMethod.Entropy,
            CalibrationMethod.Percentile,
            LayerWiseMethod.LayerWisePercentile,
        ],
        "activation_type": [QuantType.QInt8, QuantType.QInt16],
        "weight_type": [QuantType.QInt8, QuantType.QInt16],
        "include_cle": [True, False],
        "include_auto_mp": [False, True],
        "include_fast_ft": [False, True],
        "include_sq": [False, True],
        "extra_options": {
            "ActivationSymmetric": [True, False],
            "WeightSymmetric": [True, False],
            "CalibMovingAverage": [True, False],
            "CalibMovingAverageConstant": [0.01, 0.001],
            "Percentile": [99.99, 99.999],
            "SmoothAlpha": [0.5, 0.6],
            "FastFinetune": {
                "DataSize": [500, 1000],
                "NumIterations": [100, 1000],
                "OptimAlgorithm": ["adaround", "adaquant"],
                "LearningRate": [0.01, 0.001, 0.0001],
                "FixedSeed": [42],
            },
        },
    }
    search_metric: str = "L2"
    search_algo: str = "grid_search"
    search_evaluator: Any = None
    search_metric_tolerance: float = 20000.0
    search_cache_dir: str = "./"
    search_output_dir: str = "./"
    search_log_path: str = "./auto_search.log"
    two_stage_search: bool = False
    advanced_fastft_search: bool = False
    advanced_fastft_params: Mapping[str, Any] = {"sampler_algo": "TPE", "direction": "minimize", "n_trials": 10}
    n_jobs: int = 2
    search_devices: str = "cuda:0,1"
    search_stop_condition: Mapping[str, float] = {
        "find_n_candidates": 1e3,
        "find_best_candidate": NONE,
        "iteration_limit": 1e5,
        "time_limit": 30 * 24 * 3600,
    }


class AutoSearch:
    """Quantizes a model with the configs of a space, and keeps those within a tolerance.

    Args:
        model_input: Path of the float model.
        config: What the space changes; never changed itself.
        auto_search_config: What to do: an AutoSearchConfig, or anything with some of its attributes.
        eval_dataloader: Samples to compare by; None for the calibration data.
        calibration_data_reader: Calibration data.
        calibration_data_path: Instead: a folder or a file, for PathDataReader.

    Attributes:
        all_configs: What is tried, as `build_all_configs` gives it; may be set.
        candidates: {"config_index", "difference", "model_path"} of each candidate.
        searched_space: Number of a trial -> its difference.

    Raises:
        ConfigError: A name or value is unknown.
    """

    def __init__(
        self,
        model_input: Any,
        config: Config,
        auto_search_config: Any = None,
        eval_dataloader: Any = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"AutoSearch takes a Config, got {type(config).__name__}; AutoSearchPro searches QConfigs."
            )
        self.model_input, self.config = model_input, config
        given = auto_search_config if auto_search_config is not None else AutoSearchConfig
        self.auto_search_config = AutoSearchConfig()
        for name in (name for name in vars(AutoSearchConfig) if not name.startswith("_")):
            value = getattr(given, name, None)
            if value is not None:
                setattr(self.auto_search_config, name, value)
        if calibration_data_path is not None:
            if calibration_data_reader is not None:
                raise ConfigError("Give a calibration_data_reader or a calibration_data_path, not both.")
            calibration_data_reader = PathDataReader(model_input, calibration_data_path)
        self.calibration_data_reader, self.eval_dataloader = calibration_data_reader, eval_dataloader
        self._check()
        self.all_configs = self.build_all_configs(self.auto_search_config.search_space)
        self.candidates: list[dict[str, Any]] = []
        self.searched_space: dict[int, float] = {}

    def _check(self) -> None:
        wanted = self.auto_search_config
        if wanted.search_algo not in ALGORITHMS:
            raise ConfigError(f"search_algo: {wanted.search_algo!r}. {did_you_mean(wanted.search_algo, ALGORITHMS)}")
        for name, value in wanted.search_stop_condition.items():
            if name not in CONDITIONS:
                raise ConfigError(f"search_stop_condition: {name!r}. {did_you_mean(name, CONDITIONS)}")
            if name == "find_best_candidate" and value != NONE:
                raise NotSupportedError("find_best_candidate is not part of this version: all candidates are returned.")
        if wanted.search_evaluator is None:
            distance(wanted.search_metric, MEANS)

    def build_all_configs(self, search_space_config: Mapping[str, Any]) -> list[Choice]:
        """Every configuration of a space, without options that have no effect in it."""
        if "crypto_mode" in search_space_config:
            raise NotSupportedError("crypto_mode cannot be searched.")
        return SearchSpace(search_space_config).get_all_configs()

    def search_model(self) -> Any:
        """Search.

        Returns:
            The candidates; of a two-stage search [the best config]; of an advanced one the best parameters.

        Raises:
            QuarkError: Every config failed: what the last one said.
        """
        wanted = self.auto_search_config
        for folder in (
            Path(wanted.search_output_dir),
            Path(wanted.search_cache_dir),
            Path(wanted.search_log_path).parent,
        ):
            folder.mkdir(parents=True, exist_ok=True)
        with logged_to(Path(wanted.search_log_path)):
            evaluator, samples = wanted.search_evaluator, self.eval_dataloader
            if samples is not None and not hasattr(samples, "get_next") and not hasattr(samples, "__iter__"):
                samples = [samples[position] for position in range(len(samples))]
            trials = SearchTrials(
                self.model_input,
                self.calibration_data_reader,
                samples,
                distance(wanted.search_metric, MEANS) if evaluator is None else None,
                evaluator,
                wanted.search_cache_dir,
            )
            output = Path(wanted.search_output_dir)
            self._study = Study(trials, History(), self._config, lambda number: output / f"iter_{number}.onnx", WORDS)
            self.candidates, self.searched_space = [], {}
            if wanted.two_stage_search:
                return [self._two_stages()]
            if wanted.advanced_fastft_search:
                return self._advanced()
            return self._one_stage()

    def sampler(self, input_idxs: Sequence[Choice]) -> list[Choice]:
        """The configs in the order in which they are tried."""
        if self.auto_search_config.search_algo == "random":
            return random.Random(SEED).sample(list(input_idxs), len(input_idxs))
        return list(input_idxs)

    def _one_stage(self) -> list[dict[str, Any]]:
        stop = {**dict.fromkeys(CONDITIONS, NONE), **self.auto_search_config.search_stop_condition}
        budget = TimeBudget.of(None if stop["time_limit"] == NONE else stop["time_limit"])
        for number, choice in enumerate(self.sampler(self.all_configs)):
            if (
                NONE != stop["find_n_candidates"] <= len(self.candidates)
                or NONE != stop["iteration_limit"] <= number
                or (number and budget.left() <= 0)
            ):
                break
            self._try(choice)
        self._require_one()
        logger.info("Search: of %d trials, these are candidates: %s.", len(self.searched_space), self.candidates)
        return self.candidates

    def _two_stages(self) -> Choice:
        plain = {text_of(choice): choice for choice in map(_without_tuning, self.all_configs)}
        tunings = [choice.get("extra_options", {}).get("FastFinetune") for choice in self.all_configs]
        tunings = [t for position, t in enumerate(tunings) if t and t not in tunings[:position]]
        if not tunings:
            raise ConfigError("two_stage_search: the space has no FastFinetune with include_fast_ft=[True].")
        best = self._best(list(plain.values()))
        options = best.get("extra_options", {})
        return self._best(
            [
                {**best, "include_fast_ft": True, "extra_options": {**options, "FastFinetune": tuning}}
                for tuning in tunings
            ]
        )

    def _advanced(self) -> Choice:
        params = self.auto_search_config.advanced_fastft_params
        name = params.get("sampler_algo", "TPE")
        if name not in SAMPLERS:
            raise NotSupportedError(
                f"sampler_algo: {name!r} is not part of this version. {did_you_mean(name, SAMPLERS)}"
            )
        if params.get("direction", "minimize") not in ("minimize", "maximize"):
            raise ConfigError(f"direction: {params['direction']!r}; possible: 'minimize' or 'maximize'.")
        sign = -1.0 if params.get("direction") == "maximize" else 1.0
        space = _ranges(self.auto_search_config.search_space)
        sampler = SAMPLERS[name]({"FastFinetune": {**space, "only_if": {}}})
        tried: list[tuple[Choice, float]] = []
        for _ in range(params.get("n_trials", 10)):
            chosen = sampler.suggest(tried)
            score = self._try({"include_fast_ft": True, "extra_options": {"FastFinetune": chosen["FastFinetune"]}})
            tried.append((chosen, sign * score if math.isfinite(score) else math.inf))
        self._require_one()
        return dict(min(tried, key=lambda trial: trial[1])[0]["FastFinetune"])

    def _best(self, choices: Sequence[Choice]) -> Choice:
        return self._study.chosen(choices, [self._try(choice) for choice in choices])

    def _require_one(self) -> None:
        if self._study.error is not None and not any(map(math.isfinite, self.searched_space.values())):
            raise self._study.error

    def _try(self, choice: Choice) -> float:
        """Quantize and score; the model stays where it is a candidate. inf where the config cannot be met."""
        number, score = len(self.searched_space), self._study.score(choice)
        path = self._study.path_of(number)
        self.searched_space[number] = score
        if score <= self.auto_search_config.search_metric_tolerance:
            self.candidates.append({"config_index": number, "difference": score, "model_path": str(path)})
        else:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.data").unlink(missing_ok=True)
        return score

    def _config(self, choice: Choice) -> Config:
        """The config with what was chosen; a copy."""
        base = copy.deepcopy(self.config.global_quant_config)
        chosen = copy.deepcopy(choice.get("extra_options", {}))
        tuning = chosen.pop("FastFinetune", {})
        if JOINT in tuning:
            tuning["NumIterations"], tuning["LearningRate"] = joint(tuning.pop(JOINT))
        options = {**base.extra_options, **chosen}
        if tuning:
            options["FastFinetune"] = {**options.get("FastFinetune", {}), **tuning}
        fields = {name: value for name, value in choice.items() if name != "extra_options"}
        known = [entry.name for entry in dataclasses.fields(base)]
        for name in fields:
            if name not in known:
                raise ConfigError(f"search_space: {name!r}. {did_you_mean(name, known)}")
        return Config(dataclasses.replace(base, **fields, extra_options=options))


def _without_tuning(choice: Choice) -> Choice:
    options = {name: value for name, value in choice.get("extra_options", {}).items() if name != "FastFinetune"}
    plain = {name: value for name, value in choice.items() if name != "extra_options"}
    return {**plain, "include_fast_ft": False, **({"extra_options": options} if options else {})}


def _ranges(space: Mapping[str, Any]) -> dict[str, Any]:
    """The ranges between the ends of FastFinetune's lists."""
    tuning = space.get("extra_options", {}).get("FastFinetune", {})
    kinds: dict[str, dict[str, Any]] = {
        "NumIterations": {"type": "int"},
        "LearningRate": {"type": "float", "log": True},
    }
    if not tuning or not set(tuning) <= set(kinds):
        raise ConfigError(
            f"advanced_fastft_search searches {', '.join(kinds)} of FastFinetune; the space has {tuning!r}."
        )
    return {name: {**kinds[name], "low": min(values), "high": max(values)} for name, values in tuning.items()}
