"""What ONNX Runtime fuses: every reason of the table, caused and cured, with the runtime as the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, spec
from quark.errors import FormatError
from quark.onnx import quantize_dynamic
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.evaluation.ort_fusion import Fusion, inspect_fusion
from quark.onnx.evaluation.ort_fusion_rules import REASONS
from quark.onnx.graph.model_file import load
from quark.onnx.search.settle import quantize
from quark.onnx_ops.saving import save
from tests.models.onnx_zoo import Reader, cnn, images, mlp, vectors

KINDS = {name: getattr(TensorProto, name.upper()) for name in ("uint8", "int8", "uint16", "int16", "int32", "int4")}


class Graph:
    """A QDQ graph by hand; activations have scale 0.05, weights 0.01."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, value: Any, kind: str) -> str:
        array = np.asarray(value)
        tensor = helper.make_tensor(name, KINDS[kind], array.shape, array.ravel().tolist())
        self.constants.append(tensor)
        return name

    def number(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def node(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{op.lower()}_out"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"the_{op.lower()}", **attributes))
        return output

    def q(self, x: str, kind: str = "uint8", zero: int = 0) -> str:
        """Q and DQ after a tensor."""
        parameters = [self.number(f"{x}_s", 0.05), self.constant(f"{x}_z", zero, kind)]
        self.nodes.append(helper.make_node("QuantizeLinear", [x, *parameters], [f"{x}_q"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{x}_q", *parameters], [f"{x}_dq"]))
        return f"{x}_dq"

    def w(self, name: str, shape: list[int], kind: str = "int8", scale: float = 0.01) -> str:
        """A constant behind DQ."""
        codes = np.random.default_rng(ord(name)).integers(-7 if kind != "uint8" else 1, 7, shape)
        inputs = [
            self.constant(name, codes, kind),
            self.number(f"{name}_s", scale),
            self.constant(f"{name}_z", 0, kind),
        ]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}_dq"]))
        return f"{name}_dq"

    def write(self, path: Path, outputs: list[str], shape: list[int]) -> Path:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(model, path)
        return path


IMAGE, ROWS = [1, 8, 8, 8], [4, 32]


def conv(g: Graph, x: str, bias: str = "", weight: str = "") -> str:
    inputs = [x, weight or g.w("w", [8, 8, 3, 3]), *([bias] if bias else [])]
    return g.node("Conv", inputs, pads=[1, 1, 1, 1])


def no_kernel(g: Graph, cured: bool) -> list[str]:
    return [g.q(g.node("Sigmoid" if cured else "Tanh", [g.q("x")]))]


def wide(g: Graph, cured: bool) -> list[str]:
    kind = "uint8" if cured else "uint16"
    return [g.q(conv(g, g.q("x", kind)), kind)]


def narrow(g: Graph, cured: bool) -> list[str]:
    return [g.q(conv(g, g.q("x"), weight=g.w("w", [8, 8, 3, 3], "int8" if cured else "int4")))]


def weight_only_conv(g: Graph, cured: bool) -> list[str]:
    return [g.q(conv(g, g.q("x")))] if cured else [conv(g, "x")]


def weight_only_transposed(g: Graph, cured: bool) -> list[str]:
    return [g.node("Gemm", ["x", g.w("w", [16, 32] if not cured else [32, 16])], transB=int(not cured))]


def weight_only_shared(g: Graph, cured: bool) -> list[str]:
    first = g.node("MatMul", ["x", g.w("w", [32, 32])])
    other = g.w("v", [32, 32], scale=0.02) if cured else "w_dq"
    g.nodes.append(helper.make_node("MatMul", [first, other], ["second"], name="second"))
    return ["second"]


def weight_only(g: Graph, cured: bool) -> list[str]:
    return [g.node("MatMul", ["x", g.w("w", [32, 16] if cured else [2, 32, 16])])]


def constant_data(g: Graph, cured: bool) -> list[str]:
    g.constants.append(numpy_helper.from_array(np.array([1, 3]), "ids"))
    return [g.q(g.node("Gather", [g.q("x") if cured else g.w("w", [8, 32], "uint8"), "ids"]))]


def float_input(g: Graph, cured: bool) -> list[str]:
    half = g.node("Abs", ["x"])
    return [g.q(g.node("Mul", [g.q("x"), g.q(half) if cured else half]))]


def float_constant(g: Graph, cured: bool) -> list[str]:
    return [g.q(g.node("Add", [g.q("x"), g.w("c", [8, 8], "uint8") if cured else g.number("c", np.ones((8, 8)))]))]


def bias(g: Graph, cured: bool) -> list[str]:
    y = g.node("MatMul", [g.q("x"), g.w("w", [32, 16])])
    return [g.node("Add", [y, g.w("b", [16], "int32", 0.05 * 0.01) if cured else g.number("b", np.ones(16))])]


def mixed(g: Graph, cured: bool) -> list[str]:
    return [g.q(g.node("Add", [g.q("x"), g.w("c", [8, 8], "uint8" if cured else "int8")]))]


def int8_constant(g: Graph, cured: bool) -> list[str]:
    kind = "uint8" if cured else "int8"
    return [g.q(g.node("Add", [g.q("x", kind, 100), g.w("c", [8, 8], kind)]), kind, 100)]


def relu(g: Graph, cured: bool) -> list[str]:
    return [g.q(g.node("Relu", [conv(g, g.q("x"))]), zero=0 if cured else 12)]


def clip(g: Graph, cured: bool) -> list[str]:
    # The codes reach 0.05 * 255 = 12.75.
    bounds = [g.number("low", 0.0), g.number("high", 13.0 if cured else 6.0)]
    return [g.q(g.node("Clip", [conv(g, g.q("x")), *bounds]))]


def activation(g: Graph, cured: bool) -> list[str]:
    y = conv(g, g.q("x"))
    return [g.q(g.node("LeakyRelu", [g.q(y, zero=100) if cured else y], alpha=0.1), zero=100)]


def float_reader(g: Graph, cured: bool) -> list[str]:
    y = conv(g, g.q("x"))
    decoded = g.q(y)
    return [decoded, g.node("Abs", [decoded if cured else y])]


def branch(g: Graph, cured: bool) -> list[str]:
    kind = "uint8" if cured else "int8"
    x = g.q("x", kind, 100)
    return [g.q(conv(g, x), kind, 100), g.node("Abs", [x])]


CASES: dict[str, tuple[Callable[[Graph, bool], list[str]], str, list[int]]] = {
    "no_kernel": (no_kernel, "", ROWS),
    "wide": (wide, "the_conv", IMAGE),
    "narrow": (narrow, "the_conv", IMAGE),
    "weight_only_conv": (weight_only_conv, "the_conv", IMAGE),
    "weight_only_transposed": (weight_only_transposed, "the_gemm", ROWS),
    "weight_only_shared": (weight_only_shared, "the_matmul", ROWS),
    "weight_only": (weight_only, "the_matmul", ROWS),
    "constant_data": (constant_data, "the_gather", ROWS),
    "float_input": (float_input, "the_mul", IMAGE),
    "float_constant": (float_constant, "the_add", IMAGE),
    "bias": (bias, "the_matmul", ROWS),
    "mixed": (mixed, "the_add", IMAGE),
    "int8_constant": (int8_constant, "the_add", IMAGE),
    "relu": (relu, "the_conv", IMAGE),
    "clip": (clip, "the_conv", IMAGE),
    "activation": (activation, "the_conv", IMAGE),
    "float_reader": (float_reader, "the_conv", IMAGE),
    "branch": (branch, "the_conv", IMAGE),
}


def row(name: str, cured: bool, path: Path) -> Fusion:
    make, node, shape = CASES[name]
    graph = Graph()
    found = inspect_fusion(graph.write(path, make(graph, cured), shape))
    return next(fusion for fusion in found if node in ("", fusion.node))


def test_there_is_a_case_for_every_reason() -> None:
    assert list(CASES) == list(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_the_runtime_leaves_it_in_float_for_this_reason_and_fuses_without(name: str, tmp_path: Path) -> None:
    trapped = row(name, False, tmp_path / "trapped.onnx")
    text = REASONS[name].text
    assert not trapped.integer and trapped.advice == REASONS[name].advice, trapped
    assert trapped.reason.startswith(text.split("{")[0]) and trapped.reason.endswith(text.split("}")[-1])
    assert "{" not in trapped.reason
    cured = row(name, True, tmp_path / "cured.onnx")
    assert cured.integer and cured.reason == "" == cured.advice, cured


@pytest.mark.parametrize(
    ("kind", "scale", "message"),
    [("int8", 0.0005, "is not int32"), ("int32", 0.0006, "20% off"), ("int32", 0.0005, "")],
)
def test_a_bias_must_be_int32_under_the_product_of_scales(
    kind: str, scale: float, message: str, tmp_path: Path
) -> None:
    graph = Graph()
    outputs = [graph.q(conv(graph, graph.q("x"), graph.w("b", [8], kind, scale)))]
    (found,) = inspect_fusion(graph.write(tmp_path / "m.onnx", outputs, IMAGE))
    assert found.integer == (message == "") and message in found.reason


def test_two_weights_of_one_scale_are_merged_and_stay_in_float(tmp_path: Path) -> None:
    graph = Graph()
    first = graph.node("MatMul", ["x", graph.w("w", [32, 32])])
    graph.nodes.append(helper.make_node("MatMul", [first, graph.w("v", [32, 32])], ["y"], name="second"))
    found = inspect_fusion(graph.write(tmp_path / "m.onnx", ["y"], ROWS))
    assert [(row.integer, row.advice) for row in found] == [(False, REASONS["weight_only_shared"].advice)] * 2


@pytest.mark.parametrize(("constant", "channels"), [("weight", 8), ("weight", 32), ("bias", 8)])
def test_a_conv_with_float_constants_and_a_float_output_is_not_taken_for_an_integer_one(
    constant: str, channels: int, tmp_path: Path
) -> None:
    graph = Graph()
    x, shape = graph.q("x"), [channels, channels, 3, 3]
    if constant == "weight":
        y = conv(graph, x, weight=graph.number("c", np.ones(shape)))
    else:
        y = conv(graph, x, graph.number("c", np.ones(channels)))
    (found,) = inspect_fusion(graph.write(tmp_path / "m.onnx", [y], [1, channels, 8, 8]))
    assert not found.integer and found.reason == "Its output is read without QuantizeLinear by the caller of the model."


def test_a_linear_layer_with_a_float_bias_is_computed_in_float(tmp_path: Path) -> None:
    graph = Graph()
    y = graph.node("MatMul", [graph.q("x"), graph.w("w", [32, 16])])
    y = graph.node("Add", [y, graph.number("b", np.ones(16))])
    (found,) = inspect_fusion(graph.write(tmp_path / "m.onnx", [y], ROWS))
    assert (found.node, found.kernel, found.integer) == ("the_matmul", "Gemm", False)
    assert found.reason == "The bias is in float."


S8, U8, CHANNEL = spec("int8"), spec("uint8", symmetric=False), spec("int8", PerChannel(0))


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("make", [cnn, mlp])
def test_everything_that_the_target_ort_x64_quantizes_is_fused(make: Any, external: bool, tmp_path: Path) -> None:
    settings = Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=U8)), qdq=QDQSettings(target="ort_x64"))
    feeds = images() if make is cnn else vectors()
    save(quantize(load(make()), settings, Reader(feeds)), tmp_path / "m.onnx", external_data=external)
    found = inspect_fusion(tmp_path / "m.onnx")
    assert [row.node for row in found if not row.integer] == []
    expected = {"stem_conv_node": "QLinearConv", "sum_node": "QLinearAdd", "y_node": "QGemm"} if make is cnn else {
        "hidden_node": "QGemm", "biased_node": "QGemm", "y_node": "MatMulIntegerToFloat"}  # fmt: skip
    kernels = {row.node: row.kernel for row in found}
    assert {name: kernels[name] for name in expected} == expected
    assert [file.name for file in tmp_path.iterdir() if file.suffix not in (".onnx", ".data")] == []


def test_symmetric_int8_stays_in_float_around_relu_and_branches(tmp_path: Path) -> None:
    settings = Settings(
        SpecSettings(LayerSpec(weight=S8, input=S8)), qdq=QDQSettings(align=("Concat",), contrib_domain=True)
    )
    save(quantize(load(cnn()), settings, Reader(images())), tmp_path / "m.onnx")
    reasons = {row.node: row.reason for row in inspect_fusion(tmp_path / "m.onnx")}
    assert "Relu" in reasons["stem_conv_node"] and "Clip" in reasons["point_conv_node"]
    assert "int8 tensor depth" in reasons["both_node"]
    assert reasons["b_conv_node"] == reasons["y_node"] == reasons["flat_node"] == ""


def test_an_add_beside_a_linear_layer_counts_where_it_was_merged(tmp_path: Path) -> None:
    """A bias goes into the layer's integer kernel; a residual that LayerNormalization swallows stays in float."""
    graph = Graph()
    x, ones = graph.q("x"), [graph.number(name, np.ones(32)) for name in ("g", "h")]
    y = graph.node("MatMul", [x, graph.w("w", [32, 32])])
    y = graph.node("Add", [y, graph.w("b", [32], "int32", 0.05 * 0.01)], "biased")
    graph.nodes.append(helper.make_node("Add", [y, x], ["sum"], name="residual"))
    y = graph.node("LayerNormalization", ["sum", *ones])
    found = {row.node: row for row in inspect_fusion(graph.write(tmp_path / "m.onnx", [y], [2, 4, 32]))}
    assert {name: (row.kernel, row.integer) for name, row in found.items()} == {
        "the_matmul": ("QGemm", True), "the_add": ("QGemm", True),
        "residual": ("SkipLayerNormalization", False),
    }  # fmt: skip
    assert found["residual"].reason == "The input biased is not quantized."


@pytest.mark.parametrize(
    ("make", "kernels", "in_float"),
    [(mlp, {"DynamicQuantizeMatMul"}, []), (cnn, {"ConvInteger"}, ["depth_conv_node"])],
)
def test_operators_that_are_integer_by_themselves_are_listed(
    make: Any, kernels: set[str], in_float: list[str], tmp_path: Path
) -> None:
    quantize_dynamic(make(), tmp_path / "m.onnx")
    found = inspect_fusion(tmp_path / "m.onnx")
    # A depthwise convolution has codes for its weight alone.
    assert [row.node for row in found if not row.integer] == in_float
    assert kernels <= {row.kernel for row in found}


def test_nodes_of_bodies_are_listed(tmp_path: Path) -> None:
    """One body reads a weight of its own, the other one a weight around it, which is a float tensor to its kernel."""
    graph, branches = Graph(), {}
    outside = graph.w("w", [32, 32])
    for branch in ("then", "else"):
        body = Graph()
        weight = body.w("v", [32, 32]) if branch == "then" else outside
        made = body.node("MatMul", [body.q("x"), weight], f"{branch}_y")
        body.nodes[-1].name = f"{branch}_matmul"
        output = helper.make_tensor_value_info(body.q(made), TensorProto.FLOAT, None)
        branches[f"{branch}_branch"] = helper.make_graph(body.nodes, branch, [], [output], body.constants)
    positive = graph.node("Cast", [graph.node("ReduceMax", ["x"], keepdims=0)], to=TensorProto.BOOL)
    graph.nodes.append(helper.make_node("If", [positive], ["y"], **branches))
    found = inspect_fusion(graph.write(tmp_path / "m.onnx", ["y"], ROWS))
    assert {row.node: (row.kernel, row.integer) for row in found} == {
        "then_matmul": ("QLinearMatMul", True), "else_matmul": ("MatMul", False),
    }  # fmt: skip


def test_float_models_have_no_rows_and_broken_files_are_refused(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "float.onnx")
    assert inspect_fusion(tmp_path / "float.onnx") == []
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(FormatError, match="not an ONNX model"):
        inspect_fusion(tmp_path / "bad.onnx")
    with pytest.raises(FormatError, match="is not a file"):
        inspect_fusion(tmp_path / "absent.onnx")
    graph = Graph()
    graph.nodes.append(helper.make_node("Nonsense", [graph.q("x")], ["y"], domain="no.such.domain"))
    with pytest.raises(FormatError, match="does not load in ONNX Runtime"):
        inspect_fusion(graph.write(tmp_path / "custom.onnx", ["y"], ROWS))


@pytest.mark.parametrize(("level", "integer"), [(0, False), (1, False), (4, True)])
def test_matmul_nbits_multiplies_integers_at_level_4_only(level: int, integer: bool, tmp_path: Path) -> None:
    from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
    from tests.models.onnx_zoo import mlp

    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    config = QConfig(layer, UseMatMulNBits=True, MatMulNBitsParams={"GroupSize": 16, "AccuracyLevel": level})
    ModelQuantizer(config).quantize_model(mlp(), tmp_path / "nbits.onnx")
    rows = inspect_fusion(tmp_path / "nbits.onnx")
    assert [row.op_type for row in rows] == ["MatMulNBits"] * 2
    assert all(row.integer is integer and bool(row.reason) is not integer for row in rows)
