"""The door of the ONNX flow: ModelQuantizer, and quantize_static and quantize_dynamic, one call each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from quark.base.checked import snapshot
from quark.base.files import check_apart, check_file
from quark.base.log import logger
from quark.core.metrics import Metric
from quark.core.names.patterns import unmatched_as_documented
from quark.errors import CalibrationError, ConfigError, DamageError, NotSupportedError
from quark.onnx.calibration.calibrate import repeatable
from quark.onnx.calibration.data.inputs import file_bytes, model_inputs
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.calibration.data.padding import without_padding
from quark.onnx.calibration.data.path_reader import PathDataReader
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.config import Config, QConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.preset_rows import QROWS
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import Settings
from quark.onnx.crypto_mode import check_crypto, discreet, write_encrypted
from quark.onnx.graph.model_file import checked_proto, load
from quark.onnx.graph.sessions import require_loads
from quark.onnx.placement.kept_codes import refuse_finished
from quark.onnx_ops.custom_libraries import custom_libraries
from quark.onnx_ops.saving import PROTOBUF_LIMIT, files_read, model_files, save, weight_bytes

# The flow and its searches are imported by the functions that run them: they are half of what this takes to load.
if TYPE_CHECKING:
    from quark.onnx.search.evaluator import OutputMetrics
    from quark.onnx.search.latency.noise_sample import NoiseSample
    from quark.onnx.search.lost_outputs.damage import SpreadSamples
    from quark.onnx.search.lost_outputs.verdict import Damage
    from quark.onnx.search.recovery.search import Recovery

__all__ = ["ModelQuantizer"]


Model = str | os.PathLike[str] | onnx.ModelProto


@dataclass(frozen=True)
class _Source:
    """The model that is quantized, as it was given.

    Attributes:
        given: By the user.
        model: The float model as it was loaded, which nothing changes.
        kept: Some of its calibration samples, where there are any.
        start: When its quantization began, by the clock of this process.
        settings: Those that are left to do with the model as it was loaded. Once it is quantized, they say whether it
            is equalized.
    """

    given: Model
    model: ir.Model
    kept: SpreadSamples | None
    start: float
    settings: Settings

    @property
    def bytes(self) -> int:
        """Of the message, or of the files."""
        if isinstance(self.given, onnx.ModelProto):
            return self.given.ByteSize()
        return sum(file.stat().st_size for file in (Path(self.given), *files_read(self.model)))

    @cached_property
    def noise(self) -> NoiseSample | None:
        """A sample of noise on which the float model runs, with its session; None where it runs on none."""
        from quark.onnx.search.latency.noise_sample import noise_sample

        return noise_sample(self.model)


class ModelQuantizer:
    """Quantizes an ONNX model.

    Args:
        config: A `QConfig`, or the older `Config`. It is copied: the quantizer never changes it, and later changes of
            yours have no effect. Or a name that `quark schemes` lists for ONNX files, such as "A8W8".

    Attributes:
        metrics: How close the outputs of the last model are to those of the float model, if `EvalMetrics` asks for it;
            else None.
        damage: How much the outputs of the last model lost on a few calibration samples; None without samples.

    Raises:
        ConfigError: The config is of another type, a name is unknown, or options contradict each other.

    Example:
        >>> import numpy as np
        >>> samples = {"image": np.random.default_rng(0).random((16, 1, 8, 8), dtype=np.float32)}
        >>> quantizer = ModelQuantizer("A8W8")
        >>> quantizer.quantize_model("examples/models/digits_cnn/model.onnx", "int8.onnx", samples)
    """

    def __init__(self, config: Any) -> None:
        if isinstance(config, str):
            config = QROWS[config].make(QConfig) if config in QROWS else Config(get_default_config(config))
        if not isinstance(config, (QConfig, Config)):
            raise ConfigError(
                f"ModelQuantizer takes a QConfig, a Config or the name of a configuration, got {type(config).__name__}."
            )
        self.config = snapshot(config)
        self.settings = lower(self.config)
        self.metrics: OutputMetrics | None = None
        self.damage: Damage | None = None

    def quantize_model(
        self,
        model_input: Model,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
        algorithms: Sequence[Any] | None = None,
    ) -> onnx.ModelProto | None:
        """Quantize a model, and write it or return it.

        Args:
            model_input: Path of the float model, or a ModelProto, which is not changed.
            model_output: Path of the file to write; None returns the model instead.
            calibration_data_reader: Calibration samples, for configs with static activations and for algorithms. Either
                an object with `get_next() -> dict | None`, or an iterable of dicts; a dict has one array for each input
                of the model, with its batch axis. If the model has one input, an iterable of arrays will do. Or one
                array, or a dict of arrays, with all samples along the first axis.
            calibration_data_path: Instead of a reader: path of a folder or a file of samples, as `PathDataReader` reads
                it.
            algorithms: Configs of algorithms that run after those of the config.

        Returns:
            The quantized model if `model_output` is None, or in crypto mode; else None.

        Raises:
            CalibrationError: Calibration data are missing, or do not fit the inputs of the model.
            FormatError: The model is not a valid ONNX model.
            NonFiniteError: A weight or an activation has NaN or infinity.
            QuarkError: Any other reason; its message says what to do. No file is written after an error.
        """
        with unmatched_as_documented():
            return self.quantize(model_input, model_output, calibration_data_reader, calibration_data_path, algorithms)

    def quantize(
        self,
        model_input: Model,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
        algorithms: Sequence[Any] | None = None,
    ) -> onnx.ModelProto | None:
        """Quantize as `quantize_model` does, where a scope of the config that matches no node is an error.

        Args:
            model_input, model_output, calibration_data_reader, calibration_data_path, algorithms: As there.

        Raises:
            ConfigError: As there, and for a name or a pattern that matches nothing.
        """
        start = own_time()
        from quark.onnx.evaluation.cpu_price import cpu_price, in_integers_unasked, saturating_layers
        from quark.onnx.flow.image_layout import with_channels_last
        from quark.onnx.search.lost_outputs.damage import SpreadSamples
        from quark.onnx.search.settle import check_algorithms, quantize_as_decided

        settings = lower(self.config, tuple(algorithms)) if algorithms else self.settings
        reader = _reader(model_input, calibration_data_reader, calibration_data_path)
        _check_outputs(model_input, model_output, settings, reader)
        check_algorithms(settings.algorithms)
        with custom_libraries(settings.custom_libraries):
            with discreet(settings):
                model = _load(model_input)
                settings, reader = with_channels_last(model, settings, reader)
                kept = reader = None if reader is None else SpreadSamples(reader, model)
                source = _Source(model_input, model.clone(), kept, start, settings)
                if settings.metrics:
                    reader = repeatable(reader, model, settings)
                outputs = None if kept is None else kept.outputs
                model, decided = quantize_as_decided(model, settings, reader, outputs)
                source = replace(source, settings=decided)
                self.metrics = _metrics(source.model, model, settings, reader) if settings.metrics else None
            notes = [note(model, settings) for note in (cpu_price, in_integers_unasked, saturating_layers)]
            written = self._write_result(model, model_output, source)
        if not settings.crypto:
            logger.info("Model quantization has been completed.")
            for note in filter(None, notes):
                logger.info(note)
        return written

    def recover(
        self,
        model_input: Model,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | None = None,
        *,
        budget: str | float | None = "10m",
        metric: str = "sqnr",
        target: float | None = None,
        quick: bool = False,
        allow_wider: bool = False,
        weights_alone: ModelQuantizer | None = None,
        without_samples: ModelQuantizer | None = None,
        prefer: str = "between",
    ) -> Recovery:
        """Quantize a model, and better it by other ranges and by algorithms as long as there is time.

        Every fourth sample is only measured on; a step is kept where the metric gains on these. The result is never
        worse by this measure than the config as it is.

        Args:
            model_input: As for `quantize_model`.
            model_output: Path to write; None returns the model in `Recovery.model`.
            calibration_data_reader, calibration_data_path: As for `quantize_model`.
            budget: Seconds, or text like "90s", "10m", "1h"; None for as long as it takes. When it ends, the best
                model so far is the result; an algorithm that runs ends at its next layer or forward.
            metric: "sqnr", "psnr", "cosine" or "l2", between the outputs of the float model and of the quantized one;
                of several outputs the worst counts.
            target: The value of the metric that is enough.
            quick: Try only the steps that gain most for their seconds, and without a target no more where the loss is
                seldom felt: from 30 dB ("sqnr") on, or 35 dB of scores. Fewer than four samples are then calibrated
                with and compared by; without a target the output of a softmax or a sigmoid is compared by its scores;
                seconds that other programs take do not count.
            allow_wider: Whether the model may have types of more bits than the config asks for (16 for 8, 8 for 4)
                where nothing else reaches the target.
            weights_alone: Quantizer of weights, which is tried where the best model keeps so little that tasks suffer:
                less than 25 dB, or 30 dB where the largest of many scores decides. It gets half of the budget in
                addition.
            without_samples: Quantizer that needs none: see `search/recovery/alternative.py`.
            prefer: "between", "speed", "accuracy" or "size": which of the two is written, the model made with samples
                or without (`search/recovery/preference.py`). With "accuracy" nodes stay in float whatever their time.

        Raises:
            CalibrationError: Fewer than four samples, or none.
            QuarkError: See its children; no file is written then.
        """
        start = own_time()
        from quark.onnx.evaluation.cpu_price import saturating_layers
        from quark.onnx.flow.image_layout import with_channels_last
        from quark.onnx.search.history import duration
        from quark.onnx.search.lost_outputs.damage import SpreadSamples
        from quark.onnx.search.recovery.alternative import Alternative
        from quark.onnx.search.recovery.preference import check_preference
        from quark.onnx.search.recovery.search import WeightsAlone, recover
        from quark.onnx.search.recovery.steps import QUICK_STEPS, STEPS

        check_preference(prefer)
        reader = _reader(model_input, calibration_data_reader, calibration_data_path)
        _check_outputs(model_input, model_output, self.settings, reader)
        seconds, measure = None if budget is None else duration(budget), Metric(metric)
        with custom_libraries(self.settings.custom_libraries):
            with discreet(self.settings):
                model = _load(model_input)
                settings, reader = with_channels_last(model, self.settings, reader)
                kept = None if reader is None else SpreadSamples(reader, model)
                source = _Source(model_input, model.clone(), kept, start, settings)
                data = repeatable(kept, model, settings)
                alternative = None
                if without_samples is not None:
                    alternative = Alternative(model.clone(), without_samples.settings, prefer)
                weights = None if weights_alone is None else WeightsAlone(model.clone(), weights_alone.settings)
                found, model = recover(
                    model, settings, data, measure, target, seconds, QUICK_STEPS if quick else STEPS,
                    quick=quick, allow_wider=allow_wider,
                    alternative=alternative, weights=weights, prefer=prefer,
                )  # fmt: skip
            note = saturating_layers(model, self.settings)
            found = replace(found, model=self._write_result(model, model_output, source))
        if note and not self.settings.crypto:
            logger.info(note)
        return found

    def _write_result(
        self, model: ir.Model, output: str | os.PathLike[str] | None, source: _Source
    ) -> onnx.ModelProto | None:
        """The model, checked; None where it went to a file in clear."""
        from quark.onnx.flow.flow import finish
        from quark.onnx.qdq.short_names import shorten_where_larger

        self.damage = None
        finish(model, self.settings)
        shorten_where_larger(model, source.bytes)
        if output is None:
            proto = checked_proto(model)
            if not self.settings.crypto:
                self._compare(source, proto)
            return proto
        if self.settings.crypto:
            proto = checked_proto(model)
            write_encrypted(proto, output, self.settings)
            return proto

        def look(file: Path) -> None:
            self._compare(source, file)
            check_file(output, self.settings.overwrite)

        save(model, output, self.settings.external_data, look=look)
        return None

    def _compare(self, source: _Source, quantized: onnx.ModelProto | Path) -> None:
        """Find what the outputs lost.

        Raises:
            DamageError: That is more than the settings allow.
            SlowerThanFloatError: It is slower than the float model, where the settings ask for that.
            FormatError: ONNX Runtime does not load what was made of a model that it loads.
        """
        from quark.onnx.search.history import TimeBudget
        from quark.onnx.search.latency.whole_file import refuse_slower
        from quark.onnx.search.lost_outputs.advice import LEAST_SECONDS, SHARE, refuse_damage
        from quark.onnx.search.lost_outputs.damage import MADE, damage
        from quark.onnx.search.lost_outputs.trials import Trials

        model, kept = source.model, source.kept
        feeds = [] if kept is None else kept.feeds()
        if kept is not None:
            self.damage = damage(model, quantized, feeds, self.settings, kept)
        # What was compared was loaded for it.
        if self.damage is None and (isinstance(quantized, Path) or quantized.ByteSize() < PROTOBUF_LIMIT):
            with suppress(NotSupportedError):  # of operators that it does not know it cannot say
                require_loads(quantized, MADE)
        if kept is not None:
            took = own_time() - source.start
            budget = TimeBudget.of(max(LEAST_SECONDS, SHARE * took), own_time)
            tries = self.settings.tries_advice
            trials = Trials(model, source.settings, feeds, budget, kept, seconds=took) if tries else None
            refuse_damage(self.damage, self.settings.least_sqnr, model, quantized, feeds, trials, budget)
        elif self.settings.least_sqnr is not None:
            _refuse_lost_on_noise(source, quantized, self.settings)
        if self.settings.measurement.whole_file:
            after = quantized.ByteSize() if isinstance(quantized, onnx.ModelProto) else file_bytes(quantized)
            noise = None if feeds else source.noise
            refuse_slower(model, quantized, feeds, self.settings, (source.bytes, after), noise)


def _refuse_lost_on_noise(source: _Source, quantized: onnx.ModelProto | Path, settings: Settings) -> None:
    """Say that little is left of outputs where only noise tells.

    Raises:
        DamageError: They are lost, and others are next to be tried.
    """
    from quark.onnx.search.lost_outputs.on_noise import little_on_noise

    sample = None if weight_bytes(source.model) >= PROTOBUF_LIMIT else source.noise
    left = little_on_noise(source.model, quantized, sample)
    if left is not None and left.lost and not settings.tries_advice:
        raise DamageError(f"Without samples: {left.words}.")
    if left is not None:
        logger.warning(
            "There are no samples, and on noise the quantized model %s its outputs: %s. Noise is not what it is for: "
            "look with quark evaluate at data of yours, or give samples (--calib), on which it is measured.",
            "has lost" if left.lost else "keeps little of",
            left.words,
        )


def _load(given: Model) -> ir.Model:
    """Read a model, and log what of it is quantized already. Raises ConfigError where that is all of it."""
    model = load(given)
    if (kept := refuse_finished(model)) is not None:
        logger.info(kept)
    return model


def _reader(model: Any, reader: Any, path: str | None) -> Any:
    """The calibration data that was given in one of two ways."""
    if path is None:
        return reader
    if reader is not None:
        raise ConfigError("Give a calibration_data_reader or a calibration_data_path, not both.")
    return PathDataReader(model, path)


def _metrics(reference: ir.Model, model: ir.Model, settings: Settings, reader: Any) -> OutputMetrics:
    """Compare a quantized model with the float model. Raises CalibrationError where there is no data."""
    from quark.onnx.search.evaluator import output_metrics

    data = reader
    if settings.metrics_data is not None:
        data = Samples(without_padding(settings.metrics_data, reference), model_inputs(reference))
    if data is None or not len(data):
        raise CalibrationError("EvalMetrics=True needs data. Possible: EvalDataReader, or a calibration_data_reader.")
    found = output_metrics(reference, model, data, settings)
    logger.info(f"Quantized against float: {found}.")
    return found


def _check_outputs(source: Any, output: Any, settings: Settings, reader: Any) -> None:
    """Raise OutputError for what cannot be written, and OutputExistsError where something that is read would be."""
    if settings.crypto:
        check_crypto(source, output, settings)
        return
    statistics, ranges = settings.calibration.statistics, settings.calibration.range_file
    profile = settings.measurement.profile
    read = [*model_files(source), *getattr(reader, "files", ())]
    if settings.prepared_file is not None:
        check_file(settings.prepared_file, overwrite=True)
        check_apart(settings.prepared_file, *read, statistics, ranges, profile, output)
    if output is not None:
        check_file(output, overwrite=True)
        check_apart(output, *read, statistics, ranges, profile)
    for file in (statistics, ranges, profile):
        if file and not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises for a name too long
            check_file(file, overwrite=True)
        if file:
            check_apart(file, *read)
    if ranges and statistics:
        check_apart(ranges, statistics)
    if profile:
        check_apart(profile, statistics, ranges)
