"""Every named configuration of the ONNX flow, every spec, every kind of config."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import quark.onnx as flow
from benchmarks.fingerprint.onnx_models import NETWORKS, quantize
from benchmarks.fingerprint.outputs import OUT, add, attempt
from quark.onnx import (
    CalibMethod,
    Config,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    ScaleType,
    UInt8Spec,
    get_default_config,
    quantize_dynamic,
    quantize_static,
)
from quark.onnx.quantization.config import custom_config, get_default_config_mapping

NAMES = list(get_default_config_mapping())
QNAMES = [f"{name}_QCONFIG" for name in NAMES if hasattr(custom_config, f"{name}_QCONFIG")]
SPECS = sorted(name for name in dir(flow) if name.endswith("Spec"))
NPU = [f"{name}_QCONFIG" for name in ("A8W8", "XINT8", "VINT8")]
EVERYWHERE = (*NPU, "U8S8_AAWS", "FP16", "BF16", "MX9_INT8", "UINT8_DYNAMIC_QUANT")
"""Configurations that see each model of the zoo."""

FEW = {"NumIterations": 3}


def config(name: str) -> Any:
    """The configuration; where it learns, in few iterations, and AdaQuant in large steps, so that something changes."""
    if name in NAMES:
        made = get_default_config(name)
        if made.include_fast_ft:
            tuned = {**made.extra_options["FastFinetune"], **FEW}
            tuned["LearningRate"] = 0.01 if tuned["OptimAlgorithm"] == "adaquant" else 0.1
            made.extra_options["FastFinetune"] = tuned
        return Config(global_quant_config=made)
    full = getattr(custom_config, name)
    algorithms = [replace(algorithm, num_iterations=3, learning_rate=0.01) for algorithm in full.algo_config]
    return replace(full, algo_config=algorithms)


def preset(name: str, network: str) -> None:
    quantize(config(name), network)


def spec(name: str, network: str, tensors: tuple[str, ...]) -> None:
    """A spec for some tensors of each layer."""
    layer = {"input_tensors": UInt8Spec(), "weight": Int8Spec()}
    layer.update({tensor: getattr(flow, name)() for tensor in tensors})
    quantize(QConfig(QLayerConfig(**layer)), network)


def calibration(method: CalibMethod) -> str:
    """Ranges by a method, under scales of each type for each granularity."""
    said = []
    for scale, granularity in product(ScaleType, QuantGranularity):
        activation = UInt8Spec(calibration_method=method, scale_type=scale)
        weight = Int8Spec(calibration_method=method, scale_type=scale, quant_granularity=granularity)
        config = QConfig(QLayerConfig(input_tensors=activation, weight=weight))
        said.append(attempt(quantize, config, "cnn", True, f"{scale.name}_{granularity.name}.onnx"))
    return "".join(said)


def weights_only(name: str) -> str:
    said = []
    for granularity, symmetric in product(QuantGranularity, (True, False)):
        weight = getattr(flow, name)(quant_granularity=granularity, symmetric=symmetric)
        config = QConfig(QLayerConfig(weight=weight), WeightsOnly=True, BlockSize=16)
        said.append(attempt(quantize, config, "mlp", False, f"{granularity.name}_{symmetric}.onnx"))
    return "".join(said)


def matmul_nbits(bits: int, symmetric: bool, algorithm: str) -> None:
    parameters = {"Bits": bits, "GroupSize": 16, "Symmetric": symmetric, "Algorithm": algorithm}
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    quantize(QConfig(layer, UseMatMulNBits=True, MatMulNBitsParams=parameters), "mlp")


def placed(network: str, options: dict[str, Any]) -> None:
    quantize(QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec()), **options), network)


def by_function(static: bool, fields: dict[str, Any]) -> None:
    model, feeds = NETWORKS["cnn"]()
    if static:
        quantize_static(model, str(OUT / "model.onnx"), feeds, **fields)
    else:
        quantize_dynamic(model, str(OUT / "model.onnx"), **fields)


def in_memory() -> str:
    """Without a path the model is returned."""
    model, feeds = NETWORKS["cnn"]()
    made = ModelQuantizer(config("A8W8")).quantize_model(model, None, feeds)
    return made.SerializeToString(deterministic=True).hex() if made else ""


def serialized() -> str:
    """All configurations as JSON, and read again."""
    rows = {name: get_default_config(name) for name in NAMES} | {name: getattr(custom_config, name) for name in QNAMES}
    return json.dumps(
        {name: [row.to_dict(), type(row).from_dict(row.to_dict()).to_dict()] for name, row in rows.items()}
    )


add("onnx/presets", serialized)
for _name in (*NAMES, *QNAMES):
    for _network in ("digits", "cnn", "mlp"):
        add(f"onnx/presets/{_name}/{_network}", preset, _name, _network)
for _name in EVERYWHERE:
    for _network in NETWORKS:
        if _network not in ("digits", "cnn", "mlp"):
            add(f"onnx/presets/{_name}/{_network}", preset, _name, _network)
for _name in SPECS:
    add(f"onnx/specs/{_name}/activation", spec, _name, "cnn", ("input_tensors",))
    add(f"onnx/specs/{_name}/weight", spec, _name, "cnn", ("weight",))
    add(f"onnx/specs/{_name}/both", spec, _name, "mlp", ("input_tensors", "weight"))
    add(f"onnx/specs/{_name}/all", spec, _name, "cnn", ("input_tensors", "weight", "bias", "output_tensors"))
for _method in CalibMethod:
    add(f"onnx/calibration/{_method.name}", calibration, _method)
for _name in ("Int4Spec", "UInt4Spec", "Int8Spec", "UInt8Spec", "Int16Spec"):
    add(f"onnx/weights_only/{_name}", weights_only, _name)
for _bits, _symmetric, _algorithm in product((2, 4, 8), (True, False), ("DEFAULT", "GPTQ")):
    _shown = f"{_algorithm.lower()}/{_bits}/{'symmetric' if _symmetric else 'asymmetric'}"
    add(f"onnx/matmul_nbits/{_shown}", matmul_nbits, _bits, _symmetric, _algorithm)
_wide = QLayerConfig(input_tensors=flow.Int16Spec(), weight=Int8Spec())
for _name, _options in {
    "by_name": {"specific_layer_config": {_wide: ["^/first/.*"]}},
    "by_type": {"layer_type_config": {None: ["Concat"], _wide: ["Gemm"]}},
    "exclude": {"exclude": ["/head/Gemm", "^/first/.*"]},
    "subgraph": {"exclude": [(["/first/first.0/Conv"], ["/second/second.0/Conv"])]},
    "dual_pairs": {"specific_layer_config": {_wide: ["^/first/.*"]}, "EnableDualQuantNodePairs": True},
    "outside": {"use_external_data_format": True},
    **{f"target_{target}": {"Target": target} for target in ("npu", "ort_x64", "generic")},
}.items():
    add(f"onnx/placement/{_name}", placed, "digits", _options)
for _name, _fields in {
    "default": {},
    "per_channel": {"per_channel": True},
    "types": {"activation_type": flow.QuantType.QUInt8, "weight_type": flow.QuantType.QUInt8},
    "nodes": {"nodes_to_exclude": ["y_node"], "op_types_to_quantize": ["Conv", "Gemm"]},
    "power_of_two": {"calibrate_method": flow.PowerOfTwoMethod.MinMSE, "enable_npu_cnn": True},
}.items():
    add(f"onnx/functions/static/{_name}", by_function, True, _fields)
    add(f"onnx/functions/dynamic/{_name}", by_function, False, _fields)
add("onnx/functions/in_memory", in_memory)
