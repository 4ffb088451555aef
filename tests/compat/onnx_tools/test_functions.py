"""The functions of the tools' modules, and the tools that change biases, shapes and formats, against ONNX Runtime."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.compat.onnx_tools.command_line import run_tool
from quark.errors import ConfigError, NotSupportedError
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model_file import constant, read
from tests.models.onnx_zoo import Builder, Reader, cnn, images, run

(SAMPLE,) = images(1)
pytestmark = pytest.mark.slow

DOCUMENTED = {
    "convert_a8w8_npu_to_a8w8_cpu": "convert_a8w8_npu_to_a8w8_cpu",
    "convert_bias_int32_to_int16": "convert_bias_int32_to_int16",
    "convert_custom_ops": "convert_custom_ops",
    "convert_customqdq_to_qdq": "convert_customqdq_to_qdq",
    "convert_dynamic_to_fixed": "fix_shapes get_input_shapes get_output_shapes",
    "convert_fp16_to_bf16": "convert",
    "convert_fp16_to_bfp16": "convert convert_fp16_to_bfp16",
    "convert_fp16_to_fp32": "convert",
    "convert_fp32_to_bf16": "convert",
    "convert_fp32_to_bfp16": "convert convert_fp32_to_bfp16",
    "convert_fp32_to_fp16": "convert",
    "convert_lstm_to_customlstm": "convert_lstm_to_customlstm",
    "convert_opset_version": "convert_opset_version",
    "convert_qdq_to_qop": "convert_qdq_to_qop",
    "convert_quant_to_float": "convert_quant_to_float",
    "convert_resize_fs_to_pof2s": "convert_resize_fs_to_pof2s pos2scale scale2pos",
    "convert_s8s8_to_u8s8": "convert convert_s8s8_to_u8s8",
    "convert_shared_initializer_to_unique": "convert",
    "convert_u16s8_to_s16s8": "convert convert_u16s8_to_s16s8",
    "convert_u16u8_to_u8u8": "convert convert_u16u8_to_u8u8",
    "evaluate": "calculate_psnr main",
    "fix_shapes": "find_nms fix_input_and_output_shapes fix_shapes generate_random_data infer_all_tensors_shape "
    "parse_input_and_output_shapes save_all_tensors_shape",
    "float16": "convert_float16_to_float",
    "insert_clip_bfloat16_qdq": "insert_clip_bfloat16_qdq",
    "print_a16w8_a8w8_nodes": "a16w8_a8w8_nodes print_a16w8_a8w8_nodes",
    "random_quantize": "main parse_subgraphs_list",
    "remove_bf16_cast": "remove_bf16_cast",
    "remove_initializer_from_input": "remove_initializer_from_input",
    "remove_qdq": "remove_qdq",
    "remove_qdq_between_ops": "remove_qdq_between_ops",
    "remove_qdq_mul_add": "remove_qdq_mul_add",
    "replace_bfloat16_qdq_cast": "replace_bfloat16_qdq_cast",
    "replace_inf_weights": "replace_inf_in_onnx_weights",
    "save_tensor_hist": "save_tensor_hist_figure",
    "save_weights_hist": "main",
}


def function(tool: str, name: str | None = None) -> Any:
    return getattr(importlib.import_module(f"quark.onnx.tools.{tool}"), name or tool)


def quantized(name: str, **options: Any) -> onnx.ModelProto:
    config = QConfig.get_default_config(name)
    config.global_quant_config.extra_options.update(options)
    model = ModelQuantizer(config).quantize_model(cnn(), None, Reader(images()))
    assert model is not None
    return model


def stored(model: onnx.ModelProto, op_type: str, position: int) -> dict[str, Any]:
    """Node name -> (codes, scale) of the decoded input at a position."""
    found = {}
    for node in read(model).graph:
        if node.op_type == op_type and len(node.inputs) > position:
            decoder = node.inputs[position].producer()  # type: ignore[union-attr]
            if decoder is not None:
                found[str(node.name)] = constant(decoder.inputs[0]), constant(decoder.inputs[1])
    return found


@pytest.mark.parametrize(("tool", "names"), DOCUMENTED.items())
def test_every_documented_function_is_at_its_address(tool: str, names: str) -> None:
    assert all(callable(function(tool, name)) for name in names.split())


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("convert_lstm_to_customlstm", None),
        ("convert_qdq_to_qop", None),
        ("save_tensor_hist", "save_tensor_hist_figure"),
        ("save_weights_hist", "main"),
    ],
)
def test_what_is_not_built_says_why(tool: str, name: str | None) -> None:
    with pytest.raises(NotSupportedError, match=r"not part of this version: .*; possible: "):
        function(tool, name)(cnn())


# Biases ---------------------------------------------------------------------------------------------------------------


def test_int8_biases_become_int32_of_the_accumulator_scale_with_the_same_values() -> None:
    npu = quantized("XINT8")
    cpu = function("convert_a8w8_npu_to_a8w8_cpu")(npu)
    before, after = stored(npu, "Conv", 2), stored(cpu, "Conv", 2)
    weights, inputs = stored(cpu, "Conv", 1), {node.name: node for node in cpu.graph.node}
    assert before and before.keys() == after.keys()
    for name, (codes, scale) in after.items():
        old, old_scale = before[name]
        assert old.dtype == np.int8 and codes.dtype == np.int32
        # Scales are powers of two, and that of the accumulator is the finer one: nothing is rounded.
        np.testing.assert_array_equal(codes * scale, old * old_scale)
        decoder = next(n for n in cpu.graph.node if inputs[name].input[0] in n.output)
        step = next(numpy_helper.to_array(i) for i in cpu.graph.initializer if i.name == decoder.input[1])
        np.testing.assert_array_equal(scale, step * weights[name][1])
    np.testing.assert_array_equal(run(cpu, SAMPLE, optimise=False), run(npu, SAMPLE, optimise=False))


def test_int32_biases_become_int16_within_half_a_step() -> None:
    model = quantized("A16W8")
    short, changed = function("convert_bias_int32_to_int16")(model)
    before, after = stored(model, "Conv", 2), stored(short, "Conv", 2)
    assert changed and before.keys() == after.keys()
    assert any(abs(codes).max() > 32767 for codes, _ in before.values())  # a cut would give other values
    for name, (codes, scale) in after.items():
        old, old_scale = before[name]
        assert codes.dtype == np.int16
        error = abs(codes * scale.astype(float) - old * old_scale.astype(float))
        assert (error <= 0.5 * scale).all()
    assert max(entry.version for entry in short.opset_import if not entry.domain) == 21
    step = abs(run(short, SAMPLE, optimise=False) - run(model, SAMPLE, optimise=False)).max()
    assert step < 0.02 * abs(run(model, SAMPLE)).max()  # a hundredth of a step of int8 for each of six layers


def test_a_model_without_int32_biases_stays_as_it_is() -> None:
    same, changed = function("convert_bias_int32_to_int16")(cnn())
    assert not changed and same.opset_import[0].version == 17


# Precision ------------------------------------------------------------------------------------------------------------


def test_layers_are_listed_by_the_width_of_their_activations(tmp_path: Path, capsys: Any) -> None:
    layers = [node.name for node in cnn().graph.node if node.op_type in ("Conv", "Gemm")]
    onnx.save(quantized("A16W8"), tmp_path / "m.onnx")
    assert function("print_a16w8_a8w8_nodes", "a16w8_a8w8_nodes")(str(tmp_path / "m.onnx")) == ([], layers)
    run_tool("print_a16w8_a8w8_nodes", ["--input", str(tmp_path / "m.onnx")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["int8 activation node names:", "int16 activation node names:"]
    assert printed[-2:] == ["int8 activation node count: 0", f"int16 activation node count: {len(layers)}"]
    function("print_a16w8_a8w8_nodes")(Namespace(input=str(tmp_path / "m.onnx")))
    assert capsys.readouterr().out.splitlines() == printed


# Formats --------------------------------------------------------------------------------------------------------------


def test_simulated_bfloat16_is_a_float_model_whose_weights_are_bfloat16(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "in.onnx")
    run_tool("convert_fp32_to_bf16", [*paths(tmp_path), "--format", "simulate_bf16"])
    model = onnx.load(tmp_path / "out.onnx")
    assert {node.op_type for node in model.graph.node}.isdisjoint({"Cast", "QuantizeLinear", "ExtendedQuantizeLinear"})
    weights = [numpy_helper.to_array(i) for i in model.graph.initializer if len(i.dims) >= 2]
    assert weights
    for weight in weights:
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, weight.astype(ml_dtypes.bfloat16).astype(np.float32))
    # Eight significant bits of each weight: 2^-8 of each product, and far less of their sum.
    expected = run(cnn(), SAMPLE)
    assert 0 < abs(run(model, SAMPLE) - expected).max() < 2**-6 * abs(expected).max()


def paths(folder: Path) -> list[str]:
    return ["--input", str(folder / "in.onnx"), "--output", str(folder / "out.onnx")]


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_bfp16_blocks(kind: str, tmp_path: Path) -> None:
    model = cnn()
    if kind == "fp16":
        onnx.save(model, tmp_path / "float.onnx")
        run_tool("convert_fp32_to_fp16", [str(tmp_path / "float.onnx"), str(tmp_path / "in.onnx")])
    else:
        onnx.save(model, tmp_path / "in.onnx")
    run_tool(f"convert_{kind}_to_bfp16", paths(tmp_path))
    by_command = (tmp_path / "out.onnx").read_bytes()
    function(f"convert_{kind}_to_bfp16")(str(tmp_path / "in.onnx"), str(tmp_path / "second.onnx"))
    arguments = Namespace(input=str(tmp_path / "in.onnx"), output=str(tmp_path / "third.onnx"))
    function(f"convert_{kind}_to_bfp16", "convert")(arguments)
    assert (tmp_path / "second.onnx").read_bytes() == (tmp_path / "third.onnx").read_bytes() == by_command
    written = onnx.load(tmp_path / "out.onnx")
    assert sum(node.op_type == "BFPQuantizeDequantize" for node in written.graph.node) > 10
    expected = run(model, SAMPLE)
    error = abs(run(written, SAMPLE) - expected).max()
    assert 0 < error < 2**-5 * abs(expected).max()  # blocks of 8 with 7 bits: 2^-8 of their largest, through 7 layers


def test_switches_take_true_and_false_as_documented(tmp_path: Path) -> None:
    b = Builder()
    large = b.constant("w", b.random.normal(size=(32, 32)))  # 4096 bytes: what is smaller stays inside
    b.node("MatMul", ["x", large], "h")
    b.nodes.append(
        helper.make_node(
            "VitisQuantizeLinear", ["h", b.constant("s", np.array(1.0)), "z"], ["y"], domain="com.vai.quantize"
        )
    )
    b.initializers.append(numpy_helper.from_array(np.int8(0), "z"))
    ends = [helper.make_tensor_value_info(name, kind, [1, 32]) for name, kind in (("x", 1), ("y", TensorProto.INT8))]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.vai.quantize", 1)]
    graph = helper.make_graph(b.nodes, "g", ends[:1], ends[1:], b.initializers)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "in.onnx")
    run_tool("convert_custom_ops", [*paths(tmp_path), "--external_data", "True"])
    assert (tmp_path / "out.onnx.data").exists()
    run_tool("convert_custom_ops", [*paths(tmp_path), "--reverse_conversion", "False"])
    assert {node.domain for node in onnx.load(tmp_path / "out.onnx").graph.node} >= {"com.vai.quantize"}
    run_tool("convert_custom_ops", [*paths(tmp_path), "--reverse_conversion", "True"])
    assert "com.vai.quantize" not in {node.domain for node in onnx.load(tmp_path / "out.onnx").graph.node}


def test_operators_are_renamed_by_a_mapping() -> None:
    model = quantized("BF16")
    renamed = function("convert_custom_ops")(model, "my.domain", {"ExtendedQuantizeLinear": "MyQuantize"})
    count = sum(node.op_type == "ExtendedQuantizeLinear" for node in model.graph.node)
    assert count == sum((node.op_type, node.domain) == ("MyQuantize", "my.domain") for node in renamed.graph.node) > 0
    assert "my.domain" in {entry.domain for entry in renamed.opset_import}


def test_activations_are_clipped_before_bfloat16() -> None:
    model = quantized("BF16")
    clipped = function("insert_clip_bfloat16_qdq")(model)
    stages = sum(n.op_type == "ExtendedQuantizeLinear" for n in model.graph.node)
    weights = {i.name for i in model.graph.initializer}
    direct = sum(n.op_type == "ExtendedQuantizeLinear" and n.input[0] in weights for n in model.graph.node)
    inserted = [n for n in clipped.graph.node if n.op_type == "Clip" and n.input[1].endswith("_clip_min")]
    assert 0 < len(inserted) <= stages - direct
    np.testing.assert_array_equal(run(clipped, SAMPLE), run(model, SAMPLE))


def test_scales_beside_resize_become_powers_of_two() -> None:
    b = Builder()
    zero, scale = numpy_helper.from_array(np.int8(-28), "z"), b.constant("s", np.array(0.013))
    b.initializers.append(zero)
    for name, source in (("a", "x"), ("b", "resized")):
        b.node("QuantizeLinear", [source, scale, "z"], f"{name}_q")
        b.node("DequantizeLinear", [f"{name}_q", scale, "z"], f"{name}_d")
        if name == "a":
            b.node("Resize", ["a_d", "", b.constant("scales", np.array([1, 1, 2, 2]))], "resized", mode="nearest")
    b.node("Identity", ["b_d"], "y")
    model = b.model({"x": [1, 1, 2, 2]}, {"y": [1, 1, 4, 4]})
    made = function("convert_resize_fs_to_pof2s")(model)
    tensors = {i.name: numpy_helper.to_array(i) for i in made.graph.initializer}
    used = {(node.input[1], node.input[2]) for node in made.graph.node if node.op_type == "QuantizeLinear"}
    assert len(used) == 1
    ((step, origin),) = used
    # The old range is (-100 .. 155) * 0.013 = -1.3 .. 2.015; 2.015 / 128 = 0.01574 rounds up to 2^-5.
    assert tensors[step] == 2**-5 and tensors[origin] == 0 and tensors[origin].dtype == np.int8
    assert function("convert_resize_fs_to_pof2s", "scale2pos")(0.01574) == 5
    assert function("convert_resize_fs_to_pof2s", "pos2scale")(5) == 2**-5


# Shapes and initializers ----------------------------------------------------------------------------------------------


def test_shapes_of_all_tensors_are_assigned(tmp_path: Path) -> None:
    fixed = function("fix_shapes", "fix_input_and_output_shapes")(cnn(), "x:[2,3,16,16];y:[2,10]")
    shapes = function("fix_shapes", "infer_all_tensors_shape")(fixed)
    feed = function("fix_shapes", "generate_random_data")(fixed)
    probe = onnx.ModelProto()
    probe.CopyFrom(fixed)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shapes)
    import onnxruntime

    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, array in zip(shapes, session.run(list(shapes), feed), strict=True):
        assert shapes[name] == array.shape, name
    assert len(shapes) == sum(len(node.output) for node in fixed.graph.node)
    noted = function("fix_shapes", "save_all_tensors_shape")(cnn(), shapes)
    assert {v.name for v in noted.graph.value_info} >= shapes.keys() - {"y"}
    arguments = Namespace(input_model_path=str(tmp_path / "in.onnx"), output_model_path=str(tmp_path / "out.onnx"))
    onnx.save(cnn(), tmp_path / "in.onnx")
    function("fix_shapes")(Namespace(**vars(arguments), fix_shapes="x:[2,3,16,16]"))
    written = onnx.load(tmp_path / "out.onnx")
    assert function("convert_dynamic_to_fixed", "get_output_shapes")(written) == {"y": [2, 10]}
    function("fix_shapes")(arguments)  # without shapes: those that follow
    assert function("convert_dynamic_to_fixed", "get_input_shapes")(onnx.load(tmp_path / "out.onnx"))["x"][0] == 0
    with pytest.raises(ConfigError, match="is no tensor"):
        function("fix_shapes", "save_all_tensors_shape")(cnn(), {"nothing": (1,)})
    with pytest.raises(ConfigError, match=r"The output y is \[\S+, ?10\], not \[2, 11\]"):
        function("fix_shapes", "fix_input_and_output_shapes")(cnn(), "y:[2,11]")
    assert function("fix_shapes", "find_nms")(cnn()) == []


def test_functions_and_commands_give_the_same_model(tmp_path: Path) -> None:
    model = quantized("S8S8_AAWS")
    before = model.SerializeToString()
    onnx.save(model, tmp_path / "in.onnx")
    for tool in ("convert_s8s8_to_u8s8", "remove_qdq", "remove_qdq_mul_add", "convert_quant_to_float"):
        run_tool(tool, paths(tmp_path))
        made, written = function(tool)(model), onnx.load(tmp_path / "out.onnx")
        np.testing.assert_array_equal(run(made, SAMPLE), run(written, SAMPLE))
        assert [node.op_type for node in made.graph.node] == [node.op_type for node in written.graph.node]
    function("convert_quant_to_float")(str(tmp_path / "in.onnx"), str(tmp_path / "float.onnx"))
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "float.onnx"), SAMPLE), run(made, SAMPLE))
    function("convert_quant_to_float")(model, str(tmp_path / "second.onnx"))
    assert (tmp_path / "second.onnx").read_bytes() == (tmp_path / "float.onnx").read_bytes()
    assert model.SerializeToString() == before
    fewer = function("remove_qdq_between_ops")(model, [("Conv", "Relu"), ("Add", "Relu")])
    assert len(fewer.graph.node) <= len(model.graph.node)
    raised = function("convert_opset_version")(cnn(), 20)
    assert raised.opset_import[0].version == 20


def test_shared_initializers_are_copied_under_a_prefix() -> None:
    b = Builder()
    weight = b.constant("w", b.random.normal(size=(4, 4)))
    b.node("MatMul", ["x", weight], "h")
    b.node("MatMul", ["h", weight], "y")
    model = b.model({"x": [1, 4]}, {"y": [1, 4]})
    unique = function("convert_shared_initializer_to_unique", "convert")(model)
    names = sorted(i.name for i in unique.graph.initializer)
    assert len(names) == 2 and names[0].startswith("duplicated") and names[1] == "w"
    assert len(function("convert_shared_initializer_to_unique", "convert")(model, ["Conv"]).graph.initializer) == 1
    assert (
        len(function("convert_shared_initializer_to_unique", "convert")(model, only_bias=True).graph.initializer) == 1
    )
    feed = {"x": np.ones((1, 4), np.float32)}
    np.testing.assert_array_equal(run(unique, feed), run(model, feed))


def test_infinite_weights_and_half_precision() -> None:
    b = Builder()
    b.node("Add", ["x", b.constant("w", np.array([np.inf, -np.inf, 1]))], "y")
    model = b.model({"x": [3]}, {"y": [3]})
    made = function("replace_inf_weights", "replace_inf_in_onnx_weights")(model, replace_inf_value=7.0)
    np.testing.assert_array_equal(numpy_helper.to_array(made.graph.initializer[0]), [7, -7, 1])
    node = helper.make_node("Relu", ["x"], ["y"], name="r")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [3]) for name in "xy"]
    half = helper.make_model(
        helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    wide = function("float16", "convert_float16_to_float")(half)
    assert wide.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    with pytest.raises(NotSupportedError, match="whole models"):
        function("float16", "convert_float16_to_float")(half, op_block_list=["Relu"])


def test_random_quantization_excludes_parts(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "in.onnx")
    names = [node.name for node in cnn().graph.node]
    last = next(node.name for node in cnn().graph.node if node.op_type == "Flatten")
    arguments = Namespace(
        input_model_path=str(tmp_path / "in.onnx"),
        quantized_model_path=str(tmp_path / "out.onnx"),
        config="A8W8",
        exclude_nodes="",
        exclude_subgraphs=f"[{names[0]}], [{last}]",
        save_as_external_data=False,
    )
    function("random_quantize", "main")(arguments)
    written = onnx.load(tmp_path / "out.onnx")
    reading = {name for node in written.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    assert {node.op_type for node in written.graph.node if reading & {*node.input}} == {"Gemm"}
    parse = function("random_quantize", "parse_subgraphs_list")
    assert parse("[a, b], [c]; [d], [e]") == [(["a", "b"], ["c"]), (["d"], ["e"])]


def test_results_are_compared_by_a_call(tmp_path: Path, capsys: Any) -> None:
    for folder, value in (("a", 1.0), ("b", 1.5)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "x.npy", np.array([value, 2.0]))
    function("evaluate", "main")(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "L2 distance" in capsys.readouterr().out
    found = function("evaluate", "calculate_psnr")(np.array([1.0, 2.0]), np.array([1.5, 2.0]))
    assert found == pytest.approx(20 * np.log10(2) - 10 * np.log10(0.125))
