"""Run: a job of an ONNX file."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from quark.base.files import check_file
from quark.base.log import logger
from quark.errors import ConfigError, DamageError, NothingToQuantizeError, QuarkError, SlowerThanFloatError
from quark.goals.efforts import BALANCED, FAST
from quark.jobs.request import FileRequest
from quark.jobs.resolve import FileJob
from quark.jobs.words import onnx_algorithms
from quark.onnx import Config, ModelQuantizer, PathDataReader, get_default_config
from quark.onnx.calibration.data.inputs import file_bytes, model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.config import QConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.preset_rows import QROWS
from quark.onnx.config.serialized import as_scope
from quark.onnx.config.settings import MeasurementSettings, Settings
from quark.onnx.operators.targets import TARGETS
from quark.onnx.search.lost_outputs.verdict import LEAST
from quark.onnx.search.recovery.preference import ACCURACY, BETWEEN, SIZE, check_preference
from quark.onnx.search.recovery.search import Recovery

CPU_TARGET = "ort_arm64" if platform.machine().lower() in ("arm64", "aarch64") else "ort_x64"
"""The target without a configuration: the processor of this machine."""
CPU, CPU_WEIGHTS, CPU_DYNAMIC = "INT8_CPU", "INT8_CPU_WEIGHTS", "INT8_CPU_DYNAMIC"
"""The preset with data; where no integers are faster; without data."""


@dataclass(frozen=True)
class Timing:
    """The words of the command line about the times of kernels.

    Attributes:
        measure: Whether they are taken; None as the configuration says.
        profile: Their file; None as the configuration says.
        whole_file: Whether what is written is timed, too.
    """

    measure: bool | None = None
    profile: Path | None = None
    whole_file: bool = False

    def by_default(self, target: str) -> Timing:
        """Times are taken where nothing was said: those of this machine say nothing of another processor.

        What is written is then timed as a whole, too.
        """
        timing = replace(self, measure=target == CPU_TARGET) if self.measure is None else self
        return replace(timing, whole_file=bool(timing.measure))

    def apply(self, settings: MeasurementSettings) -> MeasurementSettings:
        """The settings with what was given. Raises ConfigError for a file without times."""
        enabled = settings.enabled if self.measure is None else self.measure
        if self.profile is not None and not enabled:
            raise ConfigError("--profile is the file of the times that --measure takes.")
        profile = str(self.profile) if self.profile else settings.profile
        return replace(settings, enabled=enabled, profile=profile, whole_file=self.whole_file)


@dataclass(frozen=True)
class Recovering:
    """How far to go; see `ModelQuantizer.recover`."""

    budget: str
    metric: str
    target: float | None
    quick: bool = False
    allow_wider: bool = False
    prefer: str = BETWEEN

    def run(
        self,
        quantizer: ModelQuantizer,
        model: Path,
        output: str,
        reader: Any,
        weights_alone: ModelQuantizer | None = None,
        without_samples: ModelQuantizer | None = None,
    ) -> tuple[str, Recovery]:
        """Write the best that is found; return what it is in words, and the search."""
        found = quantizer.recover(
            model, output, reader,
            budget=self.budget, metric=self.metric, target=self.target, quick=self.quick,
            allow_wider=self.allow_wider, weights_alone=weights_alone, without_samples=without_samples,
            prefer=self.prefer,
        )  # fmt: skip
        types = [f"{count} {name} {kind}" for (name, kind), count in sorted(found.types.items())]
        return ", ".join(types) or "no Q/DQ", found


QUICK = Recovering("60s", "sqnr", None, quick=True)
"""The search for a file without a configuration: at most a minute."""


def recovery_of(effort: str, has_data: bool) -> Recovering | None:
    """Return the search of an effort of a goal; None without one."""
    if not has_data or effort == FAST:
        return None
    return QUICK if effort == BALANCED else Recovering("10m", "sqnr", None)


def _asked_recovery(request: FileRequest) -> Recovering | None:
    """Return the search of a request; None without --recover. Raises ConfigError for an option that then says
    nothing.
    """
    if request.recover:
        budget, metric = request.budget or "10m", request.metric or "sqnr"
        return Recovering(budget, metric, request.reach, allow_wider=request.allow_wider)
    given = {"--budget": request.budget, "--metric": request.metric, "--reach": request.reach}
    for flag, value in (given | {"--allow-wider": request.allow_wider or None}).items():
        if value is not None:
            raise ConfigError(f"{flag} goes with --recover.")
    return None


@dataclass(frozen=True)
class FileResult:
    """The result for an ONNX file.

    Attributes:
        path: The file.
        name: The configuration that it was.
        written: What the best that a recovery found holds, for the end of a line; empty without one.
        before, after: Bytes.
        seconds: What it took.
        reader: The calibration data; None without any.
        recovery: What a recovery found; None without one.
        request: What was asked for, with how images were read.
    """

    path: Path
    name: str
    written: str
    before: int
    after: int
    seconds: float
    reader: Any
    recovery: Recovery | None
    request: FileRequest


@dataclass(frozen=True)
class _Writing:
    """The settings that a file is written by, and the data.

    Attributes:
        model: The float model.
        output: The file to make.
        reader: The calibration data, which can be read again; None without any.
        recovery: What is searched for where a quantizer has something to search; None: nothing.
    """

    model: Path
    output: str
    reader: PathDataReader | Samples | None
    recovery: Recovering | None

    def best_of(
        self, name: str, quantizer: ModelQuantizer, others: dict[str, ModelQuantizer]
    ) -> tuple[str, str, Recovery | None]:
        """Quantize and write as `quantized` does; by what others there are where they are better, or it cannot be.

        Returns:
            The preset that it was, and what `quantized` does.
        """
        if others:
            quantizer.settings = replace(quantizer.settings, tries_advice=False)  # of what is lost, the others are next
        try:
            searching = replace(self, recovery=None) if name == CPU_DYNAMIC else self
            written, found = searching.quantized(quantizer, others)
            specs = None if found is None else found.settings.specs
            if specs is not None and specs.weights_apart and others:
                name = CPU_WEIGHTS if specs.weights_only else CPU_DYNAMIC
            return name, written, found
        except (SlowerThanFloatError, NothingToQuantizeError, DamageError) as error:
            # Weights alone lose least in spectra, and where all is in bodies, which are not timed, they are not slower.
            if not others:
                raise
            why = error
        if CPU_DYNAMIC in others and isinstance(why, SlowerThanFloatError):
            logger.info("%s Inputs are quantized while the model runs.", why)
            return self.best_of(CPU_DYNAMIC, others[CPU_DYNAMIC], {CPU_WEIGHTS: others[CPU_WEIGHTS]})
        weights = others[CPU_WEIGHTS]
        if weights is quantizer:
            return self._decoded_once(weights, why)
        logger.info("%s Weights alone are stored as integers.", why)
        try:
            return CPU_WEIGHTS, *self.quantized(weights)
        except SlowerThanFloatError as error:
            slower = error
        return self._decoded_once(weights, slower)

    def _decoded_once(self, weights: ModelQuantizer, why: QuarkError) -> tuple[str, str, Recovery | None]:
        """Quantize and write weights alone, those that are decoded when the file is loaded.

        Args:
            weights: Quantizer of weights alone.
            why: The reason why it does not write all of them; raised where fewer would not help.
        """
        if not isinstance(why, SlowerThanFloatError):
            raise why
        logger.info("%s Only weights that are decoded when the file is loaded are stored as integers.", why)
        weights.settings = _decoded_once(weights.settings)
        try:
            return CPU_WEIGHTS, *self.quantized(weights)
        except NothingToQuantizeError:
            raise why from None

    def quantized(
        self, quantizer: ModelQuantizer, others: Mapping[str, ModelQuantizer] | None = None
    ) -> tuple[str, Recovery | None]:
        """Quantize and write; what the last line says of the best that a recovery found, and what it was."""
        if isinstance(self.reader, PathDataReader):
            self.reader.rewind()
        if self.recovery is None:
            quantizer.quantize(self.model, self.output, self.reader)
            return "", None
        # The best may have other types than the name of the config says, and nodes in float.
        others = others or {}
        # Which is worth its loss, times say.
        timed = others.get(CPU_DYNAMIC) if quantizer.settings.measurement.enabled else None
        weights = others.get(CPU_WEIGHTS)
        types, found = self.recovery.run(quantizer, self.model, self.output, self.reader, weights, timed)
        return f"; {types}", found


def run_file(job: FileJob) -> FileResult:
    """Quantize an ONNX file, and write the result; without a configuration for this CPU.

    Raises:
        QuarkError: What is asked for does not go together, or does not fit the model; what the flow raises.
    """
    request, reader = job.request, _calibration_data(job)
    recovery = _asked_recovery(request)
    if job.choice is not None:
        recovery = recovery or recovery_of(job.choice.effort, reader is not None)
    timing = Timing(request.measure, request.profile)
    check_file(request.output, request.force)
    name, target, start, before = job.config, job.target, time.perf_counter(), file_bytes(request.model)
    if name is None:
        target = target or CPU_TARGET
        name = default_config(reader is not None, target, request.prefer)
        quick = reader is not None and (job.choice is None or job.choice.effort != FAST)
        # Without a configuration kernels are timed, and where there are data a quick recovery is run.
        recovery, timing = recovery or (QUICK if quick else None), timing.by_default(target)
    timing, recovery = _preferring(request.prefer or BETWEEN, reader is not None, timing, recovery)
    first = _quantizer(request, name, target, timing)
    others = {} if job.config is not None else _instead_of(first, request, name, target, timing)
    if request.statistics and first.settings.specs.weights_apart:
        raise ConfigError(f"--statistics: with {name} no ranges of activations are calibrated. Possible: without.")
    name, written, found = _Writing(request.model, request.output, reader, recovery).best_of(name, first, others)
    made, seconds = Path(request.output), time.perf_counter() - start
    told = _carried_out(request, reader)
    return FileResult(made, name, written, before, file_bytes(made), seconds, reader, found, told)


def _instead_of(
    first: ModelQuantizer, request: FileRequest, name: str, target: str | None, timing: Timing
) -> dict[str, ModelQuantizer]:
    """The quantizers that come after one that nobody asked for by name; it is among them where it is the last."""
    untimed = replace(timing, profile=None)
    names = (CPU_DYNAMIC, CPU_WEIGHTS) if name == CPU else (CPU_WEIGHTS,)
    return {other: first if other == name else _quantizer(request, other, target, untimed) for other in names}


def _preferring(
    prefer: str, has_data: bool, timing: Timing, recovery: Recovering | None
) -> tuple[Timing, Recovering | None]:
    """The times that are taken, and the search, by what the user prefers: with data the search chooses.

    Raises:
        ConfigError: There is nothing to choose from.
    """
    if prefer == BETWEEN:
        return timing, recovery
    if not has_data:
        return (replace(timing, measure=False, whole_file=False) if prefer == SIZE else timing), recovery
    if recovery is None or not timing.measure:
        missing = "--effort fast searches for no other file" if recovery is None else "kernels are not measured"
        raise ConfigError(f"--prefer chooses by measured times and held-out samples, and {missing}.")
    return timing, replace(recovery, prefer=prefer)


def _quantizer(request: FileRequest, name: str, target: str | None, timing: Timing) -> ModelQuantizer:
    """The quantizer of a configuration, with what the request says beside it."""
    quantizer, algorithms = ModelQuantizer(named_config(name)), onnx_algorithms(request.algorithm)
    settings = lower(quantizer.config, tuple(algorithms)) if algorithms else quantizer.settings
    specs, qdq, calibration = settings.specs, settings.qdq, settings.calibration
    quantizer.settings = replace(
        settings,
        specs=replace(specs, exclude=(*specs.exclude, *map(as_scope, request.exclude or ()))),
        qdq=replace(qdq, target=target or qdq.target, target_given=qdq.target_given or target is not None),
        calibration=replace(
            calibration,
            samples=calibration.samples if request.samples is None else request.samples,
            statistics=str(request.statistics) if request.statistics else calibration.statistics,
        ),
        measurement=timing.apply(settings.measurement),
        least_sqnr=None if request.allow_damage else LEAST,
        allow_noop=settings.allow_noop if request.allow_noop is None else request.allow_noop,
        overwrite=request.force,
    )
    return quantizer


def _decoded_once(settings: Settings) -> Settings:
    """Settings of weights alone without the tables, whose rows are decoded in each run.

    What is left runs the kernels of the float model: there is nothing to time.
    """
    by_type = (*settings.specs.by_type, (("Gather",), None))
    return replace(
        settings,
        specs=replace(settings.specs, by_type=by_type),
        measurement=replace(settings.measurement, enabled=False, whole_file=False),
    )


def default_config(has_data: bool, target: str, prefer: str | None = None) -> str:
    """The preset for a target with or without data, by what is preferred.

    Raises:
        ConfigError: The target has a choice of presets, or none by preference; there is no such preference.
    """
    check_preference(prefer or BETWEEN)
    if not TARGETS[target].fuses:
        raise ConfigError(
            f"Missing option --config, which --target {target} needs: A8W8, XINT8, A16W8, BF16 ... "
            f"Without it, quantization is for ONNX Runtime on a CPU (--target {CPU_TARGET})."
        )
    if target == "openvino":
        if prefer is not None:
            raise ConfigError("--prefer chooses between files for ONNX Runtime on a CPU, not for --target openvino.")
        return "INT8_OPENVINO"
    if has_data:
        return CPU
    # Weights alone lose less than inputs that are quantized as they come.
    return CPU_WEIGHTS if prefer in (ACCURACY, SIZE) else CPU_DYNAMIC


def named_config(name: str) -> Any:
    """The configuration of a preset: "A8W8", or the same as "A8W8_QCONFIG". Raises ConfigError naming the nearest."""
    return QROWS[name].make(QConfig) if name in QROWS else Config(get_default_config(name))


class DescribesData(Protocol):
    """A request that says how the data of an ONNX file are read."""

    @property
    def model(self) -> Path:
        """The file."""

    @property
    def batch_size(self) -> int | None:
        """Rows of the data in a sample."""

    @property
    def mean(self) -> str | None:
        """Of images, as it was written."""

    @property
    def std(self) -> str | None:
        """Of images, as it was written."""

    @property
    def pixel_max(self) -> int | None:
        """Of images: the value of white before mean and std."""

    @property
    def colours(self) -> str | None:
        """Of images: their order."""

    @property
    def resize(self) -> str | None:
        """How images get the size of the input."""


def reader_of(request: DescribesData, data: Path) -> PathDataReader:
    """The samples of a folder or file."""
    mean, std = numbers("--mean", request.mean), numbers("--std", request.std)
    return PathDataReader(
        request.model, data, batch_size=request.batch_size,
        mean=mean, std=std, resize=request.resize, colours=request.colours, pixel_max=request.pixel_max,
    )  # fmt: skip


def _carried_out(request: FileRequest, reader: Any) -> FileRequest:
    """A request that says by itself how images were read, which a file beside the model may have said."""
    read = reader.preprocessing if isinstance(reader, PathDataReader) else None
    if read is None:
        return request
    said: dict[str, Any] = read.as_options
    return replace(request, **said, pixel_max=None, said=(request.said | {*said}) - {"pixel_max"})


def _calibration_data(job: FileJob) -> Any:
    """The data of a job, or their reader; None without any. Raises ConfigError for options that then say nothing."""
    request = job.request
    if job.data is not None:
        # Where no configuration is given, a second one may read the same data, and an iterator is read once.
        return job.data if job.config is not None else Samples(job.data, model_inputs(request.model))
    if request.calib is not None:
        return reader_of(request, request.calib)
    describing = {"--samples": request.samples, "--batch-size": request.batch_size}
    images: dict[str, Any] = {"--mean": request.mean, "--std": request.std, "--resize": request.resize}
    images |= {"--colours": request.colours, "--pixel-max": request.pixel_max}
    for flag, value in (describing | images).items():
        if value is not None:
            raise ConfigError(f"{flag} describes the data, but none are given. Possible: --calib.")
    return None


def numbers(flag: str, text: str | None) -> list[float] | None:
    """The numbers of "0.4,0.5,0.6". Raises ConfigError naming the option."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} takes one number or one for each colour, as in 0.4,0.5,0.6; got {text!r}.") from None
