"""Checks, before any work, the parameters of AdaRound and AdaQuant: each is obeyed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxruntime import get_available_providers

from quark.errors import ConfigError, NotSupportedError, did_you_mean, require_packages
from quark.onnx.config.algo_configs import TUNED, AdaQuantConfig, AdaRoundConfig

if TYPE_CHECKING:
    import torch

Config = AdaRoundConfig | AdaQuantConfig

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data_size": (lambda v: v >= 1, "at least 1"),
    "batch_size": (lambda v: v >= 1, "at least 1"),
    "num_batches": (lambda v: v >= 1, "at least 1"),
    "num_iterations": (lambda v: v >= 1, "at least 1"),
    "log_period": (lambda v: v >= 1, "at least 1"),
    "fixed_seed": (lambda v: v >= 0, "at least 0"),
    "learning_rate": (lambda v: v > 0, "more than 0"),
    "relative_rate": (lambda v: v is None or v > 0, "None or more than 0"),
    "reg_param": (lambda v: v >= 0, "at least 0"),
    "drop_ratio": (lambda v: 0 <= v <= 1, "from 0 (all inputs of the float model) to 1 (all of the quantized one)"),
    "warm_start": (lambda v: 0 <= v < 1, "from 0 up to 1"),
    "mem_opt_level": (lambda v: v in (0, 1, 2), "0 (all in memory), 1 (bounded) or 2 (on disk)"),
    "lr_adjust": (lambda v: not v or (len(v) == 2 and min(v) > 0), "(), or (error, learning rate), both more than 0"),
    "beta_range": (lambda v: len(v) == 2 and min(v) > 1, "(first, last), both more than 1"),
}
_ADAROUND_ONLY = ("reg_param", "beta_range")


def check(config: Config) -> None:
    """Raise ConfigError for a value out of its range, NotSupportedError for what this version does not do."""
    name = type(config).__name__
    for field, (holds, possible) in RANGES.items():
        if hasattr(config, field) and not holds(getattr(config, field)):
            raise ConfigError(f"{name}.{field}: {getattr(config, field)!r}; possible: {possible}.")
    for op_type in config.target_op_type:
        if op_type not in TUNED:
            raise ConfigError(f"{name}.target_op_type: {op_type!r}. {did_you_mean(op_type, TUNED)}")
    if isinstance(config, AdaRoundConfig) and config.update_bias:
        raise ConfigError(f"{name}.update_bias: AdaRound learns how weights round. Possible: AdaQuantConfig.")
    changed = [f for f in _ADAROUND_ONLY if getattr(config, f) != getattr(AdaRoundConfig(), f)]
    if isinstance(config, AdaQuantConfig) and changed:
        raise ConfigError(f"{name}.{changed[0]}: AdaQuant has no regularizer. Possible: AdaRoundConfig.")
    _check_batches(config, name)
    _check_inference(config.infer_device, name)


def _check_batches(config: Config, name: str) -> None:
    """Refuse ways of reading batches."""
    if config.cache_dir is not None and not Path(config.cache_dir).is_dir():
        raise ConfigError(f"{name}.cache_dir: {config.cache_dir!r} is no folder.")
    if config.use_gds:
        raise NotSupportedError(f"{name}.use_gds: not part of this version; batches are read by the CPU.")
    if config.num_workers not in (0, 1):
        raise NotSupportedError(f"{name}.num_workers={config.num_workers}: batches are read in this process; 0 or 1.")
    if config.pin_memory and _kind(config.optim_device) == "cpu":
        raise ConfigError(f"{name}.pin_memory: for an optim_device that is a GPU; it is {config.optim_device!r}.")


def _kind(device: str) -> str:
    return device.lower().partition(":")[0]


def _check_inference(device: str, name: str) -> None:
    kinds = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}
    if _kind(device) not in kinds:
        raise ConfigError(f"{name}.infer_device: {device!r}. {did_you_mean(device, kinds)}")
    if kinds[_kind(device)] not in get_available_providers():
        raise ConfigError(f"{name}.infer_device: this ONNX Runtime has no {kinds[_kind(device)]}. Possible: 'cpu'.")
    if _kind(device) != "cpu":
        raise NotSupportedError(f"{name}.infer_device: {device!r}: layers are run on the CPU in this version.")


def optimizer_device(config: Config) -> torch.device:
    """The device that the training runs on.

    Raises:
        MissingDependencyError: torch is absent.
        ConfigError: torch does not see the device.
    """
    require_packages(type(config).__name__, "torch", "torch")
    import torch  # only here and where layers are trained: the ONNX flow does without it

    field, wanted = f"{type(config).__name__}.optim_device", config.optim_device.lower()
    kind, _, index = wanted.partition(":")
    if kind not in ("cpu", "cuda", "rocm") or (index and not index.isdigit()):
        raise ConfigError(f"{field}: {config.optim_device!r}; possible: 'cpu', 'cuda', 'rocm', 'cuda:1' ...")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        seen = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(f"{field}: torch sees no {wanted!r} here. Possible: {', '.join(['cpu', *seen])}.")
    # ROCm builds of torch call their devices cuda too.
    return torch.device(f"cuda:{index or 0}")


def check_output_index(config: Config, outputs: Sequence[Any]) -> None:
    """Raise ConfigError for an output that the model does not have."""
    if not 0 <= config.output_index < len(outputs):
        name, count = type(config).__name__, len(outputs)
        raise ConfigError(f"{name}.output_index: {config.output_index}; possible: 0 to {count - 1}.")
