"""Lowering: QConfig, or the legacy Config, to Settings. Pure functions; nothing after them reads a config.

The named configurations do two things unasked: equalization, and the correction of biases. Both are for one scale a
weight, which is too coarse for the small channels, whose rounding errors then have a mean. `include_cle=True` is kept
only where calibration data say that it pays. A CLEConfig, or a CLE option that differs from its default, and a
BiasCorrectionConfig ask for them by name: they are among the algorithms.

SkipPreprocess leaves out every pass that no option asks for by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from quark.core.granularity import PerTensor
from quark.core.observers.entropy import BINS
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig, CLEConfig
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
from quark.onnx.config.lowering.request import Request, from_legacy, from_qconfig
from quark.onnx.config.lowering.shapeshifter import expand
from quark.onnx.config.lowering.solved_weights import nbits_params
from quark.onnx.config.lowering.specs import lower_layer, lower_specs
from quark.onnx.config.lowering.tensors import is_integer
from quark.onnx.config.settings import (
    CalibrationSettings,
    MeasurementSettings,
    NPUSettings,
    QDQSettings,
    Settings,
    SpecSettings,
)
from quark.onnx.operators import ACTIVATIONS, FUSE_ACTIVATIONS, RULES
from quark.onnx.passes import PASSES
from quark.onnx.passes.convert_float import KEEP_IO_TYPES, convert_fp16_to_fp32
from quark.onnx.passes.simplify import simplify
from quark.onnx.passes.slim import check_slim_options
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
    equalization = _equalization(request, specs)
    # A QConfig names its algorithms: only under powers of two its biases are corrected without a word.
    unasked = value_of(request.options, "BiasCorrection") is None and not value_of(request.options, "QuantizeFP16")
    npu, legacy = request.npu_cnn and _has_power_of_two(specs.layer), request.legacy and _coarse(specs.layer)
    return Settings(
        specs=specs,
        passes=_lower_passes(request),
        qdq=_lower_qdq(request, layer),
        calibration=_lower_calibration(request.options),
        npu=_lower_npu(request, layer),
        measurement=_lower_measurement(request.options),
        equalization=equalization,
        equalize_if_better=equalization is not None,
        algorithms=request.algorithms,
        correct_biases=unasked and (npu or legacy),
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
    levels: int | None = value_of(options, "NumQuantizedBins")
    if levels is not None and not 2 <= levels <= BINS:
        raise ConfigError(f"NumQuantizedBins={levels}: it must be from 2 to {BINS}.")
    return CalibrationSettings(
        samples=samples,
        statistics=value_of(options, "Statistics"),
        range_file=value_of(options, "SaveAndRestore") or value_of(options, "TensorsRangeFile"),
        figures=value_of(options, "SaveTensorHistFig"),
        percentile=percentile,
        percentile_candidates=tuple(value_of(options, "PercentileCandidates")),
        percentile_metric=value_of(options, "LWPMetric"),
        symmetric_range=value_of(options, "CalibTensorRangeSymmetric"),
        entropy_levels=levels,
        random_data=value_of(options, "UseRandomData"),
        random_shapes=_per_input(options, "RandomDataReaderInputShape"),
        random_ranges=_per_input(options, "RandomDataReaderInputDataRange"),
        providers=tuple(value_of(options, "ExecutionProviders")),
    )


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
    """Return whether kernels are timed, and where their times lie. Raises ConfigError for a wrong path or number."""
    given: bool | str = value_of(options, "MeasurePlacement")
    threads: int = value_of(options, "MeasureThreads")
    if given == "":
        raise ConfigError("MeasurePlacement='' is no path of a profile. Possible: True, for the user's cache folder.")
    if threads < 1:
        raise ConfigError(f"MeasureThreads={threads}: at least one thread is needed.")
    return MeasurementSettings(bool(given), given if isinstance(given, str) else None, threads)


# Q/DQ -----------------------------------------------------------------------------------------------------------------


def _lower_qdq(request: Request, layer: LayerSpec) -> QDQSettings:
    """Where Q/DQ stand, and how they are written.

    Args:
        request: What the config asks for.
        layer: The specs of every node.

    Raises:
        ConfigError: An option has no meaning.
    """
    options = request.options
    # Op types whose inputs and output share one scale: by their options, else all in the XINT8 path.
    given = {name: value_of(options, f"Align{name}") for name in ("Concat", "Pool", "Pad", "Slice")}
    align = tuple(name for name, value in given.items() if (request.npu_cnn if value is None else value))
    # Q/DQ of com.microsoft: of integers in the extended formats, unless an option says otherwise.
    contrib: bool | None = value_of(options, "UseQDQContribOps")
    if contrib is None:
        specs = (layer.weight, layer.input)
        contrib = request.extended and any(spec is not None and spec.has_zero_point for spec in specs)
    return QDQSettings(
        target=request.target.name,
        target_given=value_of(options, "Target") is not None,
        fused=_fused(options),
        float_output_types=tuple(value_of(options, "OpTypesToExcludeOutputQuantization")),
        float_outputs=tuple(value_of(options, "NodesToExcludeOutputQuantization")),
        fold_relu=value_of(options, "FoldRelu"),
        align=align,
        force_pass_through=value_of(options, "ForceQuantizeNoInputCheck"),
        dedicated_pairs=value_of(options, "DedicatedQDQPair"),
        dedicated_dequantize=value_of(options, "DedicateDQNode"),
        dual_pairs=value_of(options, "EnableDualQuantNodePairs"),
        # Float and block weights are float values after a Q/DQ pair in any case.
        float_weights=is_integer(request.weight) and bool(value_of(options, "AddQDQPairToWeight")),
        int16_bias=value_of(options, "Int16Bias"),
        fit_int32_bias=value_of(options, "AdjustWeightScaleForInt32Bias"),
        matmul_nbits=nbits_params(options)["AccuracyLevel"] if request.matmul_nbits else None,
        quantize_fp16=value_of(options, "QuantizeFP16") and not _computes_in_float32(options),
        contrib_domain=contrib,
        cast_bfloat16=value_of(options, "BF16QDQToCast"),
        clip_bfloat16=value_of(options, "BF16WithClip"),
    )


def _fused(options: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """(op type, op type of its only reader) with nothing quantized between."""
    activations = [name for name in (*ACTIVATIONS, "Gelu") if value_of(options, f"RemoveQDQConv{name}")]
    pairs = set(product(FUSE_ACTIVATIONS, activations))
    if value_of(options, "RemoveQDQMulAdd"):
        pairs.add(("Mul", "Add"))
    if value_of(options, "RemoveQDQInstanceNorm"):
        pairs |= {("InstanceNormalization", name) for name in ("Relu", "LeakyRelu", "PRelu")}
    for pair in value_of(options, "RemoveQDQBetweenOps") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(name in RULES for name in pair):
            raise ConfigError(f"RemoveQDQBetweenOps: expected pairs of op types with a rule, got {pair!r}.")
        pairs.add((pair[0], pair[1]))
    return frozenset(pairs)


# Rescaling ------------------------------------------------------------------------------------------------------------


_POWER_OF_TWO_STEPS = 2
"""Unless CLESteps is given: a layer between two others is in two pairs, and the second undoes some of the first. Float
scales, which fit any range, gained nothing by more than the documented step."""


def _equalization(request: Request, specs: SpecSettings) -> CLEConfig | None:
    """The equalization that the config includes, unless it asks for one by name."""
    named = any(isinstance(algorithm, CLEConfig) for algorithm in request.algorithms)
    # Ranges that are given are those of the model as it is: equalized, it has others.
    given_ranges = any(each.scale is not None or each.low is not None for _, each in specs.overrides)
    if not request.include_cle or named or given_ranges or value_of(request.options, "QuantizeFP16"):
        return None
    if not _coarse(specs.layer):
        return None
    given = {key: request.options[key] for key in CLEConfig.keys.values() if key in request.options}
    steps = {"CLESteps": _POWER_OF_TWO_STEPS} if _has_power_of_two(specs.layer) else {}
    return CLEConfig.from_options({**steps, **given})


def _coarse(layer: LayerSpec) -> bool:
    """Return True where a weight has up to 8 bits and one scale, and so has what its layer reads."""
    weight, activation = layer.weight, layer.input
    if weight is None or activation is None:
        return False
    return weight.dtype.bits <= 8 and _one_scale(weight) and _one_scale(activation)


def _has_power_of_two(layer: LayerSpec) -> bool:
    return all(spec.scale_type is ScaleType.pof2 for spec in (layer.weight, layer.input) if spec is not None)


def _one_scale(spec: TensorSpec) -> bool:
    """Return True where a tensor has integer codes under one scale, which is known before the model runs."""
    return spec.has_zero_point and not spec.dynamic and isinstance(spec.granularity, PerTensor)


# Passes ---------------------------------------------------------------------------------------------------------------


def _lower_passes(request: Request) -> dict[str, object]:
    """Name of every pass -> its argument, True, or False or None to leave it out."""
    options = request.options
    casts = value_of(options, "BF16QDQToCast") or value_of(options, "EnableVaimlBF16")
    for_npu = request.npu_cnn or request.npu_transformer or (request.extended and not casts)
    arguments: dict[str, object] = {}
    for name, row in PASSES.items():
        value = options.get(row.option)
        if value is None:
            value = for_npu if row.for_npu else row.default
            if row.default_option:
                value = value_of(options, row.default_option)
            if value_of(options, "SkipPreprocess"):
                value = None
        arguments[name] = tuple(value) if isinstance(value, list) else value
    slim_options = value_of(options, "SimplifyModelOptions")
    check_slim_options(slim_options)
    if slim_options and arguments[simplify.__name__]:
        arguments[simplify.__name__] = dict(slim_options)
    if _computes_in_float32(options) or _float16_becomes_float32(request):
        arguments[convert_fp16_to_fp32.__name__] = KEEP_IO_TYPES
    return arguments


def _computes_in_float32(options: Mapping[str, Any]) -> bool:
    """Return True where a float16 model becomes float32 between its inputs and outputs. Raises ConfigError."""
    if not value_of(options, "UseFP32Scale"):
        return False
    if not value_of(options, "QuantizeFP16") or value_of(options, "ConvertFP16ToFP32"):
        raise ConfigError(
            "UseFP32Scale=True is for float16 models: it goes with QuantizeFP16=True, and keeps inputs and outputs "
            "float16, which ConvertFP16ToFP32=True does not."
        )
    return True


def _float16_becomes_float32(request: Request) -> bool:
    """Return True where a float16 model becomes float32 unasked, as the kernels of the target are of float32."""
    options = request.options
    given = any(value_of(options, name) for name in ("QuantizeFP16", "ConvertFP16ToFP32", "SkipPreprocess"))
    return bool(request.target.activations) and not given
