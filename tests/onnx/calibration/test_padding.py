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

from quark.core.metrics import Metric, sqnr
from quark.onnx import ModelQuantizer, get_default_config
from quark.onnx.calibration.calibrate import collect
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.padding import Padding, mask_inputs, without_padding
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.algo_configs import ALGO_CONFIGS, AutoMixprecisionConfig
from quark.onnx.config.config import Config
from quark.onnx.config.lowering.lower import lower
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.search.evaluator import PartScorer
from quark.onnx.search.lost_outputs.damage import damage
from tests.contracts.test_presets import NOW
from tests.contracts.test_presets import config as preset
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


def quantized(model: bytes, data: Any, name: str = "XINT8", algorithms: Any = ()) -> onnx.ModelProto:
    config = Config(get_default_config(name))
    source = onnx.load_from_string(model)
    done = ModelQuantizer(config).quantize_model(source, None, Reader(data), algorithms=list(algorithms))
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


LEARN: dict[str, dict[str, Any]] = {
    name: {} for name in ALGO_CONFIGS if ALGO_CONFIGS[name] is not AutoMixprecisionConfig
}
LEARN |= {"adaround": {"num_iterations": 20}, "adaquant": {"num_iterations": 20}}
LEARN.pop("bias_correction")  # it needs more texts, and is a part of A8W8


def quiet(data: list[dict[str, torch.Tensor]]) -> Feeds:
    """The samples with an everyday word at masked positions, where the padding is the loudest."""
    return [{**feed, "input_ids": np.where(feed["attention_mask"] == 1, feed["input_ids"], 5)} for feed in feeds(data)]


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
    collect(Prepared(graph, data), seen, lower(Config(get_default_config("XINT8"))))
    return {f"{node.op_type} {i}": seen[node.outputs[0].name or ""].largest for i, node in enumerate(nodes)}


def test_a_model_of_one_length_is_observed_at_real_positions() -> None:
    expected, found = ranges(encoder(), feeds(bare(TEXTS))), ranges(encoder(fixed=True), feeds(batches()))
    assert expected.keys() == found.keys() and len(found) >= 7
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    ones = [{**feed, "attention_mask": np.ones_like(feed["attention_mask"])} for feed in feeds(batches())]
    noisy = ranges(encoder(fixed=True), ones)
    assert any(noisy[name] > 2 * expected[name] for name in found), "the padding would have been seen"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gptq" else pytest.mark.slow) for n in LEARN])
def test_no_algorithm_sees_what_stands_at_masked_positions(name: str) -> None:
    algorithm = ALGO_CONFIGS[name](**LEARN[name])
    found, expected = (
        quantized(encoder(fixed=True), data, "A8W8", [algorithm]) for data in (feeds(batches()), quiet(batches()))
    )
    assert found.graph.SerializeToString(deterministic=True) == expected.graph.SerializeToString(deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOW)
def test_no_configuration_sees_what_stands_at_masked_positions(name: str) -> None:
    model = onnx.load_from_string(encoder(fixed=True))
    found, expected = (
        ModelQuantizer(preset(name)).quantize_model(model, None, Reader(data))
        for data in (feeds(batches("left")), quiet(batches("left")))
    )
    assert found is not None and found == expected


@pytest.mark.slow
def test_biases_are_corrected_by_each_example_of_a_fixed_batch() -> None:
    many = texts(tuple(int(n) for n in np.random.default_rng(0).integers(4, 18, 36)))
    batch = [{name: x for name, x in one.items() if name != "position_ids"} for one in padded(many)]
    expected, found = quantized(encoder(), feeds(bare(many)), "A8W8"), quantized(encoder(True), feeds(batch), "A8W8")
    sample = feeds(batch)[0]
    assert np.array_equal(run(expected, sample), run(found, sample))


def test_a_comparison_at_one_length_measures_real_positions(tmp_path: Path) -> None:
    files = [tmp_path / "float.onnx", tmp_path / "quantized.onnx"]
    files[0].write_bytes(encoder(fixed=True))
    done = quantized(encoder(fixed=True), feeds(batches()))
    onnx.save(done, files[1])
    found, expected = (compare_models(*files, Reader(data)) for data in (feeds(batches()), quiet(batches())))
    assert [x.sqnr for x in found.outputs.values()] == [x.sqnr for x in expected.outputs.values()]
    model, settings = (
        ir.from_proto(onnx.load_from_string(encoder(fixed=True))),
        lower(Config(get_default_config("A8W8"))),
    )
    looked = [damage(model, done, data, settings) for data in (feeds(batches()), quiet(batches()))]
    assert looked[0] == looked[1] and looked[0] is not None
    inputs = model_inputs(model)
    scores = [
        PartScorer(model, Samples(data, inputs), Metric("sqnr"), settings).score(ir.from_proto(done))
        for data in (feeds(batches()), quiet(batches()))
    ]
    assert scores[0] == scores[1]


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
    for shape, kept in (([2, "s"], 1), ([2, 5], 1), (["b", 5], 2), (OPEN, 2)):
        padding = graph_of(("x", shape), ("m", shape), masks=["m"])
        found = padding.without({"x": IDS, "m": MASK})
        assert len(found) == kept
        assert kept == 2 or found[0]["x"] is IDS
        assert shape != ["b", 5] or [feed["x"].shape for feed in found] == [(1, 5)] * 2
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
    noisy = run(model, {**batch, "attention_mask": np.ones_like(batch["attention_mask"])})
    assert sqnr(expected[real], noisy[real]) < 10, "what the mask keeps away"
