"""Masked positions count nowhere: samples with padding give the file that the same texts give without."""

from __future__ import annotations

import io
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer, get_default_config
from quark.onnx.calibration.calibrate import collect
from quark.onnx.calibration.data.padding import Padding, mask_inputs, without_padding
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.config.config import Config
from quark.onnx.config.lowering.lower import lower
from quark.onnx.evaluation.compare_models import compare_models
from tests.models.onnx_zoo import Reader, run
from tests.models.padded import Encoder, bare, padded, texts

TEXTS = texts()
Feeds = list[dict[str, np.ndarray]]


@cache
def encoder(fixed: bool = False, names: tuple[str, str] = ("input_ids", "attention_mask")) -> bytes:
    """The file of an encoder, whose inputs have any length, or that of the padded batches alone."""
    file, example = io.BytesIO(), tuple(batches()[0].values())
    axes = None if fixed else {name: {0: "batch", 1: "length"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter that is older
        torch.onnx.export(
            Encoder().eval(),
            example,
            file,
            input_names=list(names),
            dynamic_axes=axes,
            dynamo=False,  # type: ignore[arg-type]
        )
    return file.getvalue()


def batches(form: str = "right") -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": b["input_ids"], "attention_mask": b["attention_mask"]} for b in padded(TEXTS, form)]


def feeds(data: list[dict[str, torch.Tensor]], names: tuple[str, str] = ("input_ids", "attention_mask")) -> Feeds:
    return [dict(zip(names, (x.numpy() for x in batch.values()), strict=True)) for batch in data]


def quantized(model: bytes, data: Any, name: str = "XINT8") -> onnx.ModelProto:
    config = Config(get_default_config(name))
    done = ModelQuantizer(config).quantize_model(onnx.load_from_string(model), None, Reader(data))
    assert isinstance(done, onnx.ModelProto)
    return done


CASES = [("XINT8", "left"), *(pytest.param("A8W8", form, marks=pytest.mark.slow) for form in ("right", "left"))]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_file_is_that_of_the_bare_texts(name: str, form: str) -> None:
    expected = quantized(encoder(), feeds(bare(TEXTS)), name)
    found = quantized(encoder(), feeds(batches(form)), name)
    assert found.graph.SerializeToString(deterministic=True) == expected.graph.SerializeToString(deterministic=True)


def test_the_name_of_a_mask_does_not_matter() -> None:
    names = ("a", "b")
    found = quantized(encoder(names=names), feeds(batches(), names))
    expected = quantized(encoder(names=names), feeds(bare(TEXTS), names))
    assert found.graph.SerializeToString(deterministic=True) == expected.graph.SerializeToString(deterministic=True)


class Extremes:
    """The largest magnitude of all that is seen."""

    largest = 0.0

    def update(self, x: Any) -> None:
        self.largest = max(self.largest, float(abs(x).max()))


def ranges(model: bytes, data: Any) -> dict[str, float]:
    """What the operators give that a model of one length has too, in their order."""
    graph = ir.from_proto(onnx.load_from_string(model))
    nodes = [node for node in graph.graph if node.op_type in ("MatMul", "Gemm", "Relu", "Softmax")]
    seen = {node.outputs[0].name or "": Extremes() for node in nodes}
    collect(graph, seen, data, lower(Config(get_default_config("XINT8"))))
    return {f"{node.op_type} {i}": seen[node.outputs[0].name or ""].largest for i, node in enumerate(nodes)}


def test_a_model_of_one_length_is_observed_at_real_positions() -> None:
    expected, found = ranges(encoder(), feeds(bare(TEXTS))), ranges(encoder(fixed=True), feeds(batches()))
    assert expected.keys() == found.keys() and len(found) >= 7
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    ones = [{**feed, "attention_mask": np.ones_like(feed["attention_mask"])} for feed in feeds(batches())]
    loud = ranges(encoder(fixed=True), ones)
    assert any(loud[name] > 2 * expected[name] for name in found), "the padding would have been seen"


def test_a_comparison_measures_real_positions(tmp_path: Path) -> None:
    files = [tmp_path / "float.onnx", tmp_path / "quantized.onnx"]
    files[0].write_bytes(encoder())
    onnx.save(quantized(encoder(), feeds(bare(TEXTS))), files[1])
    found, expected = (compare_models(*files, Reader(data)) for data in (feeds(batches()), feeds(bare(TEXTS))))
    assert [x.sqnr for x in found.outputs.values()] == [x.sqnr for x in expected.outputs.values()]


def graph_of(*inputs: tuple[str, list[Any]], masks: list[str]) -> Padding:
    """A model with these inputs of integers, of which some mask."""
    nodes = []
    for name in masks:
        nodes += [
            helper.make_node("Cast", [name], [f"{name}_f"], to=1),
            helper.make_node("Softmax", [f"{name}_f"], [f"{name}_p"]),
        ]
    values = [helper.make_tensor_value_info(name, 7, shape) for name, shape in inputs]
    outputs = [helper.make_tensor_value_info(f"{name}_p", 1, None) for name in masks]
    return Padding.of(helper.make_model(helper.make_graph(nodes, "g", values, outputs)))


IDS = np.arange(10).reshape(2, 5)
MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
OPEN = ["b", "s"]


def test_what_is_looked_up_in_a_table_is_no_mask() -> None:
    model = ir.from_proto(onnx.load_from_string(encoder()))
    assert mask_inputs(model) == ["attention_mask"]
    assert without_padding([1], ir.from_proto(helper.make_model(helper.make_graph([], "g", [], [])))) == [1]


def test_rows_of_unequal_length_become_samples() -> None:
    padding = graph_of(("x", OPEN), ("m", OPEN), ("kind", ["b"]), masks=["m"])
    feed = {"x": IDS, "m": MASK, "kind": np.array([7, 8])}
    first, second = padding.without(feed)
    assert {name: x.tolist() for name, x in first.items()} == {"x": [[0, 1, 2]], "m": [[1, 1, 1]], "kind": [7]}
    assert second["x"].tolist() == [[6, 7, 8, 9]] and second["kind"].tolist() == [8]
    (same,) = padding.without({**feed, "m": np.ones_like(MASK)})
    assert same["x"] is IDS
    (same,) = padding.without({**feed, "m": IDS})
    assert same["x"] is IDS, "a mask is of 1 and 0"
    assert padding.without({**feed, "m": np.zeros_like(MASK)}) == []
    (together,) = padding.without({**feed, "m": MASK[:1].repeat(2, 0)})
    assert together["x"].shape == (2, 3) and together["kind"].shape == (2,)


def test_encoder_and_decoder_of_one_length_have_masks_of_their_own() -> None:
    other = ["b", "t"]
    padding = graph_of(("x", OPEN), ("m", OPEN), ("y", other), ("n", other), masks=["m", "n"])
    (first, second) = padding.without({"x": IDS, "m": MASK, "y": IDS, "n": MASK[::-1]})
    assert (first["x"].shape, first["y"].shape) == ((1, 3), (1, 4))
    assert (second["x"].shape, second["y"].shape) == ((1, 4), (1, 3))


def test_a_length_or_batch_of_the_model_stays() -> None:
    for shape, kept in ((["b", 5], 1), ([2, "s"], 1), ([2, 5], 1), (OPEN, 2)):
        padding = graph_of(("x", shape), ("m", shape), masks=["m"])
        found = padding.without({"x": IDS, "m": MASK})
        assert len(found) == kept
        assert kept == 2 or found[0]["x"] is IDS
    assert [x.tolist() for x in padding.real({"x": IDS, "m": MASK}).values()] == [(MASK == 1).tolist()]


def test_what_cannot_be_cut_stays_whole() -> None:
    padding = graph_of(("x", OPEN), ("m", OPEN), ("z", ["k"]), masks=["m"])
    for mask, rows in ((np.array([[1, 0, 1, 1, 1], [1] * 5]), 2), (MASK, 3)):
        feed = {"x": IDS, "m": mask, "z": np.arange(rows)}
        (same,) = padding.without(feed)
        assert same is feed
        assert padding.real(feed)["m"].tolist() == (mask == 1).tolist(), "its rows are left out where it is observed"


def test_random_masks_are_no_error() -> None:
    model = ir.from_proto(onnx.load_from_string(encoder()))
    reader = RandomDataReader(model, {"input_ids": [2, 9], "attention_mask": [2, 9]})
    assert quantized(encoder(), [reader.get_next()]).graph.node


@pytest.mark.parametrize("name", ["A8W8", pytest.param("A16W8", marks=pytest.mark.slow)])
def test_a_model_that_saw_no_masked_position_masks_all_the_same(name: str) -> None:
    model, batch = quantized(encoder(), feeds(bare(TEXTS)), name), feeds(batches())[0]
    expected, found = (run(file, batch) for file in (onnx.load_from_string(encoder()), model))
    real = batch["attention_mask"] == 1
    assert sqnr(expected[real], found[real]) > 25
    loud = run(model, {**batch, "attention_mask": np.ones_like(batch["attention_mask"])})
    assert sqnr(expected[real], loud[real]) < 10, "what the mask keeps away"
