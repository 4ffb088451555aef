"""The extra options: one row each, but for those that ask for a graph pass, which are in the rows of passes/.

What a row does not say, `lowering/` does with the value.

    _obeyed    lowering turns the value into Settings
    _moot      any value is accepted: what it asks for is so in any case

One that is refused takes only its default: other values are not part of this version.
A default of None is decided by the other settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quark.core.names.registry import Registry
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.operators import ACTIVATIONS
from quark.onnx.passes import PASSES

Kind = tuple[type, ...]
BOOL: Kind = (bool,)
INT: Kind = (int,)
NUMBER: Kind = (int, float)
TEXT: Kind = (str,)
LIST: Kind = (list, tuple)
DICT: Kind = (dict,)
ANY: Kind = (object,)
KINDS: Mapping[type, Kind] = {bool: BOOL, int: INT, str: TEXT, list: LIST}


_PREFERENCES = ("accuracy", "speed", "resource_efficiency")


@dataclass(frozen=True)
class Option:
    """One extra option.

    Attributes:
        name: Its key.
        kind: Accepted Python types; None is one more where it is the default.
        default: What leaving it out means.
        meaning: What it does, or why other values than the default are refused.
        refused: Whether values other than the default are refused.
        choices: The texts that there are; empty for any.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    refused: bool = False
    choices: tuple[str, ...] = ()


OPTIONS: Registry[Option] = Registry("option")


def _obeyed(name: str, kind: Kind, default: Any, meaning: str, choices: tuple[str, ...] = ()) -> None:
    OPTIONS.register(name, Option(name, kind, default, meaning, choices=choices))


def _moot(name: str, kind: Kind, default: Any, meaning: str, choices: tuple[str, ...] = ()) -> None:
    OPTIONS.register(name, Option(name, kind, default, f"changes nothing: {meaning}", choices=choices))


# Pre-processing.
_obeyed("ShapeShifterYaml", TEXT, None, "the passes of a YAML file, or of xint8, a8w8, a16w8, bf16, bfp16; no others")
_obeyed("PreprocessYAML", TEXT, None, "older name of ShapeShifterYaml, which wins")
_obeyed("SkipPreprocess", BOOL, False, "leave the graph as it is, but for passes that an option asks for")
_obeyed("OptimizeModel", BOOL, True, "graph optimization: the default of FoldBatchNorm")
_obeyed(
    "SimplifyModelOptions", DICT, {}, "keywords of onnxslim.slim, which simplifies the model first; empty: it does not"
)
for _pass in PASSES.values():
    _by_others = _pass.for_npu or _pass.default_option
    _also = "; on by itself for NPUs and the extended formats" if _pass.for_npu else ""
    _obeyed(_pass.option, KINDS[_pass.kind], None if _by_others else _pass.default, _pass.meaning + _also)
_obeyed("FoldRelu", BOOL, False, "drop a Relu or Clip whose effect the quantized range already has")

# Targets.
_obeyed("OpTypesToQuantize", LIST, [], "op types that are quantized; empty: those with a rule")
_obeyed("NodesToQuantize", LIST, [], "only these nodes; empty: all")
_obeyed("NodesToExclude", LIST, [], "nodes that stay in float, beside those of exclude")
_obeyed("ExtraOpTypesToQuantize", LIST, [], "op types beside the default ones")
_obeyed("QuantizeAllOpTypes", BOOL, False, "every op type of the model, whatever OpTypesToQuantize says")
_obeyed("WeightsOnly", BOOL, False, "quantize weights, not activations")
_obeyed(
    "RefineWeightScales",
    BOOL,
    True,
    "weights only, or dynamic: scales of channels for weights that lose too much under one (an option of this package)",
)
_obeyed("MatMulConstBOnly", BOOL, None, "leave MatMul without a constant operand in float")
_obeyed(
    "EnableSubgraph",
    BOOL,
    None,
    "quantize the bodies of If, Loop and Scan too; by itself where no ranges are needed: weights only, or dynamic",
)
_obeyed("InputNodes", LIST, [], "nodes that quantization begins with: all before them stay in float")
_obeyed("OutputNodes", LIST, [], "nodes that quantization ends with: all after them stay in float")
_obeyed(
    "MeasurePlacement",
    (bool, str),
    False,
    "time kernels, and leave in float what is faster there; a path: of the profile (an option of this package)",
)
_obeyed("MeasureThreads", INT, 1, "threads of a timed operator (an option of this package)")
_obeyed(
    "Target",
    TEXT,
    None,
    "name of a target profile: npu, ort_x64, ort_arm64, openvino or generic (an option of this package)",
)

# Where Q/DQ stand.
_obeyed("AddQDQPairToWeight", BOOL, None, "store weights in float, read by a pair of Q/DQ, not as integers")
_obeyed("ForceQuantizeNoInputCheck", BOOL, False, "quantize data-movement ops even where their input is not")
_obeyed("DedicatedQDQPair", BOOL, False, "one Q/DQ pair for each reader of a tensor")
_obeyed("DedicateDQNode", BOOL, False, "one DequantizeLinear for each reader of a tensor")
_obeyed("EnableDualQuantNodePairs", BOOL, False, "two consecutive Q/DQ pairs on a tensor where two precisions meet")
_obeyed("OpTypesToExcludeOutputQuantization", LIST, [], "op types whose output is not quantized on their behalf")
_obeyed("NodesToExcludeOutputQuantization", LIST, [], "nodes whose output is not quantized on their behalf")
_obeyed("QDQOpTypePerChannelSupportToAxis", DICT, {}, "op type -> axis of the output channels of its weight")
for _name in ACTIVATIONS:
    _obeyed(f"RemoveQDQConv{_name}", BOOL, True, f"no Q/DQ between a node and the {_name} that runtimes fuse into it")
_obeyed("RemoveQDQConvGelu", BOOL, False, "no Q/DQ between a node and its Gelu")
_obeyed("RemoveQDQMulAdd", BOOL, False, "no Q/DQ between a Mul and its Add")
_obeyed("RemoveQDQInstanceNorm", BOOL, False, "no Q/DQ between InstanceNormalization and its Relu, LeakyRelu or PRelu")
_moot("RemoveFusedQDQ", BOOL, False, "block formats too have nothing between a node and what is fused into it")
_obeyed("RemoveQDQBetweenOps", LIST, None, "pairs (op type, op type of its reader) with no Q/DQ between them")
_obeyed("UseQDQContribOps", BOOL, None, "write Q/DQ in the com.microsoft domain")
_moot("AlignEltwiseQuantType", BOOL, False, "constants of elementwise ops always have the type of the activations")

# Calibration.
_obeyed(
    "CalibTensorRangeSymmetric",
    BOOL,
    None,
    "MinMax: whether the range is [-a, a]. Percentiles: whether what is cut is the largest of |x|, or half of it at "
    "either end. Left out: as the spec is",
)
_obeyed("CalibMovingAverage", BOOL, False, "MinMax: the mean of the batches' minima and maxima")
_moot(
    "CalibMovingAverageConstant",
    NUMBER,
    0.01,
    "the mean is arithmetic, as ONNX Runtime's, so batch order has no effect",
)
_obeyed("Percentile", NUMBER, 99.999, "share of the values that a percentile range keeps")
_moot("NumBins", INT, None, "histograms count float bit patterns; they have no width to choose")
_obeyed(
    "NumQuantizedBins", INT, None, "Entropy: levels that |x| is quantized to; left out: those of the type, 128 for int8"
)
_moot(
    "Scenario",
    TEXT,
    "same",
    "ONNX Runtime reads it for float8 only, which the documented types do not have",
    ("same", "p3"),
)
_obeyed("LWPMetric", TEXT, "mae", "LayerwisePercentile: mae or mse")
_obeyed("PercentileCandidates", LIST, [99.99, 99.999, 99.99999], "LayerwisePercentile: what it chooses from")
_moot("LWPUseHistogram", BOOL, True, "every value counts, through a histogram that loses nothing it needs")
_obeyed("UseRandomData", BOOL, False, "calibrate on random data where no reader is given")
_obeyed("RandomDataReaderInputShape", DICT, {}, "input name -> shape of random data")
_obeyed("RandomDataReaderInputDataRange", DICT, None, "input name -> [low, high] of random data")
_obeyed("MinMSEModePof2Scale", TEXT, "All", "MinMSE of activations: All values, the MostCommon of samples, Percentile")
_obeyed("MinMSEModeFloatScale", TEXT, "All", "MinMSE of weights: All shrunk ranges, of a Percentile, or HistCenter")
_obeyed("WeightCalibrateMethod", (Enum,), None, "MinMax or MinMSE, for weights")
_obeyed("CalibDataSize", INT, None, "most samples read")
_moot("CalibWorkerNum", INT, 1, "one pass; the result never depends on the number of workers")
_moot("CalibOptimizeMem", BOOL, True, "memory is bounded by two samples")
_moot("CalibOptimizeDisk", BOOL, False, "nothing is written to disk")
_obeyed("SaveTensorHistFig", BOOL, False, "a figure of the histogram of each tensor, in the folder tensor_hist")
_moot("CalibPassthroughOpTypes", LIST, [], "tensors with one scale share one range")
_obeyed("TensorQuantOverrides", DICT, {}, "tensor -> [{quant_type, symmetric, axis, scale, zero_point, rmin, rmax}]")
_obeyed("MixedPrecisionTensor", DICT, {}, "quantization type -> names of tensors")
_obeyed("Statistics", TEXT, None, "file of calibration statistics, written or reused (an option of this package)")
_obeyed(
    "SaveAndRestore", TEXT, None, "JSON file of the calibrated ranges: written, or used instead of data if it exists"
)
_obeyed("TensorsRangeFile", TEXT, None, "older name of SaveAndRestore, which wins")
_obeyed(
    "QuantizationPreference",
    TEXT,
    None,
    "changes AdaRound and AdaQuant. accuracy: no early stop, biases learn too, outputs are quantized. speed: early "
    "stop, all in memory. resource_efficiency: little memory",
    _PREFERENCES,
)

# Bias and scales.
_obeyed("QuantizeBias", BOOL, True, "quantize biases")
_obeyed("Int32Bias", BOOL, None, "bias as int32 with scale = input scale * weight scale; else like a weight")
_obeyed("Int16Bias", BOOL, False, "bias as int16 with the scale of int32, or a coarser one where it does not fit")
_moot("AdjustBiasScale", BOOL, True, "biases are quantized once, under their final scale")
_obeyed("AdjustWeightScaleForInt32Bias", BOOL, True, "enlarge weight scales whose int32 bias would not fit")
_obeyed("Int16Scale", BOOL, False, "scales of the form M / 2^N: 1 <= M < 2^15, 0 <= N <= 16")
_obeyed("QuantizeFP16", BOOL, False, "quantize a float16 model as it is, with float16 scales")
_obeyed("UseFP32Scale", BOOL, False, "QuantizeFP16: float32 scales, and float32 between inputs and outputs")
_obeyed("ActivationScaled", BOOL, False, "BF16: activations are divided by half their largest magnitude first")
_obeyed("WeightScaled", BOOL, False, "BF16: weights are divided by half their largest magnitude first")
_obeyed("UseUnsignedReLU", BOOL, False, "a zero point for the outputs of Relu and of Clip from 0")
_obeyed("UsePowerOf2Scale", BOOL, True, "obey ScaleType.PowerOf2; False: float scales in its place")
_obeyed("ActivationSymmetric", BOOL, None, "zero point of activations fixed; overrules the spec")
_obeyed("WeightSymmetric", BOOL, None, "zero point of weights fixed; overrules the spec")

# NPU.
_obeyed("EnableNPUCnn", BOOL, None, "the XINT8 path; on by itself where both scale types are PowerOf2")
_obeyed("EnableNPUTransformer", BOOL, False, "quantize Gemm and MatMul with a constant operand only")
_obeyed("SimulateDPU", BOOL, True, "the Convert... options below are on by themselves in the XINT8 path")
NPU_CONVERSIONS = {
    "LeakyRelu": ("ConvertLeakyReluToDPUVersion", "round the slope of LeakyRelu to 1/256"),
    "Sigmoid": ("ConvertSigmoidToHardSigmoid", "Sigmoid becomes HardSigmoid"),
    "HardSigmoid": ("ConvertHardSigmoidToDPUVersion", "scale HardSigmoid by 2731 * 6 / 16384"),
    "AvgPool": ("ConvertAvgPoolToDPUVersion", "scale average pooling by the DPU's approximation of 1/N"),
    "ReduceMean": ("ConvertReduceMeanToDPUVersion", "scale ReduceMean by the DPU's approximation of 1/N"),
}
"""Conversion of `npu/simulation.py` -> its option, and what that does."""
for _name, _meaning in NPU_CONVERSIONS.values():
    _obeyed(_name, BOOL, None, _meaning)
NPU_CONVERSIONS_ON_REQUEST = {
    "Clip": ("ConvertClipToDPUVersion", "bounds of Clip become whole numbers from -128 to 127"),
    "Softmax": ("ConvertSoftmaxToDPUVersion", "Softmax in bfloat16 with the DPU's polynomial for exp"),
    "InstanceNorm": ("ConvertInstanceNormToDPUVersion", "InstanceNormalization in bfloat16, means in float32"),
}
"""Operator of the NPU -> its option, for those that SimulateDPU does not bring along."""
for _name, _meaning in NPU_CONVERSIONS_ON_REQUEST.values():
    _obeyed(_name, BOOL, False, _meaning)
_obeyed("NPULimitationCheck", BOOL, True, "a shift out of the NPU's reach is an error, in the XINT8 path")
_obeyed("MaxLoopNum", INT, 5, "most rounds of adjusting positions")
NPU_RULES = {
    "shift_cut": "AdjustShiftCut",
    "shift_bias": "AdjustShiftBias",
    "shift_read": "AdjustShiftRead",
    "shift_write": "AdjustShiftWrite",
    "hard_sigmoid": "AdjustHardSigmoid",
    "swish": "AdjustShiftSwish",
}
"""Rule of `npu/rules.py` -> its option."""
for _name in NPU_RULES.values():
    _obeyed(_name, BOOL, True, "adjust positions to this rule of the NPU, in the XINT8 path")
for _name in ("Concat", "Pool", "Pad", "Slice"):
    _obeyed(f"Align{_name}", BOOL, None, "inputs and output share one scale; on by itself in the XINT8 path")
for _name in ("AlignTranspose", "AlignReshape"):
    _moot(_name, BOOL, False, "ops that only move data always share one scale")

# BF16, BFP, MX, MatMulNBits.
_obeyed("BF16QDQToCast", BOOL, False, "write bfloat16 as pairs of Cast")
_obeyed("BF16WithClip", BOOL, False, "clip activations to the range of bfloat16 first")
_VAIML = "a form without casts that one vendor's compiler reads; use BF16QDQToCast=True, then the tool remove_bf16_cast"
OPTIONS.register("EnableVaimlBF16", Option("EnableVaimlBF16", BOOL, False, _VAIML, refused=True))
_obeyed("RefineBlockAxis", BOOL, True, "blocks lie along the axis that each op reduces, not along the given one")
_obeyed("BFPAttributes", DICT, {}, "names the BFP or MX4/6/9 format of QBFP, its block size and axis")
_obeyed("MXAttributes", DICT, {}, "names the element type of QMX, its block size and axis")
_obeyed("UseMatMulNBits", BOOL, False, "4- or 8-bit weights of MatMul in MatMulNBits nodes; activations stay in float")
_obeyed("MatMulNBitsParams", DICT, {}, "Algorithm (DEFAULT, GPTQ or HQQ), GroupSize, Symmetric, Bits, AccuracyLevel")
_obeyed("BlockSize", INT, 32, "values that share a scale under QuantGranularity.Group (an option of this package)")

# Runtime and debug.
_obeyed("ExecutionProviders", LIST, ["CPUExecutionProvider"], "execution providers of calibration")
_moot("TmpDir", TEXT, None, "no temporary copies of the model are made")
_obeyed("UserCustomOpLibPath", TEXT, None, "library of the model's own operators, or a folder of such")
_obeyed(
    "EncryptionAlgorithm",
    TEXT,
    None,
    "of CryptoMode: the output is written, encrypted with the key of QUARK_ENCRYPTION_KEY",
    ("AES-256",),
)
_obeyed(
    "CryptoMode", BOOL, False, "from a ModelProto to a ModelProto: nothing on the disk in clear, nothing in the log"
)
_obeyed("FillAllValueInfo", BOOL, False, "write type and shape of every tensor within the quantized model")
_moot("DebugMode", BOOL, False, "recorded only")
_moot("PrintSummary", BOOL, True, "recorded only")
_moot("IgnoreWarnings", BOOL, True, "recorded only")
_obeyed(
    "EvalMetrics", BOOL, False, "log cosine and L2 distance of the outputs to the float model's; ModelQuantizer.metrics"
)
_obeyed("EvalDataReader", ANY, None, "the samples of EvalMetrics; left out: those of calibration")

# Algorithms; algo_configs.py has their entries.
_obeyed("SmoothAlpha", NUMBER, 0.5, "SmoothQuantConfig.alpha")
_obeyed("CLEBalanceMethod", TEXT, "max", "CLEConfig.cle_balance_method")
_obeyed("CLESteps", INT, 1, "CLEConfig.cle_steps")
_obeyed("CLEWeightThreshold", NUMBER, 0.5, "CLEConfig.cle_weight_threshold")
_obeyed("CLEScaleAppendBias", BOOL, True, "CLEConfig.cle_scale_append_bias")
_obeyed("CLEScaleUseThreshold", BOOL, True, "CLEConfig.cle_scale_use_threshold")
_obeyed("CLETotalLayerDiffThreshold", NUMBER, 1.9e-7, "CLEConfig.cle_total_layer_diff_threshold")
_obeyed("CLEThroughGates", BOOL, True, "CLEConfig.cle_through_gates (an option of this package)")
_obeyed(
    "BiasCorrection",
    BOOL,
    None,
    "BiasCorrectionConfig; on by itself in named configs of one scale a weight, from 8 samples on",
)
_obeyed("UseGPTQ", BOOL, False, "GPTQConfig")
_obeyed("AllowNoop", BOOL, True, "an algorithm that finds nothing to do is a warning; else it is an error")
_obeyed("GPTQParams", DICT, {}, "the parameters of GPTQConfig")
_obeyed("RMatrixDim", INT, 4096, "QuarotConfig.r_matrix_dim")
_obeyed("UseRandomHad", BOOL, False, "QuarotConfig.use_random_had")
_obeyed("RConfigPath", TEXT, None, "QuarotConfig.r_config_path")
_obeyed("FastFinetune", DICT, {}, "AdaRoundConfig or AdaQuantConfig: `OptimAlgorithm` says which")
_obeyed("AutoMixprecision", DICT, {}, "the parameters of AutoMixprecisionConfig")


def check_options(options: Mapping[str, Any], where: str, also: Iterable[str] = ()) -> None:
    """Find unknown keys and values of the wrong type.

    Args:
        options: Extra options.
        where: The config they were given to, for the message.
        also: Other names that could have been meant.

    Raises:
        ConfigError: names the key, and the nearest ones.
    """
    for key, value in options.items():
        if key not in OPTIONS:
            raise ConfigError(f"{where}: unknown option {key!r}. {did_you_mean(str(key), [*OPTIONS, *also])}")
        option = OPTIONS[key]
        if value is None and option.default is None:
            continue
        if not isinstance(value, option.kind) or (isinstance(value, bool) and option.kind in (INT, NUMBER)):
            names = " or ".join(kind.__name__ for kind in option.kind)
            raise ConfigError(f"{where}: option {key}: expected {names}, got {value!r} ({type(value).__name__}).")
        if option.choices and value not in option.choices:
            raise ConfigError(f"{where}: option {key}: {value!r}. {did_you_mean(str(value), option.choices)}")


def refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Find values that this version cannot obey.

    Raises:
        NotSupportedError: names the option and the values that are possible.
    """
    for key, value in options.items():
        option = OPTIONS[key]
        if option.refused and value != option.default:
            raise NotSupportedError(
                f"{key}={value!r}: {option.meaning}. Possible: {option.default!r}, or leave it out."
            )


def value_of(options: Mapping[str, Any], name: str) -> Any:
    """The value of an option, or its default."""
    value = options.get(name, OPTIONS[name].default)
    return list(value) if isinstance(value, (list, tuple)) else value
