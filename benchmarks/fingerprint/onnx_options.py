"""Every extra option of the ONNX flow, each alone, and those that need another beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import quark.onnx as flow
from benchmarks.fingerprint.onnx_models import quantize
from benchmarks.fingerprint.outputs import add, attempt
from quark.onnx import CalibMethod, QConfig, QLayerConfig, get_default_config
from quark.onnx.quantization.config import custom_config
from quark.onnx.quantization.config.maps import QCONFIG_ALL_PARAMS

PLACES = (
    ("A8W8_QCONFIG", "pools"),
    ("A8W8_QCONFIG", "features"),
    ("XINT8_QCONFIG", "features"),
    ("BF16_QCONFIG", "mlp"),
)
"""Where each option is set: configuration and network."""

MORE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("FuseGelu",), ("gelus", "gelus19")),
    **dict.fromkeys(("FuseLayerNorm",), ("layer_norms", "layer_norms18")),
    **dict.fromkeys(("FuseInstanceNorm", "FuseL2Norm"), ("instance_norms", "l2_norms")),
    **dict.fromkeys(("CopySharedInit", "CopyBiasInit"), ("shared",)),
    **dict.fromkeys(("SimplifyModel", "SkipPreprocess", "MatMulConstBOnly"), ("clutter",)),
    **dict.fromkeys(("ConvertFP16ToFP32", "QuantizeFP16"), ("half",)),
    "RemoveInputInit": ("legacy",),
}
"""Networks that have what an option is about."""

RULES = ("ShiftCut", "ShiftBias", "ShiftRead", "ShiftWrite", "HardSigmoid", "ShiftSwish")
NPU = {*(f"Adjust{rule}" for rule in RULES), "MaxLoopNum", "NPULimitationCheck", "SimulateDPU"}
"""Options about shifts that an NPU cannot make."""

AXES = {"axis": 1, "block_size": 16, "rounding_mode": 2}
VALUES: dict[str, Any] = {
    "ConvertOpsetVersion": 21,
    "FixShapes": "x:[3,3,24,32]",
    "CopySharedInit": [],
    "CopyBiasInit": ["Conv"],
    "OpTypesToQuantize": ["Conv"],
    "NodesToQuantize": ["left_conv_node", "second_conv_node"],
    "ExtraOpTypesToQuantize": ["Flatten"],
    "OpTypesToExcludeOutputQuantization": ["Conv"],
    "NodesToExcludeOutputQuantization": ["left_conv_node"],
    "QDQOpTypePerChannelSupportToAxis": {"Conv": 0},
    "RemoveQDQBetweenOps": [("Conv", "Concat"), ("Mul", "Add")],
    "Percentile": 99.0,
    "CalibDataSize": 1,
    "TensorQuantOverrides": {"joined_norm": [{"scale": 0.5, "zero_point": 0}]},
    "MixedPrecisionTensor": {flow.ExtendedQuantType.QInt16: ["joined_norm"]},
    "Target": "npu",
    "Statistics": "out/statistics.npz",
    "MaxLoopNum": 1,
    "WeightCalibrateMethod": CalibMethod.MinMSE,
    "CLEBalanceMethod": "min",
    "CLESteps": 2,
    "CLEWeightThreshold": 0.1,
    "CLETotalLayerDiffThreshold": 1e-3,
}
"""Options that are no switches, set to another value; all others are switched."""

TOGETHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "random_data": ("A8W8_QCONFIG", "cnn", {"UseRandomData": True}),
    "random_shapes": (
        "A8W8_QCONFIG",
        "cnn",
        {
            "UseRandomData": True,
            "RandomDataReaderInputShape": {"x": [2, 3, 16, 16]},
            "RandomDataReaderInputDataRange": {"x": [0, 1]},
        },
    ),
    "vint8_steps": ("VINT8_QCONFIG", "features", {"SimulateDPU": False, "NPULimitationCheck": False}),
    "xint8_float": ("XINT8_QCONFIG", "features", {"SimulateDPU": False, "NPULimitationCheck": False, "MaxLoopNum": 1}),
    "pairs": ("A8W8_QCONFIG", "features", {"DedicatedQDQPair": True, "AddQDQPairToWeight": True}),
    "contributed": ("A16W8_QCONFIG", "features", {"UseQDQContribOps": True, "Int16Bias": True}),
    "noop": ("A8W8_QCONFIG", "mlp", {"CLESteps": 2, "AllowNoop": True}),
    "scaled": ("BF16_QCONFIG", "features", {"ActivationScaled": True, "WeightScaled": True, "BF16WithClip": True}),
    "casts": ("BF16_QCONFIG", "features", {"BF16QDQToCast": True}),
    "axes": ("BFP16_QCONFIG", "features", {"RefineBlockAxis": False}),
}
OLDER: dict[str, dict[str, Any]] = {
    "MX4": {"BFPAttributes": {"bfp_method": "to_bfp", "bit_width": 16, **AXES}},
    "MXFP8E4M3": {"MXAttributes": {"element_dtype": "fp6_e2m3", **AXES}, "RefineBlockAxis": False},
    "INT8_TRANSFORMER_DEFAULT": {"CalibMovingAverage": True, "WeightCalibrateMethod": CalibMethod.MinMSE},
    "MATMUL_NBITS": {"MatMulNBitsParams": {"Bits": 8, "GroupSize": 16, "Symmetric": False, "AccuracyLevel": 4}},
}
"""Older configurations with other attributes of their types."""


def option(name: str) -> str:
    """An option, alone, under several configurations on several networks."""
    said = []
    places = [*PLACES, *(("A8W8_QCONFIG", network) for network in MORE.get(name, ()))]
    places += [("XINT8_QCONFIG", "uneven")] if name in NPU else []
    for base, network in places:
        for value in values(name):
            said.append(attempt(together, base, network, {name: value}, f"{base}_{network}_{value is not False}.onnx"))
    return "".join(said)


def values(name: str) -> list[Any]:
    """Values that an option does not have by itself."""
    return [VALUES[name]] if name in VALUES else [v for v in (True, False) if v is not QCONFIG_ALL_PARAMS[name].default]


def together(base: str, network: str, options: dict[str, Any], file: str = "model.onnx") -> None:
    made = getattr(custom_config, base)
    options = {**made.extra_options, **options}
    quantize(replace(made, extra_options=options), network, not options.get("UseRandomData"), file)


def older(name: str, options: dict[str, Any]) -> None:
    made = get_default_config(name)
    made.extra_options.update(options)
    quantize(flow.Config(global_quant_config=made), "mlp")


def percentiles(options: dict[str, Any]) -> None:
    """What the layerwise percentile chooses from."""
    activation = flow.UInt8Spec(calibration_method=CalibMethod.LayerwisePercentile)
    quantize(QConfig(QLayerConfig(input_tensors=activation, weight=flow.Int8Spec()), **options), "cnn")


def from_statistics() -> None:
    """A second config that needs no data, as the first has written its statistics."""
    for method in (CalibMethod.MinMax, CalibMethod.Entropy):
        activation = flow.UInt8Spec(calibration_method=method)
        config = QConfig(QLayerConfig(input_tensors=activation, weight=flow.Int8Spec()), Statistics="out/digits.npz")
        quantize(config, "digits", method is CalibMethod.MinMax, f"{method.name}.onnx")


for _name in QCONFIG_ALL_PARAMS:
    add(f"onnx/options/{_name}", option, _name)
for _name, _arguments in TOGETHER.items():
    add(f"onnx/options_together/{_name}", together, *_arguments)
for _name, _options in OLDER.items():
    add(f"onnx/options_together/{_name}", older, _name, _options)
for _name, _options in {"mse": {"LWPMetric": "mse"}, "candidates": {"PercentileCandidates": [90.0, 99.0]}}.items():
    add(f"onnx/options_together/percentiles_{_name}", percentiles, _options)
add("onnx/options_together/statistics", from_statistics)
