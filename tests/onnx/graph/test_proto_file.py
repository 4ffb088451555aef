"""Files without their weights: what is read of one is what the parser of the whole gives, whatever the bytes are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import QuarkError
from quark.onnx.graph import proto_file
from quark.onnx.graph.proto_file import read_ends, read_header, read_light
from tests.models.onnx_zoo import cnn


def model() -> onnx.ModelProto:
    """A large weight of floats, one of bytes, one in a typed field, and a small one."""
    random = np.random.default_rng(0)
    floats = numpy_helper.from_array(random.normal(size=(32, 32)).astype(np.float32), "w")
    codes = numpy_helper.from_array(random.integers(0, 9, (2, 600), dtype=np.uint8), "codes")
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [1100], random.normal(size=1100))
    small = numpy_helper.from_array(np.ones(3, np.float32), "small")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [floats, codes, typed, small], doc_string="text")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def seen(read: Callable[[], tuple[onnx.ModelProto, dict[str, Any]]]) -> Any:
    """What a reading gives, or says."""
    try:
        proto, arrays = read()
    except QuarkError as error:
        return type(error), str(error)
    held = {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}
    return proto.SerializeToString(deterministic=True), held


def test_large_weights_are_read_beside_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(model(), file)
    expected = seen(lambda: proto_file._lighten(read_header(file)))
    monkeypatch.setattr(proto_file, "_read_message", None)
    proto, arrays = read_light(file)
    assert list(arrays) == ["w", "codes"] and not arrays["w"].flags.writeable
    assert seen(lambda: (proto, arrays)) == expected
    assert read_ends(file) == proto
    with pytest.raises(ValueError, match="read-only"):
        arrays["w"][0, 0] = 1


@pytest.mark.slow
def test_a_file_of_other_bytes_is_what_it_is_to_the_parser(tmp_path: Path) -> None:
    """Each byte beside the values is changed, and the file is cut there; most of that damages it."""
    file, whole = tmp_path / "model.onnx", model().SerializeToString()
    values = [whole.index(tensor.raw_data) for tensor in model().graph.initializer[:2]]
    inside = {i for start, size in zip(values, (4096, 1200), strict=True) for i in range(start + 8, start + size - 8)}
    typed = whole.index(model().graph.initializer[2].SerializeToString()[8:4000])
    inside |= set(range(typed + 20, typed + 3900))
    outcomes = set()
    for index in set(range(len(whole))) - inside:
        for changed in (whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :], whole[:index]):
            file.write_bytes(changed)
            expected = seen(lambda: proto_file._lighten(read_header(file)))
            assert seen(lambda: read_light(file)) == expected, index
            outcomes.add(isinstance(expected[0], type))
    assert outcomes == {False, True}


def test_what_is_unusual_is_left_to_the_parser(tmp_path: Path) -> None:
    twice, apart, plain = model(), model(), model()
    twice.graph.initializer[1].name = "w"
    apart.graph.initializer[0].float_data.extend([1.0] * 1024)
    bodies = model().SerializeToString() + onnx.ModelProto(graph=onnx.GraphProto(doc_string="more")).SerializeToString()
    contents = {"twice": twice.SerializeToString(), "apart": apart.SerializeToString(), "merged": bodies}
    contents |= {"none": cnn().SerializeToString(), "not": b"no model" * 1000, "empty": b""}
    for name, content in contents.items():
        file = tmp_path / f"{name}.onnx"
        file.write_bytes(content)
        assert seen(lambda: read_light(file)) == seen(lambda: proto_file._lighten(read_header(file))), name  # noqa: B023
    text = tmp_path / "model.json"
    onnx.save(plain, text)
    assert set(read_light(text)[1]) == {"w", "codes"}
