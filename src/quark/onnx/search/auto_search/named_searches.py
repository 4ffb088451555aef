"""The named searches of AutoSearchPro: `get_auto_search_config("A8W8_SEARCH")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quark.errors import ConfigError, did_you_mean

GPU = "cuda:0"
"""Where the named searches learn the rounding; "optim_device" and "infer_device" are lists that can be changed."""


def _tuning(name: str, low: float, high: float, most: int, **others: list[Any]) -> dict[str, Any]:
    """The ranges of a learned rounding."""
    return {
        "num_iterations": {"type": "int", "low": 3000, "high": most, "step": 3000},
        "learning_rate": {"type": "float", "low": low, "high": high, "log": True},
        **others,
        "only_if": {"algorithms": name},
    }


def _space(activation: str, weight: str, params: dict[str, Any], **others: list[Any]) -> dict[str, Any]:
    on_gpu: dict[str, list[Any]] = {
        "optim_device": [GPU],
        "infer_device": [GPU],
        "batch_size": [2],
        "early_stop": [True],
    }
    return {
        "activation": [activation],
        "activation_params": {"symmetric": [True, False], **params, "only_if": "activation"},
        "weight": [weight],
        "weight_params": {"symmetric": [True], "quant_granularity": ["Tensor"], "only_if": "weight"},
        "cle_algo": ["cle", None],
        "cle_params": {"cle_steps": [-1, 1], "only_if": {"cle_algo": "cle"}},
        "algorithms": ["adaround", "adaquant"],
        "adaquant_params": _tuning("adaquant", 1e-6, 1e-4, 20000, data_size=[1000], **on_gpu),
        "adaround_params": _tuning("adaround", 1e-2, 1e-1, 20000),
        "specific_layer_config": [None],
        "layer_type_config": [None],
        "exclude": [None],
        "use_external_data_format": [False],
        "OptimizeModel": [True],
        **others,
    }


def _advanced() -> dict[str, Any]:
    methods = {"calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"]}
    space = _space("Int8Spec", "Int8Spec", {**methods, "scale_type": ["Float32"], "quant_granularity": ["Tensor"]})
    on_gpu: dict[str, list[Any]] = {
        "optim_device": [GPU],
        "infer_device": [GPU],
        "batch_size": [2],
        "early_stop": [True],
    }
    return space | {
        "weight_params": {"symmetric": [True], "calibration_method": ["MinMax", "MinMSE"], "only_if": "weight"},
        "adaquant_params": _tuning("adaquant", 1e-6, 1e-3, 30000, data_size=[3000], **on_gpu),
        "adaround_params": _tuning("adaround", 1e-2, 1e-1, 30000, data_size=[3000], **on_gpu),
    }


def _xint8() -> dict[str, Any]:
    space = _space("XInt8Spec", "XInt8Spec", {"calibration_method": ["MinMSE"]})
    space["activation_params"]["symmetric"] = [True]
    return space


ALIGNED = {"AlignSlice": [False], "FoldRelu": [True], "AlignConcat": [True]}
SPACES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "ADVANCED_SEARCH": _advanced,
    "XINT8_SEARCH": _xint8,
    "A8W8_SEARCH": lambda: _space(
        "Int8Spec",
        "Int8Spec",
        {"calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"]},
        **ALIGNED,
        PercentileCandidates=[[99.99, 99.999, 99.9999], [99.0, 99.9, 99.99, 99.999, 99.9999]],
    ),
    "A16W8_SEARCH": lambda: _space(
        "Int16Spec",
        "Int8Spec",
        {"calibration_method": ["MinMax", "Percentile"]},
        **ALIGNED,
        AlignEltwiseQuantType=[True],
    ),
}


def default_search() -> dict[str, Any]:
    """What a search does where its config says nothing, but for the space."""
    return {
        "n_trials": 20,
        "n_jobs": 1,
        "output_dir": "./output",
        "temp_dir": "./temp_dir",
        "search_algo": "TPE",
        "search_evaluator": None,
        "search_metric": None,
        "direction": "minimize",
        "base_framework": "onnx",
        "study_storage_db": "auto_search.db",
        "load_study_if_exists": True,
        "study_name": "AutoSearch",
        "model_input": None,
        "calib_data_reader": None,
        "eval_data_reader": None,
        "two_stage_search": True,
        "plot_results": False,
    }


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """A new config of AutoSearchPro: "ADVANCED_SEARCH", "XINT8_SEARCH", "A8W8_SEARCH" or "A16W8_SEARCH".

    Raises:
        ConfigError: There is none of this name.
    """
    if config_name not in SPACES:
        raise ConfigError(f"There is no search {config_name!r}. {did_you_mean(config_name, SPACES)}")
    return {"search_space": SPACES[config_name](), **default_search()}
