"""Weights of LSTM, GRU and RNN, and tables of embeddings, beside activations in float or quantized as they come.

The codes are read back by the formulas of ONNX; an LSTM in integers is compared with that of onnxruntime.quantization.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import ConfigError
from quark.onnx import Int4Spec, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity, QuantType, UInt8Spec
from quark.onnx import quantize_dynamic as dynamic
from tests.models.onnx_sessions import in_exact_kernels
from tests.models.onnx_zoo import Array, outputs, stored

HIDDEN, INPUTS, GATES = 16, 12, {"LSTM": 4, "GRU": 3, "RNN": 1}
OUTPUTS = {"LSTM": ["y", "h", "c"], "GRU": ["y", "h"], "RNN": ["y", "h"]}


def recurrent(op_type: str = "LSTM", directions: int = 1) -> onnx.ModelProto:
    """x (time, batch, 12) -> y, h and c; the second direction has weights ten times as large."""
    random, rows = np.random.default_rng(0), GATES[op_type] * HIDDEN
    size = np.array([1, 10])[:directions, None, None]
    arrays = {
        "w": random.normal(0, 0.3, (directions, rows, INPUTS)) * size,
        "r": random.normal(0, 0.1, (directions, rows, HIDDEN)) * size,
        "b": random.normal(0, 0.1, (directions, 2 * rows)),
    }
    direction = "bidirectional" if directions == 2 else "forward"
    names = OUTPUTS[op_type]
    node = helper.make_node(op_type, ["x", *arrays], names, "layer", hidden_size=HIDDEN, direction=direction)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", "n", INPUTS])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def table(rows: int = 64, columns: int = 40, tied: bool = False) -> onnx.ModelProto:
    """i (n) -> y = T[i] @ w, where one row of T is far larger than the others; tied: T is an output's operand, too."""
    random = np.random.default_rng(0)
    values = random.normal(0.2, 1, (rows, columns)) * np.where(np.arange(rows) == 5, 50, 1)[:, None]
    nodes = [helper.make_node("Gather", ["t", "i"], ["rows"], "pick")]
    nodes.append(helper.make_node("MatMul", ["rows", "w"], ["y"], "layer"))
    results, constants = ["rows", "y"], {"t": values, "w": random.normal(0, 0.2, (columns, 8))}
    if tied:
        nodes.append(helper.make_node("Mul", ["t", "t"], ["square"], "square"))
        results.append("square")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def sequence(seed: int = 1) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).normal(0, 1, (9, 3, INPUTS)).astype(np.float32)}


def weights_only(model: onnx.ModelProto, weight: Any, **options: Any) -> onnx.ModelProto:
    config = QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=weight), WeightsOnly=True, **options)
    made = ModelQuantizer(config).quantize_model(model)
    assert made is not None
    return made


def as_it_comes(model: onnx.ModelProto, **fields: Any) -> onnx.ModelProto:
    made = dynamic(model, **fields)
    assert made is not None
    return made


def types(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def with_weights(model: onnx.ModelProto, arrays: dict[str, Array]) -> onnx.ModelProto:
    """The float model with other weights."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name].astype(np.float32), tensor.name))
    return changed


def kernel_weights(made: onnx.ModelProto) -> dict[str, Array]:
    """W and R that the codes of a DynamicQuantizeLSTM stand for, in the layout of LSTM."""
    (node,) = (node for node in made.graph.node if node.op_type == "DynamicQuantizeLSTM")
    held, result = stored(made), {}
    for name, index, scale, zero in (("w", 1, 8, 9), ("r", 2, 10, 11)):
        codes, scales, zeros = (held[node.input[i]].astype(np.float32) for i in (index, scale, zero))
        shape = (len(codes), 1, -1)
        result[name] = ((codes - zeros.reshape(shape)) * scales.reshape(shape)).swapaxes(1, 2)
    return result


AS_ASKED = {"RefineWeightScales": False}
"""No scales of channels where one was asked for, and would lose too much."""


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
def test_an_lstm_becomes_the_integer_kernel(directions: int, per_channel: bool, kind: QuantType) -> None:
    source = recurrent(directions=directions)
    made = as_it_comes(source, weight_type=kind, per_channel=per_channel, extra_options=AS_ASKED)
    assert types(made) == {"DynamicQuantizeLSTM"}
    (node,) = made.graph.node
    scale = stored(made)[node.input[8]]
    # The kernel has one zero point for all outputs of a direction.
    per_output = per_channel and kind is QuantType.QInt8
    assert scale.shape == ((directions, 4 * HIDDEN) if per_output else (directions,))
    for name, decoded in kernel_weights(made).items():
        step = scale if name == "w" else stored(made)[node.input[10]]
        # Half a step, and what the zero point is rounded by.
        bound = step.reshape(directions, -1, 1) * (0.501 if kind is QuantType.QInt8 else 1.001)
        assert (np.abs(decoded - stored(source)[name]) <= bound).all()
    for expected, got in zip(outputs(source, sequence()), outputs(in_exact_kernels(made), sequence()), strict=True):
        assert sqnr(expected, got) > 25


def test_it_computes_what_that_of_onnxruntime_computes(tmp_path: Path) -> None:
    """Of one scale for each direction, which is all that its writer has."""
    from onnxruntime.quantization import quantize_dynamic

    source = recurrent()
    onnx.save(source, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    theirs = outputs(str(tmp_path / "int8.onnx"), sequence())
    for expected, got in zip(theirs, outputs(as_it_comes(source, extra_options=AS_ASKED), sequence()), strict=True):
        np.testing.assert_array_equal(expected, got)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("op_type", ["GRU", "RNN"])
def test_what_has_no_integer_kernel_keeps_its_weights_in_half_the_size(op_type: str, directions: int) -> None:
    """Cast when the file is loaded; as good as the float model, where codes would cost accuracy and gain no time."""
    source = recurrent(op_type, directions)
    made = as_it_comes(source)
    assert types(made) == {op_type, "Cast"}
    for name in ("w", "r"):
        assert (stored(made)[f"{name}_quantized"] == stored(source)[name].astype(np.float16)).all()
    for expected, got in zip(outputs(source, sequence()), outputs(made, sequence()), strict=True):
        assert sqnr(expected, got) > 60


def test_weights_that_float16_does_not_hold_stay_float_beside_those_that_it_does() -> None:
    source = recurrent("GRU")
    for initializer in source.graph.initializer:
        if initializer.name == "r":
            initializer.CopyFrom(numpy_helper.from_array(stored(source)["r"] * np.float32(1e7), "r"))
    made = as_it_comes(source)
    assert "w_quantized" in stored(made) and (stored(made)["r"] == stored(source)["r"]).all()


SPECS = [Int8Spec(), Int8Spec(quant_granularity=QuantGranularity.Channel), UInt8Spec(), Int4Spec()]
SPECS.append(Int4Spec(quant_granularity=QuantGranularity.Group))


@pytest.mark.parametrize("op_type", list(GATES))
@pytest.mark.parametrize("spec", SPECS, ids=["int8", "channel", "uint8", "int4", "group"])
def test_weight_only_recurrent_layers_read_decoded_weights(op_type: str, spec: Any) -> None:
    source = recurrent(op_type, 2)
    _reads_what_its_codes_say(source, weights_only(source, spec, BlockSize=16))


def _reads_what_its_codes_say(source: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """The runtime decodes the weights; the float model with these weights computes the same."""
    (layer,) = (node for node in made.graph.node if node.op_type in GATES)
    assert types(made) == {layer.op_type, "DequantizeLinear"}
    shown = onnx.ModelProto()
    shown.CopyFrom(made)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in layer.input[1:3])
    decoded = dict(zip(("w", "r"), outputs(shown, sequence()), strict=True))
    for name, array in decoded.items():
        assert 10 < sqnr(stored(source)[name], array) < 60
    for expected, got in zip(
        outputs(with_weights(source, decoded), sequence()), outputs(made, sequence()), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)  # float32 sums of 28 products below 1


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("spec", [Int8Spec, UInt8Spec])
def test_rows_of_a_table_are_picked_as_codes(per_row: bool, spec: Any) -> None:
    source, feed = table(), {"i": np.array([5, 0, 63, 5])}
    granularity = QuantGranularity.Channel if per_row else QuantGranularity.Tensor
    made = weights_only(source, spec(quant_granularity=granularity))
    codes = stored(made)["t_quantized"]
    assert codes.dtype.itemsize == 1 and codes.shape == (64, 40) and "t" not in stored(made)
    expected, rows = stored(source)["t"][feed["i"]], outputs(made, feed)[0]
    span = (expected if per_row else stored(source)["t"]).max(-1 if per_row else None, keepdims=True)
    low = (expected if per_row else stored(source)["t"]).min(-1 if per_row else None, keepdims=True)
    # At most a step of the wider of both kinds of range.
    assert (np.abs(rows - expected) <= np.maximum(abs(span), abs(low)) / 127).all()
    assert (rows != expected).any()


def test_rows_of_a_dynamic_table_are_as_good_as_those_of_onnxruntime(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    source, feed = table(columns=400), {"i": np.arange(64)}
    onnx.save(source, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    made, expected = as_it_comes(source, extra_options=AS_ASKED), outputs(source, feed)[0]
    theirs = outputs(str(tmp_path / "int8.onnx"), feed)[0]
    assert sqnr(expected, outputs(made, feed)[0]) >= sqnr(expected, theirs) - 1e-3
    assert made.ByteSize() <= (tmp_path / "int8.onnx").stat().st_size * 1.02
    assert sqnr(expected, outputs(as_it_comes(source, per_channel=True), feed)[0]) > sqnr(expected, theirs)


@pytest.mark.parametrize("columns", [40, 48])
def test_a_table_of_four_bits_is_one_in_blocks(columns: int) -> None:
    """Against the formula, also where the last block is not full."""
    source, feed = table(columns=columns), {"i": np.array([5, 0, 63, 5])}
    made = weights_only(source, Int4Spec(quant_granularity=QuantGranularity.Group), BlockSize=16)
    assert "GatherBlockQuantized" in types(made)
    codes, scale = (stored(made)[f"t_{part}"].astype(np.float32) for part in ("quantized", "scale"))
    assert scale.shape == (64, 3)
    decoded = codes * scale.repeat(16, 1)[:, :columns]
    np.testing.assert_array_equal(outputs(made, feed)[0], decoded[feed["i"]])
    assert 10 < sqnr(stored(source)["t"], decoded) < 40


def test_a_table_that_is_read_otherwise_or_is_small_stays_in_float() -> None:
    """As would an int4 one without blocks, which no runtime picks rows of."""
    for source in (table(tied=True), table(rows=16)):
        assert "t" in stored(weights_only(source, Int8Spec()))
    assert "t" in stored(weights_only(table(), Int4Spec()))


def test_static_activations_leave_recurrent_layers_in_float() -> None:
    config = QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec()), OpTypesToQuantize=["LSTM"])
    with pytest.raises(ConfigError, match="LSTM cannot be quantized"):
        ModelQuantizer(config).quantize_model(recurrent(), None, [sequence()])


def test_an_lstm_in_both_branches_with_weights_from_around_is_written_once() -> None:
    """As PyTorch writes one: the gates are put in another order in each branch."""
    around = recurrent()
    (node,) = around.graph.node
    helpers = {name: np.array(value, np.int64) for name, value in (("a", [0]), ("m", [32]), ("e", [64]), ("ax", [1]))}
    branches = {}
    for branch in ("then_branch", "else_branch"):
        nodes = [
            helper.make_node("Slice", ["w", "m", "e", "ax"], ["back"]),
            helper.make_node("Slice", ["w", "a", "m", "ax"], ["front"]),
            helper.make_node("Concat", ["back", "front"], ["turned"], axis=1),
            helper.make_node("LSTM", ["x", "turned", "r", "b"], [f"{branch}_y"], f"{branch}_layer", hidden_size=HIDDEN),
        ]
        result = helper.make_tensor_value_info(f"{branch}_y", TensorProto.FLOAT, None)
        branches[branch] = helper.make_graph(nodes, branch, [], [result])
    node.CopyFrom(helper.make_node("If", ["c"], ["y"], "choose", **branches))
    del around.graph.output[1:]
    around.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    around.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in helpers.items())
    made = as_it_comes(around)
    sizes = sorted(array.nbytes for array in stored(made).values())
    # W has 64 x 12 values, R 64 x 16, which is large enough to be looked for in both branches.
    assert sizes[-1] == 1024 and sizes.count(1024) == 1
    bodies = [attribute.g for attribute in made.graph.node[0].attribute]
    assert [[n.op_type for n in body.node] for body in bodies] == [["DynamicQuantizeLSTM"]] * 2
    for chosen in (True, False):
        feed = {**sequence(), "c": np.array(chosen)}
        assert sqnr(outputs(around, feed)[0], outputs(in_exact_kernels(made), feed)[0]) > 25
