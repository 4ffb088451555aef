"""The profiler of scripts: time, memory and disk traffic at the start and the end of each step, as a YAML file.

It works where the environment has QUARK_PROFILING=1, and costs nothing elsewhere. The file is written anew at each
checkpoint, so that what a killed run left says where its memory went.

    memory_usage:
    - step: "Model Loading Start"
      timestamp: 1709395200.456
      relative_time_secs: 0.333
      cpu_memory_mb: 155.2
    total_quantization_time_seconds: 45.778
    peak_memory_mb: 2048.5

What a system does not tell (memory outside Linux, a GPU that is not there) is left out of the file.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.compat.profiled_steps import asked
from quark.errors import OutputError

__all__ = [
    "BaseMetric", "CheckpointMetric", "GlobalProfiler", "MetricContext", "ProfileStep", "SummaryMetric",
    "profile_scope",
]  # fmt: skip

T = TypeVar("T")
P = ParamSpec("P")

MIB = 1024.0 * 1024.0


class ProfileStep:
    """Names of the steps; any other string is one too."""

    START = "Start"
    END = "End"
    USER_DEFINED = "User-Defined"
    MODEL_LOADED = "Model Loaded"
    FILE_TO_FILE_QUANTIZATION = "File-to-File Quantization"
    MODEL_LOADING = "Model Loading"
    DATASET_LOADING = "Dataset Loading"
    MODEL_QUANTIZATION = "Model Quantization"
    MODEL_EVALUATION = "Model Evaluation"
    ADVANCED_ALGORITHMS = "Advanced Algorithms"
    CALIBRATION_WEIGHTS = "Calibration (Weights)"
    CALIBRATION_FORWARD = "Calibration (Forward)"
    FREEZE_MODEL = "Freeze Model"
    MODEL_PREPARATION = "Model Preparation"
    EXPORT_HF_SAFETENSORS = "Export HF Safetensors"
    EXPORT_ONNX = "Export ONNX"
    EXPORT_GGUF = "Export GGUF"
    PRE_PROCESS = "Pre-process"
    CALIBRATION = "Calibration"
    QUANTIZATION_MATMUL_NBITS = "Quantization (MatMulNBits)"
    QUANTIZATION_STATIC = "Quantization (Static)"
    QUANTIZATION_DYNAMIC = "Quantization (Dynamic)"
    POST_PROCESS = "Post-process"
    FAST_FINETUNE = "Fast Finetune"
    MODEL_CACHING = "Model Caching"
    FLOAT_MODEL_VALIDATION = "Float Model Validation"


@dataclass(frozen=True)
class MetricContext:
    """The figures that a metric is computed from. Times are seconds since 1970, sizes bytes; 0 where unknown.

    Attributes:
        start_time, current_time: Of the profile, and of the checkpoint; `end_time` of a summary.
        step_name: Of the checkpoint.
        base_memory, current_memory, peak_memory: Resident memory at the start, now, and the most there was.
        gpu_available: Whether torch has a GPU; its memory is what torch has allocated there.
        disk_io_available: Whether the system counts what the process reads and writes.
        current_disk_read_bytes, current_disk_write_bytes: Since the start of the process, as the two baselines are.
    """

    start_time: float
    current_time: float
    end_time: float | None = None
    step_name: str | None = None
    base_memory: int = 0
    current_memory: int = 0
    peak_memory: int = 0
    gpu_available: bool = False
    gpu_baseline_memory: int = 0
    gpu_current_memory: int = 0
    gpu_peak_memory: int = 0
    disk_io_available: bool = False
    baseline_disk_read_bytes: int = 0
    baseline_disk_write_bytes: int = 0
    current_disk_read_bytes: int = 0
    current_disk_write_bytes: int = 0


class BaseMetric(ABC):
    """A value of the profile, under a name."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its key in the file."""

    @abstractmethod
    def get_definition(self) -> str:
        """Return the name of the metric, with its unit: one line of the file's comments."""

    @abstractmethod
    def collect(self, context: MetricContext) -> float | str | None:
        """The value; None leaves it out."""


class CheckpointMetric(BaseMetric):
    """A value of each checkpoint."""


class SummaryMetric(BaseMetric):
    """A value of the whole profile."""


@dataclass(frozen=True)
class _Row:
    """A metric that is computed by one expression."""

    name: str
    definition: str
    of: Callable[[MetricContext], float | str | None]

    def get_definition(self) -> str:
        return self.definition

    def collect(self, context: MetricContext) -> float | str | None:
        return self.of(context)


Metric = BaseMetric | _Row


def _mib(size: int, known: bool = True) -> float | None:
    return round(size / MIB, 3) if known else None


CHECKPOINT_METRICS = (
    _Row("step", "Name of the checkpoint", lambda c: c.step_name),
    _Row("timestamp", "Seconds since 1970", lambda c: round(c.current_time, 3)),
    _Row("relative_time_secs", "Seconds since the profile began", lambda c: round(c.current_time - c.start_time, 3)),
    _Row("cpu_memory_mb", "Resident memory in MiB", lambda c: _mib(c.current_memory, c.current_memory > 0)),
    _Row("gpu_memory_mb", "GPU memory that torch holds, in MiB", lambda c: _mib(c.gpu_current_memory, c.gpu_available)),
    _Row(
        "disk_read_mb", "MiB read since the profile began",
        lambda c: _mib(c.current_disk_read_bytes - c.baseline_disk_read_bytes, c.disk_io_available),
    ),
    _Row(
        "disk_write_mb", "MiB written since the profile began",
        lambda c: _mib(c.current_disk_write_bytes - c.baseline_disk_write_bytes, c.disk_io_available),
    ),
)  # fmt: skip
SUMMARY_METRICS = (
    _Row(
        "total_quantization_time_seconds", "Seconds from the start to the end",
        lambda c: round((c.end_time or c.current_time) - c.start_time, 3),
    ),
    _Row("peak_memory_mb", "The most resident memory of the process, in MiB",
         lambda c: _mib(c.peak_memory, c.peak_memory > 0)),
    _Row("gpu_peak_memory_mb", "The most GPU memory that torch had, in MiB",
         lambda c: _mib(c.gpu_peak_memory, c.gpu_available)),
    _Row(
        "total_disk_read_mb", "MiB read from the start to the end",
        lambda c: _mib(c.current_disk_read_bytes - c.baseline_disk_read_bytes, c.disk_io_available),
    ),
    _Row(
        "total_disk_write_mb", "MiB written from the start to the end",
        lambda c: _mib(c.current_disk_write_bytes - c.baseline_disk_write_bytes, c.disk_io_available),
    ),
)  # fmt: skip


class GlobalProfiler:
    """The one profile of the process; a second call gives the same object.

    Args:
        output_path: The file to write; what is there is replaced. A second call with another path is not heard.

    Attributes:
        checkpoint_metrics, summary_metrics: What is recorded; append metrics of your own.
        enabled: Whether the environment asked for it, by QUARK_PROFILING=1, when the profiler was made.
    """

    _instance: GlobalProfiler | None = None

    def __new__(cls, output_path: str | os.PathLike[str] = "quark_profile.yaml") -> GlobalProfiler:
        if cls._instance is None:
            made = super().__new__(cls)
            made._begin(Path(output_path).absolute())
            cls._instance = made
        return cls._instance

    def _begin(self, path: Path) -> None:
        self.output_path = path
        self.checkpoint_metrics: list[Metric] = list(CHECKPOINT_METRICS)
        self.summary_metrics: list[Metric] = list(SUMMARY_METRICS)
        self.enabled = asked()
        self._records: list[dict[str, float | str]] = []
        self._start = time.time()
        self._stopped = not self.enabled
        if self.enabled:
            self._baseline = _usage()
            self._checkpoint(ProfileStep.START)
            atexit.register(self.stop)

    @contextmanager
    def scope(self, step_name: str, user_msg: str | None = None) -> Iterator[GlobalProfiler]:
        """Within: a step, which has a checkpoint at its start and one at its end.

        Args:
            step_name: Such as `ProfileStep.MODEL_LOADING`.
            user_msg: What the step is called in place of it, as for `ProfileStep.USER_DEFINED`.
        """
        name = step_name if user_msg is None else user_msg
        self._checkpoint(f"{name} Start")
        try:
            yield self
        finally:
            self._checkpoint(f"{name} End")

    def stop(self) -> None:
        """End the profile, and write its summary. It is called when the process ends; a second call does nothing."""
        if self._stopped:
            return
        self._checkpoint(ProfileStep.END)
        self._stopped = True
        self._write(self._context(end_time=time.time()))
        atexit.unregister(self.stop)

    def _checkpoint(self, step_name: str) -> None:
        if self._stopped:
            return
        self._records.append(_collected(self.checkpoint_metrics, self._context(step_name=step_name)))
        self._write()

    def _context(self, step_name: str | None = None, end_time: float | None = None) -> MetricContext:
        base, now = self._baseline, _usage()
        return MetricContext(
            start_time=self._start, current_time=time.time(), end_time=end_time, step_name=step_name,
            base_memory=base.memory, current_memory=now.memory, peak_memory=now.peak,
            gpu_available=now.gpu is not None, gpu_baseline_memory=base.gpu or 0,
            gpu_current_memory=now.gpu or 0, gpu_peak_memory=now.gpu_peak,
            disk_io_available=now.disk is not None and base.disk is not None,
            baseline_disk_read_bytes=(base.disk or (0, 0))[0], baseline_disk_write_bytes=(base.disk or (0, 0))[1],
            current_disk_read_bytes=(now.disk or (0, 0))[0], current_disk_write_bytes=(now.disk or (0, 0))[1],
        )  # fmt: skip

    def _write(self, summary: MetricContext | None = None) -> None:
        """Write the file. That it cannot be written ends the profile and not the run, which is worth more."""
        lines = ["# Quark Profiling Results", "memory_usage:"]
        for record in self._records:
            lines += [f"{'  ' if index else '- '}{key}: {json.dumps(record[key])}" for index, key in enumerate(record)]
        if summary is not None:
            lines += [f"{key}: {json.dumps(value)}" for key, value in _collected(self.summary_metrics, summary).items()]
            metrics = [*self.checkpoint_metrics, *self.summary_metrics]
            lines += ["# Metric Definitions:", *(f"# - {metric.name}: {metric.get_definition()}" for metric in metrics)]
        try:
            with atomic_file(self.output_path) as file:
                file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OutputError, OSError) as error:
            self._stopped = True
            logger.warning("The profile cannot be written to %s: %s. It ends here.", self.output_path, error)


def profile_scope(step: str, user_msg: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: each call of the function is a step of the profile. Arguments as those of `GlobalProfiler.scope`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def profiled(*args: P.args, **options: P.kwargs) -> T:
            with GlobalProfiler().scope(step, user_msg) if asked() else nullcontext():
                return function(*args, **options)

        return profiled

    return decorate


def _collected(metrics: list[Metric], context: MetricContext) -> dict[str, float | str]:
    values = {metric.name: metric.collect(context) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Usage:
    """The use of the process now, in bytes: memory 0 and the others None where the system does not tell them."""

    memory: int
    peak: int
    gpu: int | None
    gpu_peak: int
    disk: tuple[int, int] | None


def _usage() -> _Usage:
    status = _numbers("/proc/self/status")
    disk = _numbers("/proc/self/io")
    # Memory of a GPU is that of torch, which is asked only where the program has loaded it.
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_available()
    return _Usage(
        memory=status.get("VmRSS", 0) * 1024,
        peak=status.get("VmHWM", 0) * 1024,
        gpu=torch.cuda.memory_allocated() if torch is not None and gpu else None,
        gpu_peak=torch.cuda.max_memory_allocated() if torch is not None and gpu else 0,
        disk=(disk["rchar"], disk["wchar"]) if "rchar" in disk and "wchar" in disk else None,
    )


def _numbers(file: str) -> dict[str, int]:
    """The lines "name: number" of a file of Linux; none elsewhere."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    words = {name: value.split() for name, value in pairs}
    return {name: int(value[0]) for name, value in words.items() if value and value[0].isdigit()}
