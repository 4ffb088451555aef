"""Types beyond ONNX's Q/DQ, from the config to a file: bfloat16, float16, 32-bit integers and the block formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.core.quantize import fake_quantize
from quark.errors import ConfigError, NonFiniteError
from quark.onnx.config import presets
from quark.onnx.config.config import Config, QConfig, QLayerConfig
from quark.onnx.config.enums import QuantGranularity
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.preset_rows import ROWS
from quark.onnx.config.tensor_specs import BFloat16Spec, Float16Spec, Int32Spec, MXFP4E2M1Spec, UInt32Spec
from quark.onnx.custom_ops import get_library_path
from quark.onnx.quantizer import ModelQuantizer
from quark.onnx_ops.operators import ATTRIBUTES, DOMAIN
from tests.models.onnx_sessions import exact_options
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, run, stored, vectors

MODELS = {"cnn": (cnn, images), "mlp": (mlp, vectors)}
# Least output SQNR in dB: about six for each bit of the mantissa.
LEAST = {"BF16": 40, "FP16": 55, "BFP16": 30, "MX4": 4, "MX6": 15, "MX9": 30, "MXINT8": 28, "MXFP4E2M1": 7}
LEAST |= {"MXFP8E5M2": 13, "MXFP8E4M3": 17, "MXFP6E3M2": 13, "MXFP6E2M3": 18}
LEAST |= {"BF16_BFP16": 35, "BF16_MXINT8": 33, "MX9_INT8": 28}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        return get_library_path()


def run_compiled(model: onnx.ModelProto, feed: dict[str, Any], path: str) -> Any:
    options = exact_options()
    options.register_custom_ops_library(path)
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed)[0]


def make(config: Any, model: onnx.ModelProto, feeds: Any = None) -> onnx.ModelProto:
    made = ModelQuantizer(config).quantize_model(model, None, None if feeds is None else Reader(feeds()))
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    return made


def named(name: str) -> Config:
    return Config(global_quant_config=presets.get_default_config(name))


def of(spec: Any, **options: Any) -> QConfig:
    return QConfig(QLayerConfig(input_tensors=spec(), weight=spec()), **options)


def axes(model: onnx.ModelProto) -> dict[str, int]:
    return {
        node.name.removesuffix("_DequantizeLinear"): next(a.i for a in node.attribute if a.name == "axis")
        for node in model.graph.node
        if node.op_type in ("MXQuantizeDequantize", "BFPQuantizeDequantize")
    }


def test_every_such_preset_is_here() -> None:
    known = {name for name in ROWS if name.startswith(("BF16", "FP16", "BFP16", "MX"))}
    assert set(LEAST) == {name for name in known if "_ADA" not in name and "_MIXED_" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("zoo", MODELS)
@pytest.mark.parametrize("name", LEAST)
def test_presets_run_in_stock_sessions_and_with_the_library(name: str, zoo: str, compiled: str) -> None:
    source, feeds = MODELS[zoo]
    model = make(named(name), source(), feeds)
    feed = feeds()[0]
    found = run(model, feed)
    assert sqnr(run(source(), feed), found) > LEAST[name]
    assert sqnr(found, run_compiled(model, feed, compiled)) > 100
    used = {(node.op_type, node.overload) for node in model.graph.node if node.domain == DOMAIN}
    assert used == {(f.name, f.overload) for f in model.functions} and used
    assert {o.domain for o in model.opset_import} <= {"", DOMAIN, "com.microsoft"}
    for f in model.functions:
        assert {a.name for a in f.attribute_proto} == set(ATTRIBUTES[f.name])


def test_block_formats_need_no_data() -> None:
    make(named("MXFP4E2M1"), mlp())


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Int32Spec, UInt32Spec, Float16Spec])
def test_wide_types_are_nearly_exact(spec: Any, compiled: str) -> None:
    for source, feeds in MODELS.values():
        model = make(of(spec), source(), feeds)
        (feed,) = feeds(1)
        assert sqnr(run(source(), feed), run(model, feed)) > (55 if spec is Float16Spec else 100)
        assert sqnr(run(model, feed), run_compiled(model, feed, compiled)) > 100
        held = stored(model)
        weight = held["fc_w_quantized" if source is cnn else "w1_quantized"]
        assert weight.dtype == {Int32Spec: np.int32, UInt32Spec: np.uint32, Float16Spec: np.float16}[spec]


@pytest.mark.slow
def test_wide_weights_may_have_one_scale_per_channel(compiled: str) -> None:
    weight = Int32Spec(quant_granularity=QuantGranularity.Channel)
    model = make(QConfig(QLayerConfig(input_tensors=Int32Spec(), weight=weight)), cnn(), images)
    (feed,) = images(1)
    assert stored(model)["depth_w_scale"].shape == (16,)
    assert sqnr(run(cnn(), feed), run(model, feed)) > 100
    assert sqnr(run(model, feed), run_compiled(model, feed, compiled)) > 100


def test_names_and_stored_types() -> None:
    model = make(of(BFloat16Spec), mlp())
    nodes = {node.name: node for node in model.graph.node}
    assert nodes["x_QuantizeLinear"].op_type == "ExtendedQuantizeLinear"
    # Both have the scale 1 and the zero point 0, which are written once.
    assert list(nodes["w1_DequantizeLinear"].input) == ["w1_quantized", "w1_scale", "w1_zero_point"]
    assert list(nodes["x_QuantizeLinear"].input) == ["x", "w1_scale", "w1_zero_point"]
    held = stored(model)
    assert held["x_scale"] == 1 and str(held["w1_quantized"].dtype) == "bfloat16" and "w1" not in held
    with pytest.raises(ConfigError, match="quantized already"):
        make(of(BFloat16Spec), model)


@pytest.mark.parametrize("cast", [False, True])
def test_scaled_bfloat16_fills_the_range_of_two(cast: bool, compiled: str) -> None:
    config = of(BFloat16Spec, WeightScaled=True, ActivationScaled=True, BF16QDQToCast=cast)
    feeds = vectors(2)
    model = make(config, mlp(), lambda: feeds)
    held, weight = stored(model), stored(mlp())["w1"]
    assert held["w1_scale"] == np.abs(weight).max() / 2
    assert held["x_scale"] == max(np.abs(feed["x"]).max() for feed in feeds) / 2
    assert np.abs(held["w1_quantized"].astype(np.float32)).max() == 2
    assert sqnr(run(mlp(), feeds[0]), run(model, feeds[0])) > 40
    types = {node.op_type for node in model.graph.node}
    if cast:
        assert {"Cast", "Mul"} <= types and not model.functions
    else:
        assert {f.overload for f in model.functions} == {"bfloat16_tensor"}
        # ONNX Runtime moves a scale of the function into the MatMul behind it.
        assert sqnr(run(model, feeds[0]), run_compiled(model, feeds[0], compiled)) > 60


def test_bfloat16_with_clip_keeps_large_values_finite() -> None:
    huge = {"x": np.full((1, 32), 3.4e38, np.float32)}
    for clip in (False, True):
        for cast in (False, True):
            model = make(of(BFloat16Spec, BF16WithClip=clip, BF16QDQToCast=cast), mlp())
            model.graph.output.append(onnx.ValueInfoProto(name="x_DequantizeLinear_Output"))
            session = onnxruntime.InferenceSession(model.SerializeToString())
            found = session.run(["x_DequantizeLinear_Output"], huge)[0]
            assert (found == (float.fromhex("0x1.fep127") if clip else np.inf)).all()


def test_blocks_lie_along_the_axis_that_is_summed_over() -> None:
    refined = axes(make(named("BFP16"), cnn()))
    assert {refined[n] for n in ("x", "stem_w", "depth_w", "fc_w")} == {1, 0} and refined["fc_w"] == 0
    assert refined["flat"] == 1 and refined["fc_b"] == 0 and refined["y"] == -1
    found = axes(make(named("MXINT8"), mlp()))
    assert (found["x"], found["w1"], found["b1"], found["silu"], found["y"]) == (-1, -2, 0, -1, -1)
    kept = presets.get_default_config("MXINT8")
    kept.extra_options["RefineBlockAxis"] = False
    plain = axes(make(Config(global_quant_config=kept), mlp()))
    assert {plain[n] for n in ("x", "w1", "silu")} == {1} and plain["b1"] == 0


def test_shapes_that_the_file_lacks_are_inferred() -> None:
    bare = cnn()
    del bare.graph.value_info[:]
    assert axes(make(named("BFP16"), bare)) == axes(make(named("BFP16"), cnn()))
    assert "to_bfp_16_2_8x256" in {f.overload for f in make(named("BFP16"), bare).functions}


def test_attention_masks_stay_in_float_in_block_formats() -> None:
    """One -3e38 would take the exponent of its block, and make zeros of the scores beside it."""
    b = Builder()
    lowest = b.constant("lowest", np.array(np.finfo(np.float32).min))
    mask = b.node("Unsqueeze", [b.node("Mul", ["hidden", lowest], "mask"), "first"], "rows")
    b.initializers.append(numpy_helper.from_array(np.array([1]), "first"))
    scores = b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(8, 16)))], "scores")
    b.node("Softmax", [b.node("Add", [scores, mask], "masked")], "y", axis=-1)
    source = b.model({"x": ["n", 3, 8], "hidden": ["n", 16]}, {"y": ["n", 3, 16]})
    model = make(named("MXINT8"), source)
    assert {"scores", "w", "x", "y"} <= set(axes(model)) and {"mask", "rows", "masked"}.isdisjoint(axes(model))
    hidden = np.zeros((2, 16), np.float32)
    hidden[:, 10:] = 1
    feed = {"x": np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32), "hidden": hidden}
    assert sqnr(run(source, feed), run(model, feed)) > 25


def test_gemm_and_transposed_convolution_have_axes_of_their_own() -> None:
    b = Builder()
    up = b.node("ConvTranspose", ["x", b.constant("w", b.random.normal(size=(4, 6, 2, 2)))], "up")
    flat = b.node("Flatten", [up], "flat")
    b.node("Gemm", [flat, b.constant("v", b.random.normal(size=(5, 6 * 25)))], "y", transB=1)
    found = axes(make(named("MXFP4E2M1"), b.model({"x": ["n", 4, 4, 4]}, {"y": ["n", 5]})))
    assert (found["x"], found["w"], found["flat"], found["v"]) == (1, 0, 1, 1)


def test_the_runtime_computes_what_the_core_says() -> None:
    (feed,) = vectors(1)
    model = make(of(MXFP4E2M1Spec, NodesToQuantize=["hidden_node"]), mlp())
    layer = lower(of(MXFP4E2M1Spec)).specs.layer
    assert layer.input is not None and layer.weight is not None

    def along(spec: Any, axis: int) -> Any:
        return replace(spec, granularity=replace(spec.granularity, axis=axis))

    x = fake_quantize(feed["x"], None, along(layer.input, -1))
    product = x @ fake_quantize(stored(mlp())["w1"], None, along(layer.weight, -2))
    model.graph.output.append(onnx.ValueInfoProto(name="hidden_DequantizeLinear_Output"))
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(["hidden_DequantizeLinear_Output"], feed)[0]
    expected = fake_quantize(product, None, along(layer.input, -1))
    assert np.mean(found == expected) > 0.999


def test_old_opsets_are_raised_only_as_far_as_needed() -> None:
    for name, opset in (("BF16", 13), ("MXINT8", 14)):
        old = mlp()
        old.opset_import[0].version = 13
        assert next(o.version for o in make(named(name), old).opset_import if o.domain == "") == opset


def test_weights_must_be_finite_in_every_type() -> None:
    broken = mlp()
    weight = next(i for i in broken.graph.initializer if i.name == "w1")
    array = numpy_helper.to_array(weight).copy()
    array[0, 0] = np.nan
    weight.CopyFrom(numpy_helper.from_array(array, "w1"))
    for name in ("BF16", "BFP16", "MXFP4E2M1"):
        with pytest.raises(NonFiniteError, match="The weight w1 of hidden_node holds NaN"):
            make(named(name), broken)


def test_scalars_have_no_blocks_and_shared_constants_get_names_of_their_own(tmp_path: Path) -> None:
    b = Builder()
    half, weight = b.constant("half", np.array(0.5)), b.constant("w", b.random.normal(size=(8, 8)))
    first = b.node("MatMul", [b.node("Mul", ["x", half], "scaled"), weight], "first")
    b.node("MatMul", [first, weight], "y")
    model = make(named("BFP16"), b.model({"x": ["n", 8]}, {"y": ["n", 8]}))
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names)) and "half_DequantizeLinear" not in names
    assert {"w_DequantizeLinear", "w_DequantizeLinear_y_node"} <= set(names)
    assert sum(node.op_type == "BFPQuantizeDequantize" for node in model.graph.node) == 6
