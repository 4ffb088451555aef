"""The documented command lines, against ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import quark.onnx
from quark.compat.documented_paths import paths, source_of
from quark.compat.onnx_tools import TOOLS
from quark.compat.onnx_tools.command_line import run_tool
from quark.core.granularity import PerChannel
from quark.core.metrics import sqnr
from quark.core.spec import LayerSpec, spec
from quark.errors import FormatError
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import load, read, to_proto
from quark.onnx.passes.convert_float import convert_fp32_to_bf16, convert_fp32_to_fp16
from quark.onnx.qdq.remove_qdq import decode
from quark.onnx.search.settle import quantize
from quark.onnx_ops.saving import save
from tests.models.onnx_zoo import Builder, Reader, cnn, feed, half, images, legacy, mlp, outputs, pools, shared

S8, U8 = spec("int8"), spec("uint8", symmetric=False)
A8W8 = Settings(SpecSettings(LayerSpec(weight=S8, input=S8)), qdq=QDQSettings(contrib_domain=True))
U16S8 = Settings(SpecSettings(LayerSpec(weight=S8, input=spec("uint16", symmetric=False))))
U16U8 = Settings(SpecSettings(LayerSpec(weight=U8, input=spec("uint16", symmetric=False))))
WEIGHTS = Settings(SpecSettings(LayerSpec(weight=spec("int8", PerChannel(0))), weights_only=True))
(SAMPLE,) = images(1)


def quantized(settings: Settings, opset: int = 17) -> onnx.ModelProto:
    return to_proto(quantize(load(cnn(opset)), settings, Reader(images())))


def converted(tool: str, proto: onnx.ModelProto, folder: Path, *arguments: str) -> onnx.ModelProto:
    """What a tool's command line writes; checked."""
    source, target = folder / "in.onnx", folder / "out.onnx"
    onnx.save(proto, source)
    before = source.read_bytes()
    run_tool(tool, ["--input", str(source), "--output", str(target), *arguments])
    assert source.read_bytes() == before
    written = onnx.load(target)
    onnx.checker.check_model(written, full_check=True)
    return written


def types(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def code_types(proto: onnx.ModelProto, op_type: str) -> set[str]:
    kinds = {i.name: helper.tensor_dtype_to_np_dtype(i.data_type).name for i in proto.graph.initializer}
    return {kinds[node.input[2]] for node in proto.graph.node if node.op_type == op_type}


# Command line ---------------------------------------------------------------------------------------------------------


def test_every_tool_has_its_path_and_every_path_its_tool() -> None:
    prefix = "quark.onnx.tools."
    named = {path.removeprefix(prefix) for path in paths() if path.startswith(prefix)}
    named -= {"evaluate", "evaluate.py", "evaluate.__main__"}  # a comparison of folders, with a command of its own
    named -= {"rocm_memory_profiler"}  # says what is possible instead
    assert named == {*TOOLS, "float16"}  # a module without a command
    for name in TOOLS:
        assert f'run_tool("{name}")' in source_of(f"{prefix}{name}")


@pytest.mark.slow
def test_a_tool_runs_as_documented(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "in.onnx")

    def run(*arguments: str) -> Any:
        command = [sys.executable, "-m", "quark.onnx.tools.fix_shapes", *arguments]
        here = {**os.environ, "PYTHONPATH": str(Path(quark.onnx.__file__).parents[2])}
        return subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)

    done = run("--input_model_path", "in.onnx", "--output_model_path", "out.onnx", "--fix_shapes", "x:[1,3,16,16]")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "fix_shapes: 25 places changed, written to out.onnx\n"
    assert onnx.load(tmp_path / "out.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    wrong = run("in.onnx", "out.onnx", "--fix_shape", "x:[1,3,16,16]")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.startswith("fix_shapes: No such option: --fix_shape ") and wrong.stderr.count("\n") == 1
    assert "--fix_shapes" in wrong.stderr


def test_the_help_of_every_tool_names_its_flags_in_every_spelling(capsys: Any) -> None:
    for name, tool in TOOLS.items():
        run_tool(name, ["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert tool.summary in shown
        outputs = () if tool.tell else ("quantized_model_path", "external_data")
        for flag in ("input", "input_model_path", *outputs, *tool.flags):
            assert f"--{flag}" in shown, name


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("convert_opset_version", ["in.onnx", "high", "out.onnx"], "target_opset must be int, got 'high'"),
        ("convert_opset_version", ["in.onnx", "21"], "Missing: output"),
        ("convert_opset_version", ["in.onnx", "99", "out.onnx"], "cannot be converted to 99"),
        ("remove_qdq", ["in.onnx", "out.onnx", "more"], "Unexpected argument 'more'"),
        ("remove_qdq", ["--input_model", "absent.onnx", "--output_model", "out.onnx"], "absent.onnx is not a file"),
        ("remove_qdq", ["--input"], "requires an argument"),
        ("convert_fp32_to_bf16", ["in.onnx", "out.onnx", "--format", "fp4"], "format 'fp4' is unknown. Possible: "),
        ("convert_lstm_to_customlstm", ["in.onnx", "out.onnx"], "is not part of this version"),
        ("random_quantize", ["in.onnx", "out.onnx", "--exclude_subgraphs", "a,b"], "is no part of a graph"),
        ("remove_qdq_between_ops", ["in.onnx", "out.onnx", "--between_ops", "Conv"], "of the form"),
        ("convert_dynamic_to_fixed", ["in.onnx", "out.onnx"], "Missing option '--fix_shapes'"),
        (
            "replace_inf_weights",
            ["in.onnx", "out.onnx", "--replace_inf_value", "x"],
            "Invalid value for '--replace_inf_value'",
        ),
        ("random_quantize", ["in.onnx", "out.onnx", "--config", "XINT9"], "Did you mean"),
    ],
)
def test_wrong_command_lines_are_one_line(
    tool: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(cnn(), tmp_path / "in.onnx")
    with pytest.raises(SystemExit) as left:
        run_tool(tool, arguments)
    shown = capsys.readouterr()
    usage = message.startswith(("Missing option", "Invalid value")) or "requires" in message
    assert left.value.code == (2 if usage else 1) and shown.out == ""
    assert message in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()


def test_weights_are_written_beside_the_model_where_asked(tmp_path: Path) -> None:
    converted("convert_opset_version", cnn(), tmp_path, "--target_opset", "20", "--save_as_external_data")
    assert (tmp_path / "out.onnx.data").exists()
    found = outputs(str(tmp_path / "out.onnx"), SAMPLE)[0]
    np.testing.assert_allclose(found, outputs(cnn(), SAMPLE)[0], atol=1e-5)


# Codes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "settings", "before", "after"),
    [
        ("convert_s8s8_to_u8s8", A8W8, "int8", "uint8"),
        ("convert_s8s8_to_u8s8", replace(A8W8, qdq=replace(A8W8.qdq, contrib_domain=False)), "int8", "uint8"),
        ("convert_u16s8_to_s16s8", U16S8, "uint16", "int16"),
    ],
)
def test_another_type_of_the_same_width_gives_the_same_bits(
    tool: str, settings: Settings, before: str, after: str, tmp_path: Path
) -> None:
    proto = quantized(settings)
    assert code_types(proto, "QuantizeLinear") == {before}
    changed = converted(tool, proto, tmp_path)
    assert code_types(changed, "QuantizeLinear") == {after}
    assert "int8" in code_types(changed, "DequantizeLinear")
    assert np.array_equal(outputs(changed, SAMPLE)[0], outputs(proto, SAMPLE)[0])
    wild = {"x": 100 * SAMPLE["x"]}
    assert np.array_equal(outputs(changed, wild)[0], outputs(proto, wild)[0])


def test_a_narrower_type_keeps_the_range(tmp_path: Path) -> None:
    proto = quantized(U16U8)
    changed = converted("convert_u16u8_to_u8u8", proto, tmp_path)
    assert code_types(changed, "QuantizeLinear") == {"uint8"}
    direct = quantized(Settings(SpecSettings(LayerSpec(weight=U8, input=U8))))
    expected = outputs(cnn(), SAMPLE)[0]
    errors = [np.linalg.norm(outputs(model, SAMPLE)[0] - expected) for model in (changed, direct)]
    assert errors[0] < 1.2 * errors[1] < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "block", "parameters"),
    [
        ("int8", (4, 6), 0, 0, (4,)),
        ("uint8", (4, 6), 1, 0, (6,)),
        ("int32", (5,), 0, 0, ()),
        ("int16", (2, 3, 4), -1, 0, (4,)),
        ("int4", (4, 6), 1, 4, (4, 2)),
        ("uint8", (6, 4), 0, 2, (3, 4)),
        ("float8_e4m3fn", (4, 6), 0, 0, ()),
    ],
)
def test_codes_are_decoded_as_by_the_runtime(
    kind: str, shape: tuple[int, ...], axis: int, block: int, parameters: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    numpy_kind = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    low, high = (-8, 7) if kind == "int4" else (-100, 100) if kind != "uint8" else (0, 255)
    codes = random.integers(low, high, shape).astype(numpy_kind)
    scale = random.uniform(0.01, 1, parameters).astype(np.float32)
    zero = (
        np.zeros(parameters, numpy_kind)
        if kind in ("int32", "float8_e4m3fn")
        else codes.reshape(-1)[0] * np.ones(parameters, numpy_kind)
    )
    zero = np.asarray(zero, numpy_kind)
    inits = [numpy_helper.from_array(array, name) for name, array in (("c", codes), ("s", scale), ("z", zero))]
    attributes = {"axis": axis, **({"block_size": block} if block else {})}
    node = helper.make_node("DequantizeLinear", ["c", "s", "z"], ["y"], **attributes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", [], [y], inits)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert np.array_equal(decode(codes, scale, zero, axis, block), outputs(proto, {})[0])


# Without quantization -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["remove_qdq", "convert_quant_to_float"])
def test_a_model_without_its_pairs_computes_in_float_with_the_stored_weights(tool: str, tmp_path: Path) -> None:
    weights = quantized(WEIGHTS)
    plain = converted(tool, weights, tmp_path)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {*types(plain)}
    assert np.array_equal(outputs(plain, SAMPLE)[0], outputs(weights, SAMPLE)[0])
    both = converted(tool, quantized(A8W8), tmp_path)
    assert {o.domain for o in both.opset_import} == {""} and both.graph.output[0].name == "y"
    assert not {"QuantizeLinear", "DequantizeLinear"} & {*types(both)}


def test_the_original_comes_back_where_weights_were_kept_in_float(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer puts pairs around float weights: without them the outputs are those of the original."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class TheirReader(Reader, CalibrationDataReader):
        pass

    source, target = tmp_path / "float.onnx", tmp_path / "theirs.onnx"
    onnx.save(mlp(), source)
    sample = feed(mlp())
    quantize_static(source, target, TheirReader([sample]), extra_options={"AddQDQPairToWeight": True})
    plain = converted("remove_qdq", onnx.load(target), tmp_path)
    assert types(plain) == types(mlp())
    assert np.array_equal(outputs(plain, sample)[0], outputs(mlp(), sample)[0])


def test_pairs_between_named_ops_are_removed(tmp_path: Path) -> None:
    b = Builder()
    product = b.node("Mul", ["x", "x"], "product")
    b.node("Add", [product, "x"], "y")
    model = load(b.model({"x": ["n", 8]}, {"y": ["n", 8]}))
    settings = Settings(SpecSettings(LayerSpec(input=U8, weight=U8)))
    proto = to_proto(quantize(model, settings, Reader([{"x": np.ones((2, 8), np.float32)}])))
    assert types(proto).count("DequantizeLinear") == 3
    changed = converted("remove_qdq_mul_add", proto, tmp_path)
    assert types(changed).count("DequantizeLinear") == 2
    (add,) = [node for node in changed.graph.node if node.op_type == "Add"]
    assert "product" in add.input
    same = converted("remove_qdq_between_ops", proto, tmp_path, "--between_ops", "Conv,Relu;Add,Mul")
    assert types(same) == types(proto)


# Types ----------------------------------------------------------------------------------------------------------------


def assert_rounded(found: Any, model: onnx.ModelProto, sample: dict[str, Any], bits: int) -> None:
    """`found` is what the float model gives, but for mantissas of `bits` bits.

    A rounding is wrong by 2^-(bits + 1) of a value at most and by 1 / sqrt(3) of that on average; the power of noise
    adds up over the inputs, weights and results that are rounded on the way.
    """
    graph = model.graph
    roundings = len(graph.input) + len(graph.initializer) + len(graph.node)
    least = 20 * np.log10(2 ** (bits + 1) * 3**0.5) - 10 * np.log10(roundings)
    assert sqnr(outputs(model, sample)[0].astype(np.float32), np.asarray(found, np.float32)) > least


def test_float16_and_back(tmp_path: Path) -> None:
    wide = converted("convert_fp16_to_fp32", half(), tmp_path)
    assert "Cast" not in types(wide)
    sample = {"x": feed(half())["x"].astype(np.float32)}
    assert_rounded(outputs(half(), feed(half()))[0], wide, sample, bits=10)
    narrow = converted("convert_fp32_to_fp16", cnn(), tmp_path)
    assert {i.data_type for i in narrow.graph.initializer} == {TensorProto.FLOAT16}
    low = {"x": SAMPLE["x"].astype(np.float16)}
    assert_rounded(outputs(narrow, low)[0], cnn(), SAMPLE, bits=10)
    kept = converted("convert_fp32_to_fp16", cnn(), tmp_path, "--keep_io_types")
    assert [v.name for v in kept.graph.output] == ["y"] and types(kept).count("Cast") == 2
    assert_rounded(outputs(kept, SAMPLE)[0], cnn(), SAMPLE, bits=10)


@pytest.mark.parametrize("tool", ["convert_fp32_to_fp16", "convert_fp32_to_bf16", "random_quantize"])
def test_quantized_models_are_not_lowered_further(tool: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        converted(tool, quantized(A8W8), tmp_path)
    assert "quantized already" in capsys.readouterr().err


def test_an_invalid_result_is_not_written(tmp_path: Path) -> None:
    model = read(cnn())
    model.graph[3].op_type = "Nonsense"
    with pytest.raises(FormatError, match="no valid ONNX model.*Nonsense"):
        save(model, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_float16_keeps_scales_of_resize_and_bounds_masks(tmp_path: Path) -> None:
    b = Builder()
    x = b.node("Add", ["x", b.constant("mask", np.array([0, -3.4e38, -np.inf, 1e-3]))], "masked")
    scales = b.constant("scales", np.array([1, 1, 1.7, 1.3]))
    b.node("Resize", [b.node("Softmax", [x], "soft"), "", scales], "y")
    proto = b.model({"x": [1, 1, 4, 4]}, {"y": [1, 1, 6, 5]})
    changed = converted("convert_fp32_to_fp16", proto, tmp_path)
    stored = {i.name: numpy_helper.to_array(i) for i in changed.graph.initializer}
    assert stored["scales"].dtype == np.float32 and stored["mask"].dtype == np.float16
    assert stored["mask"].tolist()[1:3] == [-65504.0, -np.inf]
    sample = feed(proto)
    low = {"x": sample["x"].astype(np.float16)}
    assert_rounded(outputs(changed, low)[0], proto, sample, bits=10)
    b = Builder()
    b.node("Resize", ["x", "", b.node("Mul", ["s", b.constant("two", np.array(2.0))], "doubled")], "y")
    proto = b.model({"x": [1, 1, 4, 4], "s": [4]}, {"y": [1, 1, "h", "w"]})
    changed = converted("convert_fp32_to_fp16", proto, tmp_path)
    sample = {"x": feed(proto)["x"], "s": np.array([0.5, 0.5, 0.75, 1], np.float32)}
    low = {name: value.astype(np.float16) for name, value in sample.items()}
    assert_rounded(outputs(changed, low)[0], proto, sample, bits=10)


def test_half_keeps_old_scales_and_sequences(tmp_path: Path) -> None:
    b = Builder()
    b.node("Resize", ["x", b.constant("scales", np.array([1, 1, 2, 2]))], "y", mode="linear")
    for convert in (convert_fp32_to_fp16, convert_fp32_to_bf16):
        model = read(b.model({"x": [1, 1, 4, 4]}, {"y": [1, 1, 8, 8]}, 10))
        convert(model)
        assert model.graph.initializers["scales"].dtype == ir.DataType.FLOAT
        assert model.graph.inputs[0].dtype != ir.DataType.FLOAT
    b = Builder()
    b.node("SequenceConstruct", ["x", b.node("Neg", ["x"], "n")], "s")
    b.node("ConcatFromSequence", ["s"], "y", axis=0)
    proto = b.model({"x": [2, 3]}, {"y": [4, 3]})
    changed = converted("convert_fp32_to_fp16", proto, tmp_path)
    low = outputs(changed, {"x": np.ones((2, 3), np.float16)})[0]
    assert low.dtype == np.float16 and low.tolist() == [[1.0] * 3] * 2 + [[-1.0] * 3] * 2


def test_operators_that_take_bfloat16_later_are_raised_to_the_opset_that_does(tmp_path: Path) -> None:
    changed = converted("convert_fp32_to_bf16", cnn(), tmp_path, "--format", "bf16")
    onnx.checker.check_model(changed, full_check=True)
    assert [entry.version for entry in changed.opset_import] == [22] and opset_of(cnn()) < 22
    stored = {i.name: np.frombuffer(i.raw_data, ml_dtypes.bfloat16) for i in changed.graph.initializer}
    for initializer in cnn().graph.initializer:
        if initializer.data_type == TensorProto.FLOAT and initializer.name in stored:
            value = numpy_helper.to_array(initializer).astype(ml_dtypes.bfloat16).ravel()
            np.testing.assert_array_equal(stored.pop(initializer.name), value)
    assert len(stored) < 3


def test_bfloat16(tmp_path: Path) -> None:
    whole = converted("convert_fp32_to_bf16", mlp(), tmp_path, "--format", "bf16")
    assert {i.data_type for i in whole.graph.initializer} == {TensorProto.BFLOAT16}
    assert opset_of(whole) == opset_of(mlp())
    casts = converted("convert_fp32_to_bf16", mlp(), tmp_path)
    sample = feed(mlp())
    assert_rounded(outputs(casts, sample)[0], mlp(), sample, bits=7)
    plain = converted("remove_bf16_cast", casts, tmp_path)
    assert types(plain) == types(mlp())
    rounded = {
        i.name: numpy_helper.to_array(i).astype(ml_dtypes.bfloat16).astype(np.float32) for i in mlp().graph.initializer
    }
    reference = mlp()
    for initializer in reference.graph.initializer:
        initializer.CopyFrom(numpy_helper.from_array(rounded[initializer.name], initializer.name))
    np.testing.assert_array_equal(outputs(plain, sample)[0], outputs(reference, sample)[0])
    from_half = converted("convert_fp16_to_bf16", half(), tmp_path)
    assert from_half.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT


# The rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_contributed_pairs_become_standard_where_the_opset_has_them(tmp_path: Path, capsys: Any) -> None:
    proto = quantized(A8W8)
    changed = converted("convert_customqdq_to_qdq", proto, tmp_path)
    assert {o.domain for o in changed.opset_import} == {""}
    assert np.array_equal(outputs(changed, SAMPLE)[0], outputs(proto, SAMPLE)[0])
    with pytest.raises(SystemExit):
        converted("convert_customqdq_to_qdq", quantized(U16S8), tmp_path)
    assert "needs opset 21: use convert_opset_version" in capsys.readouterr().err
    raised = converted("convert_opset_version", quantized(U16S8), tmp_path, "--target_opset", "21")
    standard = converted("convert_customqdq_to_qdq", raised, tmp_path)
    assert np.array_equal(outputs(standard, SAMPLE)[0], outputs(quantized(U16S8), SAMPLE)[0])


def opset_of(proto: onnx.ModelProto) -> int:
    (version,) = (entry.version for entry in proto.opset_import if entry.domain == "")
    return version


@pytest.mark.parametrize(("preset", "name"), [("BFP16", "BFPFixNeuron"), ("MXINT8", "MXFixNeuron")])
def test_operators_that_the_model_defines_are_renamed_with_their_definition(
    preset: str, name: str, tmp_path: Path
) -> None:
    today = quantized(lower(get_default_config(preset)))
    former = converted("convert_custom_ops", today, tmp_path)
    assert {(f.domain, f.name) for f in former.functions} == {("com.vai.quantize", name)}
    assert {node.domain for node in former.graph.node} == {"", "com.vai.quantize"}
    back = converted("convert_custom_ops", former, tmp_path, "--reverse_conversion")
    assert [(f.domain, f.name) for f in back.functions] == [(f.domain, f.name) for f in today.functions]
    for model in (former, back):
        assert np.array_equal(outputs(model, SAMPLE)[0], outputs(today, SAMPLE)[0])


def custom(domain: str, encoder: str, decoder: str, kind: int, scale: float = 1.0) -> onnx.ModelProto:
    nodes = [helper.make_node(encoder, ["x", "s", "z"], ["q"], domain=domain, name="q"),
             helper.make_node(decoder, ["q", "s", "z"], ["y"], domain=domain, name="d")]  # fmt: skip
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    constants = [helper.make_tensor("s", TensorProto.FLOAT, [], [scale]), helper.make_tensor("z", kind, [], [0])]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    return helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], constants), opset_imports=imports,
                             ir_version=10)  # fmt: skip


def test_custom_operators_are_renamed_both_ways_and_replaced(tmp_path: Path) -> None:
    names = ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear")
    today = custom("com.amd.quark", *names, TensorProto.BFLOAT16)
    former = converted("convert_custom_ops", today, tmp_path)
    assert types(former) == ["VitisQuantizeLinear", "VitisDequantizeLinear"]
    assert {node.domain for node in former.graph.node} == {"com.vai.quantize"}
    back = converted("convert_custom_ops", former, tmp_path, "--reverse_conversion")
    assert types(back) == list(names) and {o.domain for o in back.opset_import} == {"", "com.amd.quark"}
    casts = converted("replace_bfloat16_qdq_cast", today, tmp_path)
    x = np.array([1.00390625, -3.14159, 1e30, 0], np.float32)
    assert types(casts) == ["Cast", "Cast"]
    assert np.array_equal(outputs(casts, {"x": x})[0], x.astype(ml_dtypes.bfloat16).astype(np.float32))
    scaled = converted(
        "replace_bfloat16_qdq_cast", custom("com.amd.quark", *names, TensorProto.BFLOAT16, 2.0), tmp_path
    )
    assert types(scaled) == list(names)
    integers = converted("convert_customqdq_to_qdq", custom("com.amd.quark", *names, TensorProto.INT16), tmp_path)
    assert np.array_equal(outputs(integers, {"x": x})[0], [1, -3, 32767, 0])


def test_inputs_shapes_sharing_and_infinity(tmp_path: Path) -> None:
    assert [v.name for v in converted("remove_initializer_from_input", legacy(), tmp_path).graph.input] == ["x"]
    fixed = converted("convert_dynamic_to_fixed", cnn(), tmp_path, "--fix_shapes", "x:[4,3,16,16]")
    assert np.array_equal(outputs(fixed, SAMPLE)[0], outputs(cnn(), SAMPLE)[0])
    unique = converted("convert_shared_initializer_to_unique", shared(), tmp_path, "--op_types", "Conv, Gemm")
    assert len(unique.graph.initializer) == len(shared().graph.initializer) + 3
    nhwc = converted("convert_nchw_to_nhwc", pools(), tmp_path)
    sample = feed(pools())
    turned = {"x": sample["x"].transpose(0, 2, 3, 1)}
    np.testing.assert_allclose(outputs(nhwc, turned)[0], outputs(pools(), sample)[0], atol=1e-5)
    broken = mlp()
    weight = numpy_helper.to_array(broken.graph.initializer[0]).copy()
    weight[0, :2] = np.inf, -np.inf
    broken.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w1"))
    mended = converted("replace_inf_weights", broken, tmp_path, "--replace_inf_value", "7")
    assert numpy_helper.to_array(mended.graph.initializer[0])[0, :3].tolist() == [7, -7, weight[0, 2]]


@pytest.mark.slow
def test_text_keeps_every_bit(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "in.onnx")
    run_tool("convert_onnx_to_onnxtxt", [str(tmp_path / "in.onnx"), str(tmp_path / "model.onnxtxt")])
    assert 'op_type: "Conv"' in (tmp_path / "model.onnxtxt").read_text()
    run_tool("convert_onnxtxt_to_onnx", [str(tmp_path / "model.onnxtxt"), str(tmp_path / "back.onnx")])
    back = onnx.load(tmp_path / "back.onnx")
    assert [i.raw_data for i in back.graph.initializer] == [i.raw_data for i in cnn().graph.initializer]
    with pytest.raises(SystemExit):
        run_tool("convert_onnxtxt_to_onnx", [str(tmp_path / "in.onnx"), str(tmp_path / "no.onnx")])


def test_random_quantization_and_its_exclusions(tmp_path: Path) -> None:
    config = ["--config", "A8W8"]
    everything = converted("random_quantize", cnn(), tmp_path, *config)
    without = converted("random_quantize", cnn(), tmp_path, *config, "--exclude_nodes", "y_node;^a_.*")
    assert types(everything).count("DequantizeLinear") > types(without).count("DequantizeLinear") > 0
    assert "fc_w" in {i.name for i in without.graph.initializer} - {i.name for i in everything.graph.initializer}


def test_a_converted_model_can_be_saved_over_its_source(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(cnn(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    run_tool("convert_opset_version", [str(path), "18", str(path), "--save_as_external_data"])
    np.testing.assert_allclose(outputs(str(path), SAMPLE)[0], outputs(cnn(), SAMPLE)[0], atol=1e-5)
    save(read(path), path)
    assert np.array_equal(outputs(str(path), SAMPLE)[0].shape, (4, 10))
