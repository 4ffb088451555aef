"""Weights beside a model: never those of another run, under the documented name where nothing is replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quark.errors import FormatError, OutputExistsError
from quark.onnx.graph.model_file import read
from quark.onnx_ops.saving import save


def model(value: float, body: bool = False) -> ir.Model:
    """x + w, with a large weight of this value; in the body of an If too."""
    weight = onnx.numpy_helper.from_array(np.full((40, 40), value, np.float32), "w")
    nodes = [onnx.helper.make_node("Add", ["x", "w"], ["y"])]
    floats = onnx.TensorProto.FLOAT
    y = onnx.helper.make_tensor_value_info("y", floats, [40, 40])
    if body:
        inner = onnx.numpy_helper.from_array(np.full((50, 40), value, np.float32), "inner")
        shown = onnx.helper.make_tensor_value_info("branch", floats, [50, 40])
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", ["inner"], ["branch"])], "b", [], [shown], [inner]
        )
        nodes.append(onnx.helper.make_node("If", ["c"], ["z"], then_branch=graph, else_branch=graph))
    inputs = [onnx.helper.make_tensor_value_info("x", floats, [40, 40])]
    inputs += [onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])] if body else []
    graph = onnx.helper.make_graph(nodes, "g", inputs, [y], [weight])
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8))


def weights(path: Path) -> float:
    """The value of the weights of a saved model, all of which lie outside."""
    (tensor,) = onnx.load(path).graph.initializer
    return float(onnx.numpy_helper.to_array(tensor).mean())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hashed(value: float) -> str:
    return f"m.onnx.{hashlib.sha256(np.full((40, 40), value, np.float32).tobytes()).hexdigest()[:12]}.data"


def test_a_model_that_is_replaced_never_reads_the_weights_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save(model(1), path, external_data=True)
    assert sorted(contents(tmp_path)) == ["m.onnx", "m.onnx.data"]
    replace, seen = Path.replace, []

    def watched(self: Path, target: Path) -> Path:
        result = replace(self, target)
        seen.append((target.name, weights(path)))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        save(model(2), path, external_data=True)
    assert seen == [(hashed(2), 1), ("m.onnx", 2)]
    assert sorted(contents(tmp_path)) == ["m.onnx", hashed(2)] and weights(path) == 2


@pytest.mark.parametrize("first", [None, 1, 2])
def test_the_same_run_gives_the_same_bytes(first: float | None, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if first is not None:
        save(model(first), path, external_data=True)
    save(model(2), path, external_data=True)
    expected = contents(tmp_path)
    assert sorted(expected) == ["m.onnx", hashed(2) if first == 1 else "m.onnx.data"]
    save(model(2), path, external_data=True)
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("stopped", range(1, 4))
def test_a_run_that_stopped_is_repeated_without_a_trace(stopped: int, tmp_path: Path) -> None:
    """After so many of its three steps: weights in place, model in place, old weights removed."""
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
        save(model(1), tmp_path / folder / "m.onnx", external_data=True)
    save(model(2), tmp_path / "whole" / "m.onnx", external_data=True)
    whole, path = contents(tmp_path / "whole"), tmp_path / "stopped" / "m.onnx"
    for name in list(whole)[: 0 if stopped == 1 else None]:
        (path.parent / name).write_bytes(whole[name])
    (path.parent / hashed(2)).write_bytes(whole[hashed(2)])
    if stopped == 3:
        (path.parent / "m.onnx.data").unlink()
    (path.parent / hashed(7)).write_bytes(b"of another run that was killed")
    (path.parent / "other.onnx.data").write_bytes(b"not ours")
    left = {"m.onnx.data": (path.parent / "m.onnx.data").read_bytes()} if stopped == 2 else {}
    save(model(2), path, external_data=True)
    # Nothing says any longer whose the plain name is: it stays.
    assert contents(path.parent) == {**whole, **left, "other.onnx.data": b"not ours"}


def test_weights_that_are_inside_again_leave_no_file(tmp_path: Path) -> None:
    save(model(1), tmp_path / "m.onnx", external_data=True)
    save(model(1), tmp_path / "m.onnx")
    assert sorted(contents(tmp_path)) == ["m.onnx"]


def test_weights_of_a_body_move_with_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for value in (1, 2):
        save(model(value, body=True), path, external_data=True)
    assert len(contents(tmp_path)) == 2
    loaded = onnx.load(path)
    (inner,) = loaded.graph.node[1].attribute[0].g.initializer
    assert (
        onnx.numpy_helper.to_array(inner).mean() == 2
        and onnx.numpy_helper.to_array(loaded.graph.initializer[0])[0, 0] == 2
    )


def test_the_source_keeps_its_weights(tmp_path: Path) -> None:
    """A model whose weights bear the name that those of the output would get; or that is replaced itself."""
    source, output = tmp_path / "float.onnx", tmp_path / "m.onnx"
    save(model(1), output, external_data=True)
    output.rename(source)
    save(model(3), output)
    save(read(source), output, external_data=True)
    assert weights(source) == weights(output) == 1
    assert sorted(contents(tmp_path)) == ["float.onnx", "m.onnx", hashed(1), "m.onnx.data"]
    save(read(output), output, external_data=True)
    assert weights(source) == weights(output) == 1


def test_a_source_in_the_folder_above_keeps_its_weights(tmp_path: Path) -> None:
    save(model(1), tmp_path / "float.onnx", external_data=True)
    (tmp_path / "sub").mkdir()
    (tmp_path / "float.onnx.data").rename(tmp_path / "sub" / "m.onnx.data")
    proto = onnx.load(tmp_path / "float.onnx", load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "sub/m.onnx.data"
    onnx.save(proto, tmp_path / "float.onnx")
    save(read(tmp_path / "float.onnx"), tmp_path / "sub" / "m.onnx")
    save(model(2), tmp_path / "sub" / "m.onnx")
    save(read(tmp_path / "float.onnx"), tmp_path / "sub" / "m.onnx")
    assert sorted(contents(tmp_path / "sub")) == ["m.onnx", hashed(1), "m.onnx.data"]
    assert weights(tmp_path / "float.onnx") == weights(tmp_path / "sub" / "m.onnx") == 1


@pytest.mark.parametrize("place", ["M2.ONNX", "m.onnx.bak", "../above"])
def test_weights_that_a_model_of_any_name_reads_stay(place: str, tmp_path: Path) -> None:
    """Also where that model is a copy of the one that is replaced."""
    path, other = tmp_path / "sub" / "m.onnx", tmp_path / "sub" / place
    path.parent.mkdir()
    save(model(1), path, external_data=True)
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location" and place.startswith(".."):
            entry.value = "sub/m.onnx.data"
    onnx.save(proto, other, format="protobuf")
    for value in (2, 3):
        save(model(value), path, external_data=True)
        assert weights(other) == 1 and weights(path) == value


def test_weights_of_a_model_far_away_are_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    """And the files that a model read, whatever else names them."""
    path, data = tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    data.write_bytes(b"anyone's")
    for value in (1, 2):
        save(model(value), path, external_data=True)
        assert data.read_bytes() == b"anyone's" and weights(path) == value
    source = read(path)
    for _ in range(2):
        save(source, path)
        assert weights(path) == 2


def test_the_source_in_memory_keeps_its_weights(tmp_path: Path) -> None:
    """Whatever its file is called, if it is still there."""
    save(model(1), tmp_path / "m.onnx", external_data=True)
    source = read(tmp_path / "m.onnx")
    save(model(3), tmp_path / "n.onnx")
    (tmp_path / "n.onnx").replace(tmp_path / "m.onnx")
    save(source, tmp_path / "m.onnx")
    save(source, tmp_path / "other.onnx")
    assert weights(tmp_path / "m.onnx") == weights(tmp_path / "other.onnx") == 1
    assert (tmp_path / "m.onnx.data").exists()


@pytest.mark.parametrize("length", [240, 255])
def test_long_names(length: int, tmp_path: Path) -> None:
    path = tmp_path / ("m" * (length - 5) + ".onnx")
    for value in (1, 2):
        save(model(value), path, external_data=True)
        assert weights(path) == value and len(contents(tmp_path)) == 2


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    save(model(1), tmp_path / "m.onnx")
    before = contents(tmp_path)
    with pytest.raises(OutputExistsError):
        save(model(2), tmp_path / "m.onnx", overwrite=False)
    wrong = model(2)
    next(iter(wrong.graph)).op_type = "NoSuchOperator"
    with pytest.raises(FormatError, match="would be written to .*m.onnx is no valid ONNX model: .*NoSuchOperator"):
        save(wrong, tmp_path / "m.onnx")
    assert contents(tmp_path) == before
