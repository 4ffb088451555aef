"""What the contract of passes does not say: formulas at their edges, refusals, weights outside the model."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.core.spec import LayerSpec, spec
from quark.errors import ConfigError, NotSupportedError, QuarkError, StructureError
from quark.onnx import ModelQuantizer
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.graph.model_file import infer_shapes, load, opset, read, to_proto
from quark.onnx.graph.pattern import Const, either, match, op, scalar
from quark.onnx.passes import PASSES
from quark.onnx.search.settle import quantize
from quark.onnx_ops.saving import save
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import (
    ZOO,
    Builder,
    Reader,
    branches,
    cnn,
    feed,
    gelus,
    half,
    hard_swish,
    images,
    layer_norms,
    legacy,
    outputs,
    pools,
    shared,
)

convert_opset_version = import_module("quark.onnx.passes.convert_opset_version")
U8S8 = Settings(SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False))))


def types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def with_pass(name: str, argument: object = True) -> Settings:
    """U8S8, and one more pass."""
    return replace(U8S8, passes={name: argument})


def passed(proto: onnx.ModelProto, name: str, *arguments: Any) -> onnx.ModelProto:
    model = read(proto)
    PASSES[name](model, *arguments)
    return to_proto(model)


def test_fused_graphs_hold_the_fused_operators() -> None:
    assert types(passed(gelus(), "fuse_gelu"))[:3] == ["Gelu", "Gelu", "Gelu"]
    kinds = [n.attribute[0].s for n in passed(gelus(), "fuse_gelu").graph.node if n.op_type == "Gelu"]
    assert kinds == [b"none", b"none", b"tanh"]
    assert types(passed(layer_norms(), "fuse_layer_norm")) == ["LayerNormalization"] * 2
    assert types(passed(ZOO["layer_norms18"](), "fuse_layer_norm")) == ["LayerNormalization"] * 2
    assert types(passed(ZOO["instance_norms"](), "fuse_instance_norm")) == ["InstanceNormalization"] * 2
    assert types(passed(ZOO["l2_norms"](), "fuse_l2_norm")) == ["LpNormalization"] * 2 + ["ReduceL2", "Clip", "Div"]


@pytest.mark.parametrize(("shape", "fused"), [([4], []), (["n", 4], ["Gelu"])])
def test_constants_that_add_a_dimension_are_not_fused_away(shape: list[Any], fused: list[str]) -> None:
    b = Builder()
    b.node("Erf", [b.node("Div", ["x", b.constant("root", np.array([[2**0.5]]))], "scaled")], "erf")
    b.node("Mul", ["x", b.node("Add", ["erf", b.constant("one", np.ones((1, 1)))], "gate")], "product")
    b.node("Mul", ["product", b.constant("half", np.array(0.5))], "y")
    proto = b.model({"x": shape}, {"y": [None, 4]}, 20)
    changed = passed(proto, "fuse_gelu")
    assert [name for name in types(changed) if name == "Gelu"] == fused
    assert outputs(changed, feed(proto))[0].shape == outputs(proto, feed(proto))[0].shape


def test_a_fusion_needs_exact_structure() -> None:
    """One constant, one axis, one operand off: no fusion."""
    wrong = gelus()
    for initializer in wrong.graph.initializer:
        if initializer.name == "half":
            initializer.CopyFrom(numpy_helper.from_array(np.float32(0.51), "half"))
    assert "Gelu" not in types(passed(wrong, "fuse_gelu"))
    middle = layer_norms()
    for node in middle.graph.node:
        if node.name == "a_variance_node":
            node.attribute[0].ints[0] = 1
    onnx.checker.check_model(middle)
    assert types(passed(middle, "fuse_layer_norm")).count("LayerNormalization") == 1


def test_the_matcher_binds_names_once_and_tries_both_orders() -> None:
    b = Builder()
    two = b.constant("two", np.array(2.0))
    b.node("Mul", [two, b.node("Add", ["x", b.node("Neg", ["x"], "neg")], "sum")], "y")
    model = ir.from_proto(b.model({"x": ["n", 4]}, {"y": ["n", 4]}))
    last = model.graph[-1]
    found = match(op("Mul", op("Add", op("Neg", "a"), "a"), 2.0), last)
    assert found is not None and found["a"].name == "x" and len(found.nodes) == 3
    assert match(op("Mul", op("Add", op("Neg", "a"), "b"), Const("c")), last) is not None
    assert match(op("Mul", op("Add", "a", "a"), 2.0), last) is None
    assert match(op("Mul", op("Add", "a", "b"), 2.1), last) is None
    assert match(either(op("Div", "a", "b"), op("Mul", "a", "b")), last) is not None
    assert np.isnan(scalar(model.graph.inputs[0])) and scalar(last.inputs[0]) == 2.0


@pytest.mark.parametrize(("height", "width", "kernel"), [(24, 32, [2, 1]), (64, 64, [4, 2]), (23, 23, [23, 1])])
def test_a_large_pool_is_split_where_its_size_has_factors(height: int, width: int, kernel: list[int]) -> None:
    b = Builder()
    b.node("GlobalAveragePool", ["x"], "y")
    proto = b.model({"x": ["n", 2, height, width]}, {"y": ["n", 2, 1, 1]})
    changed = passed(proto, "split_large_pool")
    attributes = {a.name: list(a.ints) for a in changed.graph.node[0].attribute}
    assert attributes["kernel_shape"] in (kernel, kernel[::-1]) and attributes["strides"] == attributes["kernel_shape"]
    sample = feed(proto)
    np.testing.assert_allclose(outputs(changed, sample)[0], outputs(proto, sample)[0], atol=1e-6)


def test_pools_that_are_small_prime_or_open_stay() -> None:
    for size in ([8, 8], [521, 1], ["h", 64]):
        b = Builder()
        b.node("GlobalAveragePool", ["x"], "y")
        proto = b.model({"x": ["n", 2, *size]}, {"y": ["n", 2, 1, 1]})
        assert types(passed(proto, "split_large_pool")) == ["GlobalAveragePool"]


def test_fixed_dimensions_of_an_open_shape_are_computed() -> None:
    b = Builder()
    shape = b.node("Shape", ["x"], "shape")
    batch = b.node("Gather", [shape, b.integers("zero", [0])], "batch")
    ends = b.node("Slice", [shape, b.integers("from", [1]), b.integers("to", [3])], "ends")
    area = b.node("ReduceProd", [ends], "area", keepdims=1)
    b.node("Reshape", ["x", b.node("Concat", [batch, area], "target", axis=0)], "y")
    proto = b.model({"x": ["n", 3, 5]}, {"y": ["n", 15]})
    changed = passed(proto, "simplify")
    assert types(changed) == ["Shape", "Gather", "Concat", "Reshape"]
    sample = feed(proto)
    assert np.array_equal(outputs(changed, sample)[0], outputs(proto, sample)[0])


@pytest.mark.parametrize(
    ("op_type", "attributes", "folded"),
    [
        ("Softmax", {"axis": 0}, True),
        ("Elu", {}, True),
        ("Einsum", {"equation": "ij->ji"}, True),
        ("LayerNormalization", {}, True),
        ("RandomNormalLike", {}, False),
        ("NonZero", {}, False),
    ],
)
def test_any_operator_of_constants_is_computed_unless_it_draws_or_its_size_is_open(
    op_type: str, attributes: dict[str, Any], folded: bool
) -> None:
    b = Builder()
    read = [b.constant(name, b.random.normal(size=(4, 4))) for name in ("v", "gain")[: 1 + (op_type[:5] == "Layer")]]
    made = b.node("Cast", [b.node(op_type, read, "made", **attributes)], "w", to=1)
    b.node("MatMul", ["x", made], "y")
    proto = b.model({"x": ["n", 2 if op_type == "NonZero" else 4]}, {"y": ["n", None]})
    changed = passed(proto, "simplify")
    assert (types(changed) == ["MatMul"]) is folded
    if folded:
        sample = feed(proto)
        np.testing.assert_allclose(outputs(changed, sample)[0], outputs(proto, sample)[0], atol=1e-6)


def test_parts_of_a_constant_are_constants() -> None:
    b = Builder()
    b.nodes.append(onnx.helper.make_node("Split", [b.constant("v", b.random.normal(size=(8, 4)))], ["w", "w2"], axis=0))
    b.node("Add", [b.node("MatMul", ["x", "w"], "h"), b.node("MatMul", ["x", "w2"], "h2")], "y")
    proto = b.model({"x": ["n", 4]}, {"y": ["n", 4]}, 13)
    changed = passed(proto, "simplify")
    assert types(changed) == ["MatMul", "MatMul", "Add"]
    sample = feed(proto)
    assert np.array_equal(outputs(changed, sample)[0], outputs(proto, sample)[0])


@pytest.mark.parametrize("picker", ["Slice", "Gather"])
def test_open_dimensions_that_index_a_constant_stay(picker: str) -> None:
    b = Builder()
    table = b.constant("table", b.random.normal(size=(8, 3)))
    length = b.node("Shape", ["x"], "length", start=0, end=1)
    inputs = [b.integers("from", [0]), length] if picker == "Slice" else [length]
    b.node("Add", ["x", b.node(picker, [table, *inputs], "picked")], "y")
    proto = b.model({"x": ["n", 3]}, {"y": ["n", 3]})
    changed = passed(proto, "simplify")
    assert types(changed) == ["Shape", picker, "Add"]
    sample = feed(proto)
    assert np.array_equal(outputs(changed, sample)[0], outputs(proto, sample)[0])


def test_gemm_whose_bias_is_scaled_keeps_its_batch_norm() -> None:
    b = Builder()
    weight, bias = b.constant("w", b.random.normal(size=(4, 3))), b.constant("c", b.random.normal(size=3))
    parameters = [b.constant(f"p{i}", b.random.uniform(0.5, 1.5, 3)) for i in range(4)]
    b.node("BatchNormalization", [b.node("Gemm", ["x", weight, bias], "g", alpha=2.0, beta=1.0), *parameters], "y")
    proto = b.model({"x": ["n", 4]}, {"y": ["n", 3]})
    folded = passed(proto, "fold_batch_norm")
    assert types(folded) == ["Gemm"]
    sample = feed(proto)
    np.testing.assert_allclose(outputs(folded, sample)[0], outputs(proto, sample)[0], atol=1e-5)
    proto.graph.node[0].attribute[1].f = 0.5
    assert types(passed(proto, "fold_batch_norm")) == ["Gemm", "BatchNormalization"]


@pytest.mark.parametrize("layer", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    ("op_type", "shape", "first", "folded"),
    [
        *((name, shape, False, True) for name in ("Mul", "Div", "Add", "Sub") for shape in ([], [1], [3, 1, 1])),
        *((name, [1, 3, 1, 1], True, True) for name in ("Mul", "Add", "Sub")),
        ("Div", [3, 1, 1], True, False),
        ("Mul", [3], False, False),
        ("Add", [1, 1, 3, 3], False, False),
        ("Add", [1, 1, 3, 1, 1], False, False),
        ("Sub", [2, 3, 1, 1], False, False),
    ],
)
def test_constants_of_each_channel_fold_into_the_convolution(
    layer: str, op_type: str, shape: list[int], first: bool, folded: bool
) -> None:
    b = Builder()
    size = (3, 4, 1, 1) if layer == "Conv" else (4, 3, 1, 1)
    inputs = ["x", b.constant("w", b.random.normal(size=size)), b.constant("bias", b.random.normal(size=3))]
    pair = [b.node(layer, inputs, "sum"), b.constant("c", b.random.uniform(0.5, 2, shape))]
    b.node("Relu", [b.node(op_type, pair[::-1] if first else pair, "moved")], "y")
    proto = b.model({"x": [2, 4, 3, 3]}, {"y": [None] * max(4, len(shape))})
    changed = passed(proto, "fold_batch_norm")
    assert types(changed) == ([layer, "Relu"] if folded else types(proto))
    assert changed.graph.node[-1].input[0] == "moved"
    sample = feed(proto)
    np.testing.assert_allclose(outputs(changed, sample)[0], outputs(proto, sample)[0], atol=1e-5)


def test_a_convolution_that_two_read_keeps_its_constants_and_a_chain_folds_whole() -> None:
    b = Builder()
    weight, parameters = b.constant("w", b.random.normal(size=(3, 4, 1, 1))), b.random.uniform(0.5, 1.5, (4, 3))
    shifted = b.node("Add", [b.node("Conv", ["x", weight], "sum"), b.constant("c", [[[1.0]], [[2.0]], [[3.0]]])], "a")
    normed = b.node("BatchNormalization", [shifted, *(b.constant(f"p{i}", p) for i, p in enumerate(parameters))], "n")
    scaled = b.node("Mul", [b.constant("two", np.array(2.0)), normed], "scaled")
    b.node("Mul", [b.node("Sub", [scaled, b.constant("one", np.array(1.0))], "gate"), scaled], "y")
    proto = b.model({"x": ["n", 4, 5, 5]}, {"y": ["n", 3, 5, 5]})
    changed = passed(proto, "fold_batch_norm")
    assert types(changed) == ["Conv", "Sub", "Mul"]
    sample = feed(proto)
    np.testing.assert_allclose(outputs(changed, sample)[0], outputs(proto, sample)[0], atol=1e-4)


@pytest.mark.parametrize(("last", "left"), [("Conv", []), ("ConvTranspose", []), ("Relu", ["Div", "Mul"])])
def test_factors_of_a_hard_swish_move_into_the_layer_behind_its_shift(last: str, left: list[str]) -> None:
    proto = hard_swish(last)
    model = read(proto)
    infer_shapes(model)
    assert PASSES["fold_factors"](model) == 2 - len(left) and PASSES["fold_factors"](model) == 0
    changed = to_proto(model)
    assert types(changed) == ["Add", "Clip", "Mul", *left, "Add", last]
    sample = feed(proto)
    np.testing.assert_allclose(outputs(changed, sample)[0], outputs(proto, sample)[0], atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1e-30, np.inf, [0.5, 1.0, 2.0, 4.0]])
def test_factors_that_lose_values_or_differ_between_places_stay(factor: Any) -> None:
    b = Builder()
    b.node("Mul", ["x", b.constant("c", np.asarray(factor))], "scaled")
    b.node("Conv", ["scaled", b.constant("w", b.random.normal(size=(3, 4, 1, 1)))], "y")
    model = read(b.model({"x": [1, 4, 4, 4]}, {"y": [1, 3, 4, 4]}))
    assert PASSES["fold_factors"](model) == 0


def test_a_factor_that_another_reader_needs_stays() -> None:
    b = Builder()
    b.node("Mul", ["x", b.constant("c", np.array(0.5))], "scaled")
    summed = b.node("Conv", ["scaled", b.constant("w", b.random.normal(size=(4, 4, 1, 1)))], "sum")
    b.node("Add", ["scaled", summed], "y")
    model = read(b.model({"x": [1, 4, 4, 4]}, {"y": [1, 4, 4, 4]}))
    assert PASSES["fold_factors"](model) == 0


def test_a_weight_that_two_nodes_read_keeps_its_batch_norm() -> None:
    b = Builder()
    weight = b.constant("w", b.random.normal(size=(4, 4, 1, 1)))
    parameters = [b.constant(f"p{i}", b.random.uniform(0.5, 1.5, 4)) for i in range(4)]
    normed = b.node("BatchNormalization", [b.node("Conv", ["x", weight], "one"), *parameters], "normed")
    b.node("Add", [normed, b.node("Conv", ["x", weight], "two")], "y")
    proto = b.model({"x": ["n", 4, 5, 5]}, {"y": ["n", 4, 5, 5]})
    assert "BatchNormalization" in types(passed(proto, "fold_batch_norm"))
    model = read(proto)
    assert PASSES["copy_shared_init"](model) == 1 and PASSES["fold_batch_norm"](model) == 1
    sample = feed(proto)
    np.testing.assert_allclose(outputs(to_proto(model), sample)[0], outputs(proto, sample)[0], atol=1e-5)


@pytest.mark.parametrize(("shape", "axes"), [([2, 3, 4, 5], [1, 2]), ([2, 3, 4, 5], [2]), ([2, 3, 4], [1, 2])])
def test_means_over_other_axes_stay(shape: list[int], axes: list[int]) -> None:
    b = Builder()
    b.node("ReduceMean", ["x"], "y", axes=axes)
    proto = b.model({"x": shape}, {"y": [1 if i in axes else size for i, size in enumerate(shape)]})
    assert types(passed(proto, "convert_reduce_mean")) == ["ReduceMean"]


def test_clip6_becomes_relu_and_differs_only_over_six() -> None:
    proto = cnn()
    changed = passed(proto, "replace_clip6_relu")
    assert "Clip" not in types(changed) and types(changed).count("Relu") == types(proto).count("Relu") + 1


@pytest.mark.parametrize(
    ("low", "peak", "replaced"), [(0.0, 6.0, True), (0.0, 3.0, True), (0.0, 9.0, False), (1.0, 6.0, False)]
)
def test_clip_before_quantization_becomes_relu_where_its_bound_is_the_largest_code(
    low: float, peak: float, replaced: bool
) -> None:
    """With scale peak/255 the bound 6 has code 255, or it has a smaller one, and then Clip stays."""
    b = Builder()
    clip = [b.constant("low", np.array(low)), b.constant("high", np.array(6.0))]
    x = b.node("Clip", ["x", *clip], "clipped")
    scale = b.constant("scale", np.array(peak / 255))
    b.initializers.append(numpy_helper.from_array(np.uint8(0), "zero"))
    b.node("DequantizeLinear", [b.node("QuantizeLinear", [x, scale, "zero"], "q"), scale, "zero"], "y")
    proto = b.model({"x": ["n", 64]}, {"y": ["n", 64]})
    model = read(proto)
    assert PASSES["convert_clip_to_relu"](model) == replaced
    sample = {"x": np.linspace(-9, 9, 128, dtype=np.float32).reshape(2, 64)}
    assert np.array_equal(outputs(to_proto(model), sample)[0], outputs(proto, sample)[0])
    assert PASSES["convert_clip_to_relu"](model) == 0


# Opset ----------------------------------------------------------------------------------------------------------------


def test_the_opset_of_a_model_with_weights_outside_is_converted_without_reading_them(tmp_path: Path) -> None:
    source = tmp_path / "old.onnx"
    onnx.save(pools(11), source, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = read(source)
    assert PASSES["convert_opset_version"](model, 13) == 1
    assert opset(model) == 13 and model.ir_version >= 7
    weight = model.graph.initializers["left_w"].const_value
    assert not isinstance(weight, ir.ExternalTensor) or weight.location == "w.bin"
    big = Builder()
    big.node("MatMul", ["x", big.constant("m", np.ones((32, 32)))], "y")
    onnx.save(big.model({"x": [1, 32]}, {"y": [1, 32]}, 11), source, save_as_external_data=True, location="m.bin",
              size_threshold=0)  # fmt: skip
    model = read(source)
    PASSES["convert_opset_version"](model, 13)
    assert isinstance(model.graph.initializers["m"].const_value, ir.ExternalTensor)
    save(model, tmp_path / "new.onnx")
    assert np.array_equal(outputs(str(tmp_path / "new.onnx"), {"x": np.ones((1, 32), np.float32)})[0][0], [32.0] * 32)


@pytest.mark.parametrize("version", [7, 8, 9, 10, 11, 12])
def test_old_models_are_quantized(version: int, tmp_path: Path) -> None:
    """IR 3, initializers as inputs, attributes for bounds, no names."""
    proto = legacy(version) if version < 11 else pools(version)
    path = tmp_path / "out.onnx"
    data = [feed(proto, seed) for seed in range(3)]
    save(quantize(load(proto), U8S8, Reader(data)), path)
    written = onnx.load(path)
    assert written.opset_import[0].version == 13 and "QuantizeLinear" in types(written)
    assert [v.name for v in written.graph.input] == ["x"] and all(node.name for node in written.graph.node)
    expected, found = outputs(proto, data[0])[0], outputs(str(path), data[0])[0]
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_large_weights_that_are_inputs_stay_inputs() -> None:
    proto = legacy(8)
    changed = passed(proto, "convert_opset_version", 13)
    assert [v.name for v in changed.graph.input] == [v.name for v in proto.graph.input]
    assert {i.name for i in changed.graph.initializer} >= {i.name for i in proto.graph.initializer}
    np.testing.assert_allclose(outputs(changed, feed(proto))[0], outputs(proto, feed(proto))[0], atol=1e-5)


def test_the_opset_that_is_asked_for_must_do() -> None:
    low, high = (with_pass("convert_opset_version", version) for version in (11, 19))
    with pytest.raises(ConfigError, match="ConvertOpsetVersion=11.*needs opset 13"):
        quantize(load(cnn()), low, Reader(images()))
    assert opset(quantize(load(cnn()), high, Reader(images()))) == 19


def test_what_cannot_be_converted_is_named() -> None:
    function = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])],
                                    [helper.make_opsetid("", 11)])  # fmt: skip
    b = Builder()
    b.nodes.append(helper.make_node("F", ["x"], ["y"], domain="own"))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("own", 1)]
    proto = helper.make_model(helper.make_graph(b.nodes, "g", info[:1], info[1:]), opset_imports=imports,
                              functions=[function], ir_version=9)  # fmt: skip
    with pytest.raises(NotSupportedError, match="local functions \\(F\\)"):
        passed(proto, "convert_opset_version", 13)
    with pytest.raises(QuarkError, match="opset 17 and cannot be converted to 99"):
        passed(cnn(), "convert_opset_version", 99)


def resized(mode: str, scales: list[float], version: int, in_body: bool = False) -> onnx.ModelProto:
    """A Resize of opset 10, or an Upsample, alone or in both bodies of an If."""
    b = Builder()
    value = b.constant("s", np.array(scales, np.float32))
    op_type = "Resize" if version == 10 else "Upsample"
    if not in_body:
        b.node(op_type, ["x", value], "y", mode=mode)
        return b.model({"x": [1, 2, 5, 6]}, {"y": [None] * 4}, version)
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, [None] * 4)
    body = helper.make_graph([helper.make_node(op_type, ["x", value], ["o"], mode=mode)], "body", [], [out])
    b.node("ReduceMax", ["x"], "top", keepdims=0)
    b.node("Cast", ["top"], "c", to=int(TensorProto.BOOL))
    b.node("If", ["c"], "y", then_branch=body, else_branch=body)
    return b.model({"x": [1, 2, 5, 6]}, {"y": [None] * 4}, version)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("version", [9, 10])
@pytest.mark.parametrize("in_body", [False, True])
def test_old_resizes_keep_how_they_place_pixels(mode: str, version: int, in_body: bool) -> None:
    for scales in ([1, 1, 1.5, 1.7], [1, 1, 3, 3], *([[1, 1, 0.6, 0.7]] if version == 10 else [])):
        proto = resized(mode, scales, version, in_body)
        changed = passed(proto, "convert_opset_version", 13)
        np.testing.assert_allclose(outputs(changed, feed(proto))[0], outputs(proto, feed(proto))[0], atol=1e-6)


@pytest.mark.parametrize("axis", [None, 0, 2, -1])
def test_hardmax_keeps_the_axes_that_it_spans(axis: int | None) -> None:
    b = Builder()
    b.node("Hardmax", ["x"], "y", **({} if axis is None else {"axis": axis}))
    proto = b.model({"x": [2, 3, 4]}, {"y": [2, 3, 4]}, 11)
    changed = passed(proto, "convert_opset_version", 13)
    assert np.array_equal(outputs(changed, feed(proto))[0], outputs(proto, feed(proto))[0])


def test_a_conversion_that_changes_the_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_opset_version, "_keep_meaning", lambda *arguments: None)
    with pytest.raises(StructureError, match="opset 10 and cannot be converted to 13: its output 'y' would change"):
        passed(resized("linear", [1, 1, 3, 3], 10), "convert_opset_version", 13)


# Shapes, layout, types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z:[1,3,16,16]", "'z', no input and no output"),
        ("x:[1,3,16]", r"x is .*not \[1, 3, 16\]"),
        ("x:[1,4,16,16]", r"not \[1, 4, 16, 16\]"),
        ("x=[1,3]", "is no shape"),
        ("x:[1,n]", "is no shape"),
        ("", "names no input"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        passed(cnn(), "fix_shapes", text)


def test_a_fixed_dimension_is_fixed_everywhere() -> None:
    fixed = passed(cnn(), "fix_shapes", " x : [2, 3,16,16]; ")
    for value in (*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info):
        sizes = value.type.tensor_type.shape.dim
        assert all(d.dim_value > 0 for d in sizes), value.name
    assert fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value == 2


def sizes_of(value: onnx.ValueInfoProto) -> list[int]:
    return [d.dim_value for d in value.type.tensor_type.shape.dim]


def test_shapes_of_outputs_fix_inputs_and_may_not_contradict_them() -> None:
    named = cnn().graph.output[0]
    width = sizes_of(named)[-1]
    text = f"x:[2,3,16,16];{named.name}:[2,{width}]"
    for given in (text, f"{named.name}:[2,{width}]"):
        fixed = passed(cnn(), "fix_shapes", given)
        assert sizes_of(fixed.graph.input[0]) == [2, 3, 16, 16] and sizes_of(fixed.graph.output[0]) == [2, width]
    for wrong in (f"x:[2,3,16,16];{named.name}:[3,{width}]", f"{named.name}:[2,{width + 1}]"):
        with pytest.raises(ConfigError, match=f"FixShapes: {named.name} is"):
            passed(cnn(), "fix_shapes", wrong)
    with pytest.raises(ConfigError, match="no input and no output"):
        passed(cnn(), "fix_shapes", "stem:[1,2]")


def test_a_shape_of_an_output_stands_where_nothing_follows() -> None:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", infos[:1], infos[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    fixed = passed(model, "fix_shapes", "x:[3,4];y:[3,4]")
    assert sizes_of(fixed.graph.output[0]) == [3, 4]
    for wrong in ("x:[3,4];y:[5,4]", "x:[3,4];y:[3]"):
        with pytest.raises(ConfigError, match="FixShapes: y is"):
            passed(model, "fix_shapes", wrong)


def test_an_output_that_follows_from_the_input_is_checked_against_it() -> None:
    """Its declared dimension has a name of its own; the shape that is inferred shows that it cannot be 5."""
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    infos.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4]))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert sizes_of(passed(model, "fix_shapes", "x:[3,4];y:[3,4]").graph.output[0]) == [3, 4]
    with pytest.raises(ConfigError, match="FixShapes: y is"):
        passed(model, "fix_shapes", "x:[3,4];y:[5,4]")


def test_a_fixed_dimension_is_fixed_behind_operators_that_nobody_knows() -> None:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", infos[:1], infos[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    fixed = passed(helper.make_model(graph, opset_imports=imports, ir_version=9), "fix_shapes", "x:[3,4]")
    assert [d.dim_value for d in fixed.graph.output[0].type.tensor_type.shape.dim] == [3, 4]


def test_nhwc_inputs() -> None:
    changed = passed(cnn(), "convert_nchw_to_nhwc")
    assert [d.dim_value or d.dim_param for d in changed.graph.input[0].type.tensor_type.shape.dim] == ["n", 16, 16, 3]
    settings = with_pass("convert_nchw_to_nhwc")
    data = [{"x": sample["x"].transpose(0, 2, 3, 1)} for sample in images()]
    quantized = to_proto(quantize(load(cnn()), settings, Reader(data)))
    expected, found = outputs(cnn(), images()[0])[0], outputs(quantized, data[0])[0]
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    with pytest.raises(ConfigError, match="no input has four dimensions"):
        passed(gelus(), "convert_nchw_to_nhwc")


def test_float16_models_are_quantized_in_float32_where_asked() -> None:
    data = [feed(half(), seed) for seed in range(3)]
    with pytest.raises(NotSupportedError, match=r"x is float16.*ConvertFP16ToFP32=True"):
        quantize(load(half()), U8S8, Reader(data))
    wide = [{name: value.astype(np.float32) for name, value in sample.items()} for sample in data]
    settings = with_pass("convert_fp16_to_fp32")
    quantized = to_proto(quantize(load(half()), settings, Reader(wide)))
    expected, found = outputs(half(), data[0])[0], outputs(quantized, wide[0])[0]
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 0.02


# Sharing and bodies ---------------------------------------------------------------------------------------------------


def test_shared_initializers_are_copied_for_the_op_types_that_are_named() -> None:
    proto = shared()
    onnx.checker.check_model(proto)
    model = read(proto)
    assert PASSES["copy_bias_init"](model) == 2
    biases = [node.inputs[2] for node in model.graph if node.op_type in ("Conv", "Gemm")]
    assert [value.name for value in biases if value] == ["b", "b_two_node", "b_gemm_node"]
    arrays = [value.const_value.numpy() for value in biases if value and value.const_value]
    assert all(np.array_equal(array, arrays[0]) for array in arrays)
    only = read(proto)
    assert PASSES["copy_shared_init"](only, ("MatMul",)) == 1
    assert only.graph.node("y_node").inputs[1].name == "m_y_node"  # type: ignore[union-attr]


def test_initializers_that_stay_inputs_are_no_constants() -> None:
    proto = legacy()
    settings = with_pass("remove_input_init", False)
    quantized = to_proto(quantize(load(proto), settings, Reader([feed(proto)])))
    assert "a_w" in {value.name for value in quantized.graph.input} & {i.name for i in quantized.graph.initializer}
    twice = {**feed(proto), "a_w": 2 * numpy_helper.to_array(proto.graph.initializer[0])}
    assert not np.allclose(outputs(quantized, twice)[0], outputs(quantized, feed(proto))[0])


@pytest.mark.parametrize("version", [11, 17])
def test_models_with_if_are_quantized_around_the_bodies(version: int) -> None:
    proto = branches(version)
    data = [feed(proto, seed) for seed in range(4)]
    quantized = to_proto(quantize(load(proto), U8S8, Reader(data)))
    onnx.checker.check_model(quantized, full_check=True)
    expected, found = outputs(proto, data[0])[0], outputs(quantized, data[0])[0]
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def decoded(settings: Settings, proto: onnx.ModelProto) -> set[str]:
    quantized = quantize(load(proto), settings, Reader([feed(proto)]))
    return {node.name or "" for node in quantized.graph if node.op_type == "DequantizeLinear"}


def test_scopes_speak_of_the_nodes_that_the_user_knows() -> None:
    """Nodes that passes remove can be excluded; what takes their place is excluded with them."""
    assert decoded(replace(U8S8, specs=replace(U8S8.specs, exclude=("a_norm_node", "^b_.*"))), cnn())
    fused = replace(U8S8, specs=replace(U8S8.specs, exclude=((("a_div_node",), ("a_node",)),)))
    assert "x_DequantizeLinear" in decoded(U8S8, gelus())
    assert "x_DequantizeLinear" not in decoded(fused, gelus())
    whole = with_pass("convert_split_to_slice")
    parts = replace(whole, specs=replace(U8S8.specs, exclude=("split", "pool_node", "kept_node", "dropped_node")))
    assert not {name for name in decoded(parts, pools()) if name.startswith("part_1")}
    assert {name for name in decoded(whole, pools()) if name.startswith("part_1")}


def test_nodes_to_quantize_may_be_among_those_that_go() -> None:
    assert "a_w_DequantizeLinear" in decoded(
        replace(U8S8, specs=replace(U8S8.specs, nodes=("a_conv_node", "a_norm_node"))), cnn()
    )
    with pytest.raises(ConfigError, match="passes removed a_norm_node"):
        decoded(replace(U8S8, specs=replace(U8S8.specs, nodes=("a_norm_node",))), cnn())
    with pytest.raises(ConfigError, match="NodesToQuantize.*b_nor"):
        decoded(replace(U8S8, specs=replace(U8S8.specs, nodes=("b_nor",))), cnn())


def test_a_scale_of_another_shape_is_no_layer_normalization() -> None:
    proto = layer_norms()
    for initializer in proto.graph.initializer:
        if initializer.name == "a_g":
            initializer.CopyFrom(numpy_helper.from_array(np.full(1, 2.0, np.float32), "a_g"))
    assert types(passed(proto, "fuse_layer_norm")).count("LayerNormalization") == 1


def sized(op_type: str, *constants: Any) -> onnx.ModelProto:
    """A model with a node of constants that gives far more than they hold."""
    b = odd.Odd()
    for index, array in enumerate(constants):
        b.initializers.append(numpy_helper.from_array(np.asarray(array), f"c{index}"))
    b.node(op_type, [f"c{index}" for index in range(len(constants))], "large")
    b.raw("Shape", ["large"], ["size"])
    b.node("Identity", ["x"], "y")
    return b.finish(odd.ROW, {"y": ["n", 8], "size": (TensorProto.INT64, [None])})


@pytest.mark.parametrize(
    ("op_type", "constants"),
    [
        ("ConstantOfShape", [np.array([1 << 20, 1 << 20])]),
        ("Expand", [np.ones(1, np.float32), np.array([1 << 20, 1 << 20])]),
        ("Tile", [np.ones((1, 1), np.float32), np.array([1 << 20, 1 << 20])]),
        ("Range", [np.array(0), np.array(1 << 40), np.array(1)]),
        ("Range", [np.array(0.0), np.array(np.inf), np.array(1.0)]),
        ("Add", [np.ones((1 << 17, 1), np.float32), np.ones((1, 1 << 17), np.float32)]),
    ],
)
def test_what_would_fill_the_memory_is_not_computed(op_type: str, constants: list[Any]) -> None:
    model = read(sized(op_type, *constants))
    PASSES["simplify"](model)
    assert "large_node" in {node.name for node in model.graph}


def test_whatever_the_converter_of_onnx_says_is_one_error() -> None:
    model = odd.another_domain()
    del model.opset_import[1]
    with pytest.raises(QuarkError, match="opset 17 and cannot be converted to 21: .*com.microsoft"):
        PASSES["convert_opset_version"](read(model), 21)


@pytest.mark.parametrize("kind", ["Conv", "Relu", "MaxPool"])
def test_factors_behind_a_concat_go_into_what_it_joins(kind: str) -> None:
    """A BatchNormalization written out behind branches of very different size: each keeps a scale of its own."""
    b = Builder()
    parts, sizes = [], [100, 0.01, 1]
    for name, size in zip("acd", sizes, strict=True):
        weight = b.constant(f"{name}_w", b.random.normal(0, 0.3, (8, 3, 3, 3)) * size)
        parts.append(b.node("Conv", ["x", weight], f"{name}_conv", pads=[1] * 4))
        if kind == "Relu":
            parts.append(b.node("Relu", [parts.pop()], name))
    if kind == "MaxPool":
        parts.append(b.node("MaxPool", ["x"], "pooled", kernel_shape=[3, 3], pads=[1] * 4))
    channels = 24 + 3 * (kind == "MaxPool")
    factor = np.concatenate([1 / np.repeat(sizes, 8), np.ones(3)])[:channels].reshape(1, -1, 1, 1)
    scaled = b.node("Mul", [b.node("Concat", parts, "joined", axis=1), b.constant("f", factor)], "scaled")
    b.node("Add", [scaled, b.constant("s", b.random.normal(size=factor.shape))], "y")
    source = b.model({"x": ["n", 3, 16, 16]}, {"y": ["n", channels, 16, 16]})
    folded = passed(source, "fold_batch_norm")
    sample = {"x": b.random.normal(size=(2, 3, 16, 16)).astype(np.float32)}
    np.testing.assert_allclose(outputs(folded, sample)[0], outputs(source, sample)[0], rtol=1e-4, atol=1e-4)
    left = [node.op_type for node in folded.graph.node if node.op_type in ("Mul", "Add")]
    assert left == {"Conv": [], "Relu": ["Add"], "MaxPool": ["Add"]}[kind]
    done = to_proto(quantize(load(source), U8S8, Reader([sample])))
    assert sqnr(outputs(source, sample)[0], outputs(done, sample)[0]) > 30


@pytest.mark.parametrize("norm", ["ReduceL2", "Sqrt"])
@pytest.mark.parametrize("preset", ["INT8_CPU_DYNAMIC", "INT8_CPU_WEIGHTS", "A8W8"])
def test_weights_that_follow_from_constants_are_weights(norm: str, preset: str) -> None:
    """Weight norm, as PyTorch writes it: w = g v / |v|, by an operator of its own or as a root of a sum."""
    b = Builder()
    v, g = b.constant("v", b.random.normal(0, 1, (16, 8, 3))), b.constant("g", b.random.uniform(0.5, 2, (16, 1, 1)))
    if norm == "ReduceL2":
        length = b.node("ReduceL2", [v], "length", axes=[1, 2])
    else:
        squares = b.node("ReduceSum", [b.node("Mul", [v, v], "square"), b.integers("axes", [1, 2])], "squares")
        length = b.node("Sqrt", [squares], "length")
    weight = b.node("Mul", [g, b.node("Div", [v, length], "direction")], "w")
    proto = b.model({"x": ["n", 8, 32]}, {b.node("Conv", ["x", weight], "y"): ["n", 16, 30]})
    sample = {"x": b.random.normal(0, 1, (2, 8, 32)).astype(np.float32)}
    quantized = ModelQuantizer(preset).quantize_model(proto, None, [sample])
    assert quantized is not None and not {"Div", "ReduceL2", "Sqrt"} & set(types(quantized))
    assert 30 < sqnr(outputs(proto, sample)[0], outputs(quantized, sample)[0]) < 60
