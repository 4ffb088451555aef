"""Every named configuration on every model of the zoo: a valid file that stock ONNX Runtime runs, near float."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.errors import ConfigError, NotSupportedError
from quark.onnx import ModelQuantizer
from quark.onnx.config import presets
from quark.onnx.config.config import Config
from quark.onnx.config.preset_rows import QROWS, ROWS
from quark.onnx.config.presets import get_default_config
from tests.models.onnx_zoo import ZOO, Array, Reader, feed, outputs

TUNED = [name for name in (*ROWS, *QROWS) if "_ADA" in name or name.endswith("_ACCURATE")]
TUNED = [name for name in TUNED if "_MIXED_" not in name]
MIXED = [name for name in ROWS if "_MIXED_" in name]
NOW = [name for name in (*ROWS, *QROWS) if name not in (*MIXED, *TUNED)]

FLOORS = {
    "A8W8": 29, "A8W8_QCONFIG": 29, "S8S8_AAWS": 31, "U8S8_AAWS": 31, "U8U8_AAWA": 32, "INT8_CNN_DEFAULT": 31,
    "INT8_TRANSFORMER_DEFAULT": 33, "UINT8_DYNAMIC_QUANT": 31, "XINT8": 16, "XINT8_QCONFIG": 16, "VINT8": 22,
    "VINT8_QCONFIG": 22, "A16W8": 36, "A16W8_QCONFIG": 36, "S16S8_ASWS": 36, "U16S8_AAWS": 36,
    "INT16_CNN_DEFAULT": 70, "INT16_TRANSFORMER_DEFAULT": 70, "FP16": 57, "BF16": 42, "BF16_QCONFIG": 42, "BFP16": 30,
    "BFP16_QCONFIG": 30, "BF16_BFP16": 35, "BF16_MXINT8": 35, "MX9_INT8": 31, "MX9": 32, "MX6": 12, "MX4": 2.5,
    "MXINT8": 28, "MXFP8E5M2": 6, "MXFP8E4M3": 7, "MXFP6E3M2": 6, "MXFP6E2M3": 12, "MXFP4E2M1": 2.5, "MATMUL_NBITS": 12,
    "INT8_CPU": 34, "INT8_CPU_WEIGHTS": 36, "INT8_OPENVINO": 30, "INT8_CPU_DYNAMIC": 34,
}  # fmt: skip
"""Least SQNR in dB over the zoo: what the type gives on its hardest model (cubes of Gelu, products of gates)."""

LINEAR = {"UINT8_DYNAMIC_QUANT": {"Conv", "Gemm", "MatMul"}, "MATMUL_NBITS": {"MatMul"}}
for _own in ("INT8_CPU", "INT8_CPU_WEIGHTS", "INT8_CPU_DYNAMIC", "INT8_OPENVINO"):
    LINEAR[_own] = LINEAR["UINT8_DYNAMIC_QUANT"]
LINEAR |= {f"INT{bits}_TRANSFORMER_DEFAULT": {"Gemm", "MatMul"} for bits in (8, 16)}
"""Presets that quantize these op types only: a model without them has nothing to quantize."""


@cache
def case(model: str) -> tuple[onnx.ModelProto, dict[str, Array], list[Array]]:
    """A float model, one sample, and what it gives for it."""
    made = ZOO[model]()
    sample = feed(made)
    return made, sample, outputs(made, sample, optimise=True)


def config(name: str) -> Any:
    return getattr(presets, name) if name in QROWS else Config(get_default_config(name))


def refusal(preset: str, model: str, float_model: onnx.ModelProto) -> str | None:
    """What the error says where a preset cannot serve a model."""
    if preset in LINEAR and not LINEAR[preset] & {node.op_type for node in float_model.graph.node}:
        return "Nothing to quantize"
    return None


def check(model: onnx.ModelProto) -> None:
    """Valid, in order, and with the imports that it uses."""
    onnx.checker.check_model(model, full_check=True)
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    for node in model.graph.node:
        assert {name for name in node.input if name} <= known, f"{node.name} stands before what it reads"
        known |= set(node.output)
    used = {node.domain for nodes in (model.graph.node, *(f.node for f in model.functions)) for node in nodes}
    assert {entry.domain for entry in model.opset_import} <= {*used, ""}
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("preset", NOW)
def test_every_model_runs_near_float(preset: str, model: str) -> None:
    float_model, sample, expected = case(model)
    asked = config(preset)
    options = getattr(asked, "global_quant_config", asked).extra_options
    # Targets with float32 kernels take float16 models, whose inputs and outputs keep their type.
    if model == "half" and "Target" not in options:
        with pytest.raises(NotSupportedError, match="ConvertFP16ToFP32"):
            ModelQuantizer(asked).quantize_model(float_model, None, Reader([sample]))
        options["ConvertFP16ToFP32"] = True
        sample = {name: array.astype(np.float32) for name, array in sample.items()}
    message = refusal(preset, model, float_model)
    if message:
        with pytest.raises(ConfigError, match=message):
            ModelQuantizer(asked).quantize_model(float_model, None, Reader([sample]))
        return
    done = ModelQuantizer(asked).quantize_model(float_model, None, Reader([sample]))
    assert done is not None
    check(done)
    for reference, found in zip(expected, outputs(done, sample, optimise=True), strict=True):
        assert found.shape == reference.shape and np.isfinite(found).all()
        noise = sqnr(reference.astype(np.float32), found)
        assert noise > FLOORS[preset], f"{noise:.1f} dB"


@pytest.mark.slow
@pytest.mark.parametrize("preset", TUNED)
def test_presets_that_learn_run_with_their_own_iterations(preset: str) -> None:
    pytest.importorskip("torch")
    float_model, sample, expected = case("mlp")
    done = ModelQuantizer(config(preset)).quantize_model(float_model, None, Reader([sample]))
    assert done is not None
    check(done)
    (found,) = outputs(done, sample, optimise=True)
    assert sqnr(expected[0], found) > FLOORS.get(preset.partition("_ADA")[0], 25)


@pytest.mark.slow
@pytest.mark.parametrize("preset", MIXED)
def test_presets_of_mixed_precision_run(preset: str) -> None:
    if preset.endswith("_ADAQUANT"):
        pytest.importorskip("torch")
    float_model, sample, expected = case("mlp")
    done = ModelQuantizer(config(preset)).quantize_model(float_model, None, Reader([sample]))
    assert done is not None
    check(done)
    (found,) = outputs(done, sample, optimise=True)
    assert sqnr(expected[0], found) > 28
