"""Lowering: QConfig, or the legacy Config, to Settings. Pure functions; nothing after them reads a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig
from quark.onnx.config.config import Config, QConfig, QuantizationConfig
from quark.onnx.config.extra_options import check_options, refuse_unsupported, value_of
from quark.onnx.config.lowering.algorithms import with_preference
from quark.onnx.config.lowering.calibration import lower_calibration
from quark.onnx.config.lowering.measurement import lower_measurement
from quark.onnx.config.lowering.npu import lower_npu
from quark.onnx.config.lowering.passes import lower_passes
from quark.onnx.config.lowering.qdq import lower_qdq
from quark.onnx.config.lowering.request import Request, from_legacy, from_qconfig
from quark.onnx.config.lowering.rescaling import lower_rescaling
from quark.onnx.config.lowering.shapeshifter import expand
from quark.onnx.config.lowering.specs import lower_layer, lower_specs
from quark.onnx.config.settings import Settings
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
        calibration=lower_calibration(request.options),
        npu=lower_npu(request, layer),
        measurement=lower_measurement(request.options),
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
