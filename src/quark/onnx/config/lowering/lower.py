"""Lowering: QConfig, or the legacy Config, to Settings. Pure functions; nothing after them reads a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quark.core.observers.entropy import BINS
from quark.core.spec import LayerSpec, ScaleType
from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig
from quark.onnx.config.config import Config, QConfig, QuantizationConfig
from quark.onnx.config.extra_options import (
    NPU_CONVERSIONS,
    NPU_CONVERSIONS_ON_REQUEST,
    NPU_RULES,
    check_options,
    refuse_unsupported,
    value_of,
)
from quark.onnx.config.lowering.algorithms import with_preference
from quark.onnx.config.lowering.passes import lower_passes
from quark.onnx.config.lowering.qdq import lower_qdq
from quark.onnx.config.lowering.request import Request, from_legacy, from_qconfig
from quark.onnx.config.lowering.rescaling import lower_rescaling
from quark.onnx.config.lowering.shapeshifter import expand
from quark.onnx.config.lowering.specs import lower_layer, lower_specs
from quark.onnx.config.settings import CalibrationSettings, MeasurementSettings, NPUSettings, Settings
from quark.onnx_ops.custom_libraries import find_libraries


def lower(config: QConfig | Config | QuantizationConfig, algorithms: Sequence[AlgoConfig] = ()) -> Settings:
    """The settings of a config, which stays as it is.

    Args:
        config: The config.
        algorithms: Algorithms to run after its own.

    Raises:
        ConfigError: it is no config, or fields contradict each other.
        NotSupportedError: an option or a type that this version does not have.
    """
    request = _request(config)
    options, prepared = expand(request.options)
    check_options(options, "ShapeShifterYaml")
    request = replace(request, options=options)
    asked = (*request.algorithms, *algorithms)
    request = replace(request, algorithms=tuple(with_preference(each, request.options) for each in asked))
    refuse_unsupported(request.options)
    layer, int32_bias = lower_layer(request)
    libraries = value_of(request.options, "UserCustomOpLibPath")
    specs = lower_specs(request, layer, int32_bias)
    equalization, correct_biases = lower_rescaling(request, specs)
    return Settings(
        specs=specs,
        passes=lower_passes(request),
        qdq=lower_qdq(request, layer),
        calibration=_lower_calibration(request.options),
        npu=_lower_npu(request, layer),
        measurement=_lower_measurement(request.options),
        equalization=equalization,
        equalize_if_better=equalization is not None,
        algorithms=request.algorithms,
        correct_biases=correct_biases,
        allow_noop=value_of(request.options, "AllowNoop"),
        external_data=request.external_data,
        custom_libraries=find_libraries(libraries) if libraries else (),
        crypto=value_of(request.options, "CryptoMode"),
        encrypt=value_of(request.options, "EncryptionAlgorithm") is not None,
        metrics=value_of(request.options, "EvalMetrics"),
        metrics_data=value_of(request.options, "EvalDataReader"),
        prepared_file=prepared,
        value_infos=value_of(request.options, "FillAllValueInfo"),
    )


def _request(config: QConfig | Config | QuantizationConfig) -> Request:
    if isinstance(config, QConfig):
        return from_qconfig(config)
    if isinstance(config, Config):
        config = config.global_quant_config
    if isinstance(config, QuantizationConfig):
        return from_legacy(config)
    raise ConfigError(f"Expected a QConfig or a Config, got {config!r} ({type(config).__name__}).")


def _lower_calibration(options: Mapping[str, Any]) -> CalibrationSettings:
    """How the ranges of activations are found.

    Raises:
        ConfigError: An option is out of range, or of another form.
    """
    percentile = float(value_of(options, "Percentile"))
    if not 50 < percentile <= 100:
        raise ConfigError(f"Percentile={percentile}: it must be over 50 and at most 100.")
    samples: int | None = value_of(options, "CalibDataSize")
    if samples is not None and samples < 1:
        raise ConfigError(f"CalibDataSize={samples}: at least one sample is needed.")
    return CalibrationSettings(
        samples=samples,
        statistics=value_of(options, "Statistics"),
        range_file=value_of(options, "SaveAndRestore") or value_of(options, "TensorsRangeFile"),
        figures=value_of(options, "SaveTensorHistFig"),
        percentile=percentile,
        percentile_candidates=tuple(value_of(options, "PercentileCandidates")),
        percentile_metric=value_of(options, "LWPMetric"),
        symmetric_range=value_of(options, "CalibTensorRangeSymmetric"),
        entropy_levels=_levels(options),
        random_data=value_of(options, "UseRandomData"),
        random_shapes=_per_input(options, "RandomDataReaderInputShape"),
        random_ranges=_per_input(options, "RandomDataReaderInputDataRange"),
        providers=tuple(value_of(options, "ExecutionProviders")),
    )


def _levels(options: Mapping[str, Any]) -> int | None:
    """NumQuantizedBins. Raises ConfigError."""
    levels: int | None = value_of(options, "NumQuantizedBins")
    if levels is not None and not 2 <= levels <= BINS:
        raise ConfigError(f"NumQuantizedBins={levels}: it must be from 2 to {BINS}.")
    return levels


def _per_input(options: Mapping[str, Any], name: str) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """(input name, numbers) of a dict. Raises ConfigError."""
    given: Mapping[str, Any] = value_of(options, name) or {}
    for key, numbers in given.items():
        if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, (int, float)) for number in numbers):
            raise ConfigError(f"{name}: {key!r} needs a list of numbers, got {numbers!r}.")
    return tuple((key, tuple(numbers)) for key, numbers in given.items())


def _lower_npu(request: Request, layer: LayerSpec) -> NPUSettings:
    """The NPU's operators and rules.

    Args:
        request: What the config asks for.
        layer: The specs of every node: the XINT8 path is one of power-of-two scales.

    Raises:
        ConfigError: An option is out of range.
    """
    options = request.options
    rounds = value_of(options, "MaxLoopNum")
    if rounds < 1:
        raise ConfigError(f"MaxLoopNum={rounds}: at least one round is needed.")
    specs = [spec for spec in (layer.weight, layer.input) if spec is not None]
    positions = request.npu_cnn and all(spec.scale_type is ScaleType.pof2 for spec in specs)
    simulated = positions and value_of(options, "SimulateDPU")
    conversions = NPU_CONVERSIONS | NPU_CONVERSIONS_ON_REQUEST
    given = {name: value_of(options, option) for name, (option, _) in conversions.items()}
    rules = tuple(name for name, option in NPU_RULES.items() if value_of(options, option))
    return NPUSettings(
        conversions=tuple(name for name, value in given.items() if (simulated if value is None else value)),
        rules=rules if positions else (),
        rounds=rounds,
        check=positions and value_of(options, "NPULimitationCheck"),
    )


def _lower_measurement(options: Mapping[str, Any]) -> MeasurementSettings:
    """Whether kernels are timed, and where their times lie. Raises ConfigError for a path or number that is none."""
    given: bool | str = value_of(options, "MeasurePlacement")
    threads: int = value_of(options, "MeasureThreads")
    if given == "":
        raise ConfigError("MeasurePlacement='' is no path of a profile. Possible: True, for the user's cache folder.")
    if threads < 1:
        raise ConfigError(f"MeasureThreads={threads}: at least one thread is needed.")
    return MeasurementSettings(bool(given), given if isinstance(given, str) else None, threads)
