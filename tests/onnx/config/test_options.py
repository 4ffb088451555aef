"""The table of extra options: complete, typed, obeyed or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quark.errors import ConfigError, NotSupportedError
from quark.onnx.config.algo_configs import ALGO_CONFIGS
from quark.onnx.config.extra_options import (
    ANY,
    BOOL,
    DICT,
    INT,
    LIST,
    NUMBER,
    OPTIONS,
    Option,
    check_options,
    refuse_unsupported,
)
from quark.onnx.passes import PASSES

DOCUMENTED = """
ShapeShifterYaml PreprocessYAML SkipPreprocess OptimizeModel SimplifyModel SimplifyModelOptions ConvertFP16ToFP32
ConvertNCHWToNHWC ConvertOpsetVersion ConvertBNToConv ConvertReduceMeanToGlobalAvgPool SplitLargeKernelPool
ConvertSplitToSlice ConvertClipToRelu FuseInstanceNorm FuseL2Norm FuseGelu FuseLayerNorm FoldBatchNorm FoldRelu
ReplaceClip6Relu OpTypesToQuantize NodesToQuantize ExtraOpTypesToQuantize QuantizeAllOpTypes WeightsOnly
MatMulConstBOnly EnableSubgraph InputNodes OutputNodes AddQDQPairToWeight ForceQuantizeNoInputCheck DedicatedQDQPair
DedicateDQNode EnableDualQuantNodePairs OpTypesToExcludeOutputQuantization NodesToExcludeOutputQuantization
QDQOpTypePerChannelSupportToAxis RemoveQDQConvClip RemoveQDQConvRelu RemoveQDQConvLeakyRelu RemoveQDQConvPRelu
RemoveQDQConvGelu RemoveQDQMulAdd RemoveQDQInstanceNorm RemoveFusedQDQ RemoveQDQBetweenOps UseQDQContribOps
AlignEltwiseQuantType CalibTensorRangeSymmetric CalibMovingAverage CalibMovingAverageConstant Percentile NumBins
NumQuantizedBins Scenario LWPMetric PercentileCandidates LWPUseHistogram UseRandomData RandomDataReaderInputShape
RandomDataReaderInputDataRange MinMSEModePof2Scale MinMSEModeFloatScale WeightCalibrateMethod CalibDataSize
CalibWorkerNum CalibOptimizeMem SaveTensorHistFig CalibPassthroughOpTypes TensorQuantOverrides MixedPrecisionTensor
SaveAndRestore TensorsRangeFile QuantizationPreference CalibOptimizeDisk QuantizeBias Int32Bias Int16Bias
AdjustBiasScale AdjustWeightScaleForInt32Bias Int16Scale QuantizeFP16 UseFP32Scale ActivationScaled WeightScaled
UseUnsignedReLU UsePowerOf2Scale ActivationSymmetric WeightSymmetric SimulateDPU ConvertLeakyReluToDPUVersion
ConvertSigmoidToHardSigmoid ConvertHardSigmoidToDPUVersion ConvertAvgPoolToDPUVersion ConvertReduceMeanToDPUVersion
ConvertSoftmaxToDPUVersion ConvertInstanceNormToDPUVersion ConvertClipToDPUVersion NPULimitationCheck MaxLoopNum
AdjustShiftCut AdjustShiftBias AdjustShiftRead AdjustShiftWrite AdjustHardSigmoid AdjustShiftSwish AlignConcat
AlignPool AlignPad AlignSlice AlignTranspose AlignReshape EnableNPUCnn BF16QDQToCast BF16WithClip EnableVaimlBF16
RefineBlockAxis BFPAttributes MXAttributes UseMatMulNBits MatMulNBitsParams ExecutionProviders RemoveInputInit
CopySharedInit CopyBiasInit FixShapes TmpDir UserCustomOpLibPath EncryptionAlgorithm CryptoMode FillAllValueInfo
DebugMode PrintSummary IgnoreWarnings EvalMetrics EvalDataReader SmoothAlpha CLEBalanceMethod CLESteps
CLEWeightThreshold CLEScaleAppendBias CLEScaleUseThreshold CLETotalLayerDiffThreshold BiasCorrection UseGPTQ
GPTQParams RMatrixDim UseRandomHad RConfigPath FastFinetune AutoMixprecision
"""


def other_value(option: Option) -> Any:
    """A value of the right type that is not the default."""
    if option.choices:
        return next(text for text in option.choices if text != option.default)
    choices = {BOOL: [True, False], INT: [7], NUMBER: [7], LIST: [["x"]], DICT: [{"x": 1}], ANY: [object()]}
    return next((value for value in choices.get(option.kind, ["x"]) if value != option.default), None)


def test_every_documented_option_is_in_the_table() -> None:
    """Beside it are the options that graph passes bring, and a few of this package's own."""
    assert {*OPTIONS} == {*DOCUMENTED.split()} | {graph_pass.option for graph_pass in PASSES.values()} | {
        "AllowNoop",
        "BlockSize",
        "EnableNPUTransformer",
        "Statistics",
        "Target",
        "MeasurePlacement",
        "MeasureThreads",
        "NodesToExclude",
        "StoreFloat16",
        "RefineWeightScales",
        "CLEThroughGates",
    }


def test_the_keys_of_algorithms_are_options() -> None:
    for cls in ALGO_CONFIGS.values():
        keys = {cls.nest} if cls.nest else {*cls.keys.values(), *cls.flag}
        assert keys <= {*OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_of_their_type_and_accepted(name: str) -> None:
    option = OPTIONS[name]
    assert option.meaning
    check_options({name: option.default}, "test")
    refuse_unsupported({name: option.default})


def test_the_page_of_what_is_refused_has_every_such_option() -> None:
    page = Path(__file__).parents[3] / "docs" / "guide" / "not_supported.md"
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page.read_text(encoding="utf-8"), re.M)
    assert rows == sorted((name, option.meaning) for name, option in OPTIONS.items() if option.refused)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.refused])
def test_what_is_not_done_is_refused_by_name(name: str) -> None:
    value = other_value(OPTIONS[name])
    assert value is not None
    check_options({name: value}, "test")
    with pytest.raises(NotSupportedError, match=re.escape(f"{name}=")):
        refuse_unsupported({name: value})


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.kind != ANY])
def test_wrong_types_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option {name}: expected"):
        check_options({name: 3 + 4j}, "test")


def test_bool_is_no_number_and_lists_may_be_tuples() -> None:
    with pytest.raises(ConfigError, match="CalibDataSize: expected int, got True"):
        check_options({"CalibDataSize": True}, "test")
    check_options({"CopyBiasInit": ("Conv",)}, "test")
    refuse_unsupported({"CopyBiasInit": ("Conv", "ConvTranspose", "Gemm"), "RemoveQDQBetweenOps": []})


def test_texts_that_an_option_does_not_have_are_refused() -> None:
    for name, option in OPTIONS.items():
        for text in option.choices:
            check_options({name: text}, "test")
        if option.choices:
            with pytest.raises(ConfigError, match=f"option {name}: 'none of these'"):
                check_options({name: "none of these"}, "test")


def test_unknown_options_name_the_nearest_and_the_place() -> None:
    with pytest.raises(ConfigError, match=r"here: unknown option 'WeightScale'. Did you mean 'WeightScaled'"):
        check_options({"WeightScale": True}, "here")
