"""Inputs of text: numpy's own text arrays, as .npz files hold them without pickled objects, and arrays of objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quark.errors import CalibrationError
from quark.onnx import ModelQuantizer, PathDataReader, QConfig
from tests.commands.program import quark
from tests.models.onnx_zoo import Builder, run

COLOURS = ["red", "green", "ultramarine"]


def tabular() -> onnx.ModelProto:
    """A row of one category and four numbers, two layers."""
    b = Builder()
    b.nodes.append(
        helper.make_node(
            "LabelEncoder", ["colour"], ["code"], name="code", domain="ai.onnx.ml", keys_strings=COLOURS,
            values_floats=[0.0, 1.0, 2.0],
        )
    )  # fmt: skip
    b.node("Concat", ["code", "x"], "row", axis=1)
    b.node("Relu", [b.node("MatMul", ["row", b.constant("a", b.random.normal(0, 0.5, (5, 16)))], "hidden")], "live")
    b.node("MatMul", ["live", b.constant("b", b.random.normal(0, 0.5, (16, 3)))], "y")
    inputs = [
        helper.make_tensor_value_info("colour", TensorProto.STRING, ["n", 1]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
    ]
    graph = helper.make_graph(
        b.nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])], b.initializers
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def rows(count: int = 12) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    colours = np.array([COLOURS[i % 3] for i in range(count)]).reshape(-1, 1)
    return {"colour": colours, "x": random.normal(size=(count, 4)).astype(np.float32)}


@pytest.mark.parametrize("as_objects", [False, True])
def test_samples_in_memory(as_objects: bool) -> None:
    feed = rows()
    feed["colour"] = feed["colour"].astype(object) if as_objects else feed["colour"]
    quantizer = ModelQuantizer(QConfig.get_default_config("A8W8"))
    done = quantizer.quantize_model(tabular(), None, [feed])
    assert done is not None and quantizer.damage is not None and quantizer.damage.sqnr > 25
    assert run(done, feed).shape == (12, 3)


def test_numbers_and_bytes_are_no_text() -> None:
    for wrong in (np.zeros((12, 1), np.float32), rows()["colour"].astype("S")):
        with pytest.raises(CalibrationError, match=r"the model expects colour: text \[n, 1\], x: float32"):
            ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(
                tabular(), None, [{**rows(), "colour": wrong}]
            )


def test_files_hold_text_and_are_read_in_batches(tmp_path: Path) -> None:
    onnx.save(tabular(), tmp_path / "in.onnx")
    np.savez(tmp_path / "rows.npz", **rows())
    (tmp_path / "many").mkdir()
    for index, count in enumerate((2, 5)):  # texts of different width
        np.savez(tmp_path / "many" / f"{index}.npz", **rows(count))
    for data, batch in (("rows.npz", 4), ("many", 3)):
        reader = PathDataReader(tmp_path / "in.onnx", tmp_path / data, batch_size=batch)
        feeds = list(iter(reader.get_next, None))
        assert sorted({text for feed in feeds for text in feed["colour"].ravel()}) == sorted(COLOURS)
    np.savez(tmp_path / "objects.npz", colour=rows()["colour"].astype(object), x=rows()["x"])
    refused = quark("quantize", tmp_path / "in.onnx", "--calib", tmp_path / "objects.npz", "-o", tmp_path / "no.onnx")
    assert refused.code == 1 and "save array.astype(str)" in refused.err and not (tmp_path / "no.onnx").exists()


@pytest.mark.slow
def test_the_commands_take_text(tmp_path: Path) -> None:
    onnx.save(tabular(), tmp_path / "in.onnx")
    np.savez(tmp_path / "rows.npz", **rows())
    out = tmp_path / "out.onnx"
    done = quark("quantize", tmp_path / "in.onnx", "--config", "A8W8", "--calib", tmp_path / "rows.npz", "-o", out)
    assert done.code == 0, done.err
    shown = quark("evaluate", tmp_path / "in.onnx", out, "--data", tmp_path / "rows.npz")
    assert shown.code == 0 and "y" in shown.out
