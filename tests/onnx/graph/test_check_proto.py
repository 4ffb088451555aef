"""Models that contradict themselves are refused by name before anything is made of them; odd valid ones are taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import FormatError, NotSupportedError
from quark.onnx import ModelQuantizer
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from quark.onnx.graph.model_file import load, read
from quark.onnx.graph.proto_file import read_header
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import cnn, images, outputs

Change = Callable[[onnx.ModelProto], None]
A8W8 = Config(get_default_config("A8W8"))


def weight(model: onnx.ModelProto, name: str = "w") -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def no_data(model: onnx.ModelProto) -> None:
    weight(model).ClearField("raw_data")


def of_type(kind: int) -> Change:
    return lambda model: setattr(weight(model), "data_type", kind)


def short_raw(model: onnx.ModelProto) -> None:
    weight(model).raw_data = weight(model).raw_data[:-4]


def few_floats(model: onnx.ModelProto) -> None:
    no_data(model)
    weight(model).float_data.extend([1.0] * 63)


def floats_as_integers(model: onnx.ModelProto) -> None:
    no_data(model)
    weight(model).int32_data.extend([1] * 64)


def twice(model: onnx.ModelProto) -> None:
    weight(model).float_data.extend([1.0] * 64)


def negative(model: onnx.ModelProto) -> None:
    weight(model).dims[0] = -8


def two_initializers(model: onnx.ModelProto) -> None:
    model.graph.initializer.add().CopyFrom(weight(model))


def two_inputs(model: onnx.ModelProto) -> None:
    model.graph.input.add().CopyFrom(model.graph.input[0])


def two_functions(model: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 17)]
    relu = [helper.make_node("Relu", ["a"], ["c"])]
    model.functions.extend([helper.make_function("mine", "F", ["a"], ["c"], relu, opsets)] * 2)


def two_attributes(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.extend([helper.make_attribute("k", 1), helper.make_attribute("k", 2)])


def another_value(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("k", 1.0))
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.INT


def no_value(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(onnx.AttributeProto(name="k", type=onnx.AttributeProto.INT))


def another_shape(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("x", 1, ["n", 9]))


def devices(model: onnx.ModelProto) -> None:
    model.graph.node[0].device_configurations.add()


def untyped_value(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = 0


def opaque_value(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.opaque_type.name = "secret"


def nul(model: onnx.ModelProto) -> None:
    model.graph.node[0].name = "a\0b"


def nul_weight(model: onnx.ModelProto) -> None:
    weight(model).name = model.graph.node[0].input[1] = "w\0"


def no_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "mine"


def no_ir_version(model: onnx.ModelProto) -> None:
    model.ClearField("ir_version")


def no_name(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(data_type=1, raw_data=b"1234")


def nothing_gives(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("absent", 1, [1]))


def wrong_product(model: onnx.ModelProto) -> None:
    weight(model).dims[:] = [4, 16]


def constant_node(model: onnx.ModelProto) -> None:
    part = TensorProto(name="k", data_type=1, dims=[5])
    model.graph.node.insert(0, helper.make_node("Constant", [], ["k"], name="kept", value=part))


def weight_of_a_function(model: onnx.ModelProto) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=TensorProto(data_type=1, dims=[5]))
    model.functions.append(helper.make_function("mine", "F", [], ["c"], [constant], [helper.make_opsetid("", 17)]))


def outside_of_a_node(model: onnx.ModelProto) -> None:
    part = TensorProto(name="k", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    part.external_data.add(key="location", value="../../etc/passwd")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["k"], name="kept", value=part))


def text(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(name="t", data_type=TensorProto.STRING, dims=[2], string_data=[b"one"])


WRONG: dict[str, tuple[Change, str]] = {
    "no data": (no_data, r"'w' has no data; its shape \[8, 8\] of float needs 64"),
    "type 0": (of_type(0), "'w' has the element type 0"),
    "type 99": (of_type(99), "'w' has the element type 99"),
    "text as raw data": (of_type(TensorProto.STRING), "'w' holds text as raw_data"),
    "short raw data": (short_raw, "'w' is damaged: it has 252 bytes.*needs 256"),
    "few floats": (few_floats, "'w' is damaged: it has 63 entries of float_data.*needs 64"),
    "floats as integers": (floats_as_integers, "'w' of float has its data in int32_data"),
    "data twice": (twice, "'w' has its data twice: as float_data and as raw_data"),
    "negative size": (negative, "'w' has the shape .*negative"),
    "text that lacks": (text, "'t' is damaged: it has 1 entries of string_data"),
    "two initializers": (two_initializers, "two initializers have the name 'w'"),
    "two inputs": (two_inputs, "two inputs have the name 'x'"),
    "two functions": (two_functions, "two functions have the name 'F'"),
    "two attributes": (two_attributes, "two attributes of the node 'y_node' have the name 'k'"),
    "a value of another type": (another_value, "'k' of the node 'y_node' has the type int, but its value is float"),
    "no value": (no_value, "'k' of the node 'y_node' has the type int, but its value is no value"),
    "another shape as an output": (another_shape, "'x' has one shape as an input and another as an output"),
    "spread over devices": (devices, "'y_node' is spread over devices"),
    "a type of none": (untyped_value, "'y' has the element type 0"),
    "an opaque type": (opaque_value, "'y' is opaque"),
    "NUL in a node": (nul, "NUL character"),
    "NUL in a weight": (nul_weight, "NUL character"),
    "no opset": (no_opset, "no version .opset_import."),
    "no IR version": (no_ir_version, "IR version"),
    "no name": (no_name, "an initializer has no name"),
    "an output that nothing gives": (nothing_gives, "nothing gives its output 'absent'"),
    "a Constant node": (constant_node, "the attribute 'value' of the node 'kept' has no data"),
    "a function": (weight_of_a_function, "'value' of the node 'Constant' in the function 'F' has no data"),
    "outside of a node": (outside_of_a_node, "'value' of the node 'kept' lies outside"),
    "what only the runtime sees": (wrong_product, "ONNX Runtime says: .*Incompatible dimensions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_contradicts_itself_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    model = odd.linear()
    change(model)
    with pytest.raises(FormatError, match=message):
        load(model)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=message):
        load(tmp_path / "m.onnx")


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(odd.linear().SerializeToString().replace(b"y_node", b"y_n\xffde"))
    with pytest.raises(FormatError, match="a name is no text"):
        read(tmp_path / "m.onnx")


# External data. -------------------------------------------------------------------------------------------------------


def saved(folder: Path, **entries: str) -> Path:
    """A model whose weight w lies in w.bin, with these entries of its external data changed."""
    model = odd.linear()
    (folder / "w.bin").write_bytes(weight(model).raw_data)
    weight(model).ClearField("raw_data")
    weight(model).data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "w.bin"} | entries).items():
        weight(model).external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


OUTSIDE = {
    "a length of another shape": ({"length": "128"}, "'w' have a length of 128 bytes; .*needs 256"),
    "an offset beyond": ({"offset": "4"}, "'w' is truncated"),
    "a negative offset": ({"offset": "-4"}, "must be numbers of bytes"),
    "an offset of words": ({"offset": "ten"}, "must be numbers of bytes"),
    "no location": ({"location": ""}, "a file of no possible name"),
    "NUL": ({"location": "w\0"}, "a file of no possible name"),
    "a long name": ({"location": "n" * 5000}, "a file of no possible name"),
    "a name too long for the system": ({"location": "n" * 300}, "'w' cannot be read"),
    "above": ({"location": "../w.bin"}, "lies outside the model's folder"),
    "absolute": ({"location": "/etc/passwd"}, "lies outside the model's folder"),
    "a link out": ({"location": "link"}, "lies outside the model's folder"),
    "a folder": ({"location": "folder"}, "no regular file"),
    "a pipe": ({"location": "pipe"}, "no regular file"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_external_data_that_are_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    entries, message = OUTSIDE[name]
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (tmp_path / "secret").write_bytes(bytes(256))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match=message):
        load(saved(folder, **entries))


@pytest.mark.parametrize("bytes_of_weight", [256, 8192])
def test_an_external_tensor_may_say_that_it_has_no_bytes_inside(bytes_of_weight: int, tmp_path: Path) -> None:
    """A field that is set and empty is another thing than one that is not there, and means the same here."""
    path = saved(tmp_path)
    model = onnx.load(path, load_external_data=False)
    weight(model).raw_data = b""
    weight(model).dims[:] = [8, bytes_of_weight // 32]
    (tmp_path / "w.bin").write_bytes(bytes(bytes_of_weight))
    path.write_bytes(model.SerializeToString())
    loaded = read(path).graph.initializers["w"].const_value
    assert loaded is not None and loaded.nbytes == bytes_of_weight


def test_external_data_of_two_places_are_refused(tmp_path: Path) -> None:
    """As ONNX Runtime refuses them: readers would differ in which one they take."""
    path = saved(tmp_path)
    model = onnx.load(path, load_external_data=False)
    weight(model).external_data.add(key="location", value="w.bin")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match="'w' have a key twice"):
        load(path)


def test_hard_linked_data_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    os.link(tmp_path / "w.bin", tmp_path / "same.bin")
    feeds = [odd.sample(odd.linear())]
    ModelQuantizer(A8W8).quantize_model(path, tmp_path / "out.onnx", feeds)
    expected = ModelQuantizer(A8W8).quantize_model(odd.linear(), None, feeds)
    assert expected is not None
    assert np.array_equal(outputs(str(tmp_path / "out.onnx"), feeds[0])[0], outputs(expected, feeds[0])[0])


def test_external_data_of_nodes_and_bodies_are_read(tmp_path: Path) -> None:
    model = odd.a_loop()
    plus = helper.make_node("Add", ["s3", "k"], ["s4"], name="plus")
    loop = next(node for node in model.graph.node if node.op_type == "Loop").attribute[0].g
    loop.node.append(plus)
    loop.output[1].name = "s4"
    inside = onnx.ModelProto()
    inside.CopyFrom(model)
    array = np.arange(8, dtype=np.float32)
    (tmp_path / "k.bin").write_bytes(bytes(4) + array.tobytes())
    part = TensorProto(name="k", data_type=1, dims=[8], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "k.bin"), ("offset", "4"), ("length", "32")):
        part.external_data.add(key=key, value=value)
    loop.initializer.append(part)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["free"], name="free", value=part))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    feeds = [odd.sample(model)]
    ModelQuantizer(A8W8).quantize_model(tmp_path / "m.onnx", tmp_path / "out.onnx", feeds)
    body = next(node for node in inside.graph.node if node.op_type == "Loop").attribute[0].g
    body.initializer.append(numpy_helper.from_array(array, "k"))
    found, expected = outputs(str(tmp_path / "out.onnx"), feeds[0])[0], outputs(inside, feeds[0])[0]
    assert sqnr(expected, found) > 25


# Sparse tensors. ------------------------------------------------------------------------------------------------------


def sparse(values: Any, indices: Any, dims: list[int]) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.asarray(values, np.float32), "w"),
        numpy_helper.from_array(np.asarray(indices, np.int64), "w_indices"),
        dims,
    )


def with_sparse(tensor: onnx.SparseTensorProto) -> onnx.ModelProto:
    model = odd.linear()
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(tensor)
    return model


@pytest.mark.parametrize("indices", [[0, 9, 63], [[0, 0], [1, 1], [7, 7]]])
def test_a_sparse_weight_is_written_out(indices: Any) -> None:
    model = with_sparse(sparse([1, 2, 3], indices, [8, 8]))
    before = model.SerializeToString()
    array = load(model).graph.initializers["w"].const_value
    assert array is not None
    assert np.array_equal(array.numpy(), np.diag([1, 2, 0, 0, 0, 0, 0, 3]).astype(np.float32))
    assert model.SerializeToString() == before


def test_a_sparse_constant_is_written_out() -> None:
    model = odd.linear()
    del model.graph.initializer[:]
    constant = helper.make_node("Constant", [], ["w"], name="c", sparse_value=sparse([1, 2, 3], [0, 9, 63], [8, 8]))
    model.graph.node.insert(0, constant)
    feeds = [odd.sample(model)]
    found = ModelQuantizer(A8W8).quantize_model(model, None, feeds)
    assert found is not None
    assert sqnr(outputs(model, feeds[0])[0], outputs(found, feeds[0])[0]) > 25


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (sparse([1, 2], [0, 64], [8, 8]), "an index lies outside"),
        (sparse([1, 2], [9, 9], [8, 8]), "do not rise"),
        (sparse([1, 2], [1, 2, 3], [8, 8]), "2 values and indices of shape"),
        (sparse([[1, 2]], [1, 2], [8, 8]), "no such thing"),
        (sparse([1, 2], [1, 2], [1 << 20, 1 << 20]), "4398046511104 bytes"),
    ],
)
def test_sparse_tensors_that_contradict_themselves(tensor: onnx.SparseTensorProto, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load(with_sparse(tensor))


# Functions and bodies. ------------------------------------------------------------------------------------------------


def calling(levels: int, calls: int) -> onnx.ModelProto:
    """Functions f0 to f<levels - 1>, each of which calls the one before so often."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    b = odd.Odd()
    b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.raw(f"f{levels - 1}", ["h"], ["y"], domain="mine")
    model = b.finish(odd.ROW, {"y": ["n", 8]}, more=["mine"])
    for level in range(levels):
        names = ["a", *(f"t{index}" for index in range(calls - 1)), "c"]
        kind = {"op_type": f"f{level - 1}", "domain": "mine"} if level else {"op_type": "Relu"}
        nodes = [helper.make_node(inputs=[a], outputs=[c], **kind) for a, c in pairwise(names)]
        model.functions.append(helper.make_function("mine", f"f{level}", ["a"], ["c"], nodes, opsets))
    return model


def test_functions_that_grow_without_end_are_refused() -> None:
    with pytest.raises(FormatError, match="'f14' takes over 20000 nodes"):
        read(calling(24, 2))
    with pytest.raises(FormatError, match="'f15' lies 24 functions deep"):
        read(calling(40, 1))
    circle = calling(3, 1)
    circle.functions[0].node[0].op_type, circle.functions[0].node[0].domain = "f2", "mine"
    with pytest.raises(FormatError, match="'f2' calls itself"):
        read(circle)
    load(calling(24, 1))


def test_bodies_without_end_are_refused() -> None:
    graph = odd.linear().graph
    for _ in range(28):
        outer = onnx.GraphProto(name="g")
        outer.node.append(helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=onnx.GraphProto()))
        graph = outer
    model = odd.linear()
    model.graph.CopyFrom(graph)
    with pytest.raises(FormatError, match="over 24 deep"):
        read(model)


def test_maps_are_refused_with_what_to_do() -> None:
    """Classifiers of scikit-learn and LightGBM give a list of dicts, label -> probability."""
    model = odd.linear()
    kind = model.graph.output.add(name="probabilities").type.sequence_type.elem_type.map_type
    kind.key_type = TensorProto.INT64
    kind.value_type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(NotSupportedError, match=r"'probabilities' is a map.*zipmap=False"):
        read(model)


# Files. ---------------------------------------------------------------------------------------------------------------


def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    for path in (tmp_path / "m.onnx", Path("/dev/zero"), tmp_path):
        for take in (read_header, load):
            with pytest.raises(FormatError, match="is not a file"):
                take(path)


def test_a_file_beyond_protobuf_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(FormatError, match="over 2 GB has its weights beside it"):
        load(tmp_path / "m.onnx")


def test_what_the_checker_misses_and_the_runtime_does_not_is_kept(tmp_path: Path) -> None:
    model = odd.linear()
    model.graph.ClearField("name")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = [odd.sample(odd.linear())]
    ModelQuantizer(A8W8).quantize_model(model, tmp_path / "out.onnx", feeds)
    assert sqnr(outputs(model, feeds[0])[0], outputs(str(tmp_path / "out.onnx"), feeds[0])[0]) > 25


def test_operators_of_another_library_are_kept(tmp_path: Path) -> None:
    b = odd.Odd()
    b.raw("Theirs", [b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")], ["y"], domain="their.domain")
    model = b.finish(odd.ROW, {"y": ["n", 8]}, more=["their.domain"])
    found = ModelQuantizer(Config(get_default_config("UINT8_DYNAMIC_QUANT"))).quantize_model(model)
    assert found is not None and [node.op_type for node in found.graph.node][-1] == "Theirs"


def test_the_checks_leave_a_model_as_it_is() -> None:
    model = cnn()
    before = model.SerializeToString()
    load(model)
    assert model.SerializeToString() == before and images(1)


def test_shapes_within_the_graph_that_contradict_its_inputs_are_replaced() -> None:
    """ONNX Runtime infers them anew; written on, they made a file that it refuses."""
    b = helper.make_node
    nodes = [b("Relu", ["x"], ["a"], name="a"), b("Relu", ["a"], ["y"], name="y")]
    said = [helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 17, 3])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], value_info=said))
    model.opset_import[0].version, model.ir_version = 17, 8
    (value,) = read(model).graph[0].outputs
    assert [str(size) for size in value.shape or ()] == ["n", "4"]
    said[0].type.tensor_type.shape.CopyFrom(ends[0].type.tensor_type.shape)
    said[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    model.graph.value_info[0].CopyFrom(said[0])
    (kept,) = read(model).graph[0].outputs
    assert [str(size) for size in kept.shape or ()] == ["batch", "4"]
