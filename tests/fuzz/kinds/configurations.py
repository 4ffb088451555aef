"""Configurations as JSON holds them, and arguments of their classes: of both flows, read and then run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Place, Random, nothing_to_compare, pick
from tests.fuzz.damage import damage_json, odd_values, shorten
from tests.fuzz.oracles import judge_onnx

SCHEMES = ("int8", "uint4_wo_32", "fp8", "mxfp4", "nvfp4", "int4_fp8", "bfp16")
ALGORITHMS = (None, "gptq", "awq", "smooth", "rotation", "autoround", ["smooth", "gptq"])
PRESETS = ("A8W8", "XINT8_QCONFIG", "A16W8_ADAROUND_QCONFIG", "BF16_QCONFIG", "A8W8_QCONFIG", "MX9")
OPTIONS = (
    "CalibTensorRangeSymmetric", "Percentile", "WeightScaled", "ActivationScaled", "ConvertFP16ToFP32", "FoldBatchNorm",
    "AlignConcat", "SmoothAlpha", "MinMSEModePof2Scale", "SimplifyModel", "Int32Bias", "DedicateDQNode", "FastFinetune",
    "SubgraphsToExclude", "TensorQuantOverrides", "QuantizeAllOpTypes", "CalibDataSize", "NobodyKnowsThis",
)  # fmt: skip


def _torch_json(values: Any) -> None:
    """Read the JSON of a config and quantize a small module by it."""
    import torch

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig
    from tests.models.torch_zoo import mlp

    quantizer = ModelQuantizer(QConfig.from_dict(values))
    model = quantizer.quantize_model(mlp(), [torch.ones(2, 128).cumsum(1)])
    quantizer.freeze(model)(torch.zeros(1, 128))


def _torch_template(arguments: dict[str, Any]) -> None:
    from quark.torch import LLMTemplate, ModelQuantizer

    ModelQuantizer(LLMTemplate.get("llama").get_config(**arguments))


def _torch_spec(arguments: dict[str, Any]) -> None:
    import torch

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
    from tests.models.torch_zoo import mlp

    config = QConfig(global_quant_config=QLayerConfig(weight=QTensorConfig(**arguments)))
    ModelQuantizer(config).quantize_model(mlp(), [torch.ones(2, 128)])


def _onnx_json(kind: Any, values: Any, source: Path, output: Path) -> None:
    from quark.onnx import ModelQuantizer
    from tests.models.onnx_zoo import Reader, vectors

    ModelQuantizer(kind.from_dict(values)).quantize_model(str(source), str(output), Reader(vectors(1)))


def _onnx_options(preset: str, options: dict[str, Any], source: Path, output: Path) -> None:
    from quark.onnx import Config, ModelQuantizer, get_default_config
    from tests.models.onnx_zoo import Reader, vectors

    config = get_default_config(preset)
    config.extra_options.update(options)
    ModelQuantizer(Config(config)).quantize_model(str(source), str(output), Reader(vectors(1)))


def _of_torch(random: Random) -> Case:
    from quark.torch import LLMTemplate

    how = pick(random, ("json", "template", "spec"))
    if how == "json":
        algorithm = pick(random, ALGORITHMS)
        config = LLMTemplate.get("llama").get_config(pick(random, SCHEMES), algorithm)
        values, said = damage_json(random, config.to_dict())
        return Case(f"torch QConfig.from_dict: {said}", partial(_torch_json, values), nothing_to_compare)
    if how == "template":
        arguments: dict[str, Any] = {
            "scheme": "int8", "algorithm": ["gptq"], "kv_cache_scheme": "fp8", "min_kv_scale": 0.1,
            "layer_config": {"*.q_proj": "int8_wo"}, "exclude_layers": ["lm_head"],
        }  # fmt: skip
        name = pick(random, arguments)
        arguments[name] = pick(random, odd_values())
        said = f"{name}={shorten(arguments[name])}"
        return Case(f"get_config({said})", partial(_torch_template, arguments), nothing_to_compare)
    arguments = {
        "dtype": "int8", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": True,
        "is_dynamic": False, "observer_cls": "PerGroupMinMaxObserver", "round_method": "half_even",
        "scale_type": "float",
    }  # fmt: skip
    name = pick(random, arguments)
    arguments[name] = pick(random, odd_values())
    return Case(
        f"QTensorConfig({name}={shorten(arguments[name])})", partial(_torch_spec, arguments), nothing_to_compare
    )


def _of_onnx(random: Random, place: Place) -> Case:
    from quark.onnx import Config, QConfig, get_default_config
    from quark.onnx.config.preset_rows import QROWS
    from tests.models.onnx_zoo import vectors

    source, output = place.bases.get("onnx-mlp") / "model.onnx", place.outputs / "result.onnx"
    outputs = (output, output.with_suffix(".onnx.data"))  # a config may ask for the second
    judge = partial(judge_onnx, source, output, vectors(1)[0])
    preset = pick(random, PRESETS)
    if random.random() < 0.5:
        made = QROWS[preset].make(QConfig) if preset in QROWS else Config(get_default_config(preset))
        values, said = damage_json(random, made.to_dict())
        work: Any = partial(_onnx_json, type(made), values, source, output)
        return Case(f"onnx {type(made).__name__}.from_dict, {preset}: {said}", work, judge, outputs, margin=None)
    name, value = pick(random, OPTIONS), pick(random, odd_values())
    work = partial(_onnx_options, "A8W8", {name: value}, source, output)
    return Case(f"extra_options {name}={shorten(value)}", work, judge, outputs, margin=None)


def make(random: Random, place: Place) -> Case:
    return _of_torch(random) if random.random() < 0.5 else _of_onnx(random, place)
