"""Slices of a model give what the model gives; weights that change between them count; what waits can wait on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError
from quark.onnx.algorithms.layer_sweep import sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayers
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples, Store, required
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.decide import decide
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.graph.sessions import open_session
from tests.models.onnx_zoo import branches, cnn, images, mlp, run, vectors

S8 = Settings(SpecSettings(LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("int8"))))
SETTINGS = {
    "int8": S8,
    "folded": replace(
        S8,
        specs=replace(S8.specs, layer=LayerSpec(weight=spec("int8"), input=spec("uint8"))),
        qdq=replace(S8.qdq, fold_relu=True),
    ),
    "bfloat16 casts": Settings(
        SpecSettings(LayerSpec(weight=spec("bfloat16"), input=spec("bfloat16"))), qdq=QDQSettings(cast_bfloat16=True)
    ),
    "one pair for each reader": replace(S8, qdq=replace(S8.qdq, dedicated_pairs=True)),
}


def started(proto: Any, feeds: list[Any], settings: Settings = S8) -> QuantizedLayers:
    """The quantized layers as `quantize` makes them."""
    model = load(proto)
    infer_shapes(model)
    data = Samples(feeds, model_inputs(model))
    reference = model.clone()
    counterparts = dict(zip(model.graph, reference.graph, strict=True))
    quantized = QuantizedLayers(decide(Prepared(model, data), settings), reference, data)
    quantized.write(counterparts)
    return quantized


def tapped(proto: Any, names: list[str], feed: Any) -> list[Any]:
    """The tensors of a model by name, from one run of the whole in the kernels of a slice: others may break ties."""
    import onnx

    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return list(open_session(proto, in_float=True).run(None, feed))


@pytest.mark.slow
@pytest.mark.parametrize("memory", (1 << 30, 0))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_sweep_shows_what_runs_of_the_whole_models_show(name: str, memory: int) -> None:
    feeds = images(3)
    quantized = started(cnn(), feeds, SETTINGS[name])
    assert quantized.data is not None
    expected: dict[str, list[Any]] = {}
    for layer in quantized.layers:
        inner = tapped(to_proto(quantized.reference), [layer.data.name, layer.counterpart.outputs[0].name], feeds[1])
        read, given = quantized.input_of(layer).name, quantized.output_of(layer).name
        expected[layer.name] = [*inner, *tapped(to_proto(quantized.decision.model), [read, given], feeds[1])]
    seen = []
    for visit in sweep(quantized, quantized.layers, quantized.data, memory=memory, float_inputs=True):
        float_input, output, quantized_input, quantized_output = expected[visit.layer.name]
        np.testing.assert_allclose(visit.float_inputs[1], float_input, atol=1e-5)
        np.testing.assert_allclose(visit.outputs[1], output, atol=1e-4)
        np.testing.assert_allclose(visit.inputs[1], quantized_input, atol=1e-5)
        np.testing.assert_allclose(list(visit.quantized_outputs())[1], quantized_output, atol=1e-4)
        assert len(visit.inputs) == 3
        seen.append(visit.layer.name)
    assert seen == [layer.name for layer in quantized.layers] and len(seen) > 1


@pytest.mark.slow
def test_a_changed_layer_is_what_later_ones_read_and_what_is_written() -> None:
    feeds = images(2)
    quantized = started(cnn(), feeds)
    assert quantized.data is not None
    plain = [np.array(visit.inputs[0]) for visit in sweep(quantized, quantized.layers, quantized.data)]
    for visit in sweep(quantized, quantized.layers, quantized.data):
        if visit.layer is quantized.layers[0]:
            visit.layer.weight = np.zeros_like(visit.layer.weight)
        elif visit.layer is quantized.layers[1]:
            assert not np.array_equal(visit.inputs[0], plain[1])
    first = quantized.layers[0]
    assert not first.rounded.any()
    codes = next(
        v for n, v in quantized.decision.model.graph.initializers.items() if n == f"{first.source.name}_quantized"
    )
    assert codes.const_value is not None and not codes.const_value.numpy().any()


def test_the_float_model_stays_what_it_was() -> None:
    feeds = vectors(2)
    quantized = started(mlp(), feeds)
    before = run(to_proto(quantized.reference), feeds[0])
    for layer in quantized.layers:
        layer.weight = layer.weight * 2
    assert np.array_equal(run(to_proto(quantized.reference), feeds[0]), before)


def test_branches_and_readers_inside_bodies_are_kept_apart() -> None:
    proto = branches()
    from tests.models.onnx_zoo import feed

    quantized = started(proto, [feed(proto)])
    assert quantized.data is not None
    assert [visit.layer.name for visit in sweep(quantized, quantized.layers, quantized.data)] == [
        layer.name for layer in quantized.layers
    ]


def test_samples_are_read_once_and_given_as_often_as_asked() -> None:
    reads = []

    def reader() -> Any:
        for feed in vectors(3):
            reads.append(1)
            yield feed

    inputs = model_inputs(load(mlp()))
    data = Samples(reader(), inputs, memory=100)
    assert next(iter(data)) is not None and len(reads) == 1
    first, second = list(data), list(data)
    assert len(reads) == len(data) == 3
    for one, other, feed in zip(first, second, vectors(3), strict=True):
        for name in feed:
            assert np.array_equal(one[name], feed[name]) and np.array_equal(other[name], feed[name])


def test_a_store_holds_in_memory_what_fits() -> None:
    store = Store(memory=80)
    store["a"], store["b"] = np.arange(10.0), np.arange(10.0) + 1
    assert not isinstance(store["a"], np.memmap) and isinstance(store["b"], np.memmap)
    assert np.array_equal(store["b"], np.arange(10.0) + 1)
    store.pop("a")
    store["c"] = np.arange(10.0)
    assert not isinstance(store["c"], np.memmap) and "a" not in store


def test_an_algorithm_without_data_says_so() -> None:
    with pytest.raises(CalibrationError, match="needs calibration data, and there is none"):
        required(None, S8)
    with pytest.raises(CalibrationError, match="no sample"):
        required(Samples([], {}), S8)


def test_arrays_on_disk_lie_where_the_next_run_finds_them(tmp_path: Path) -> None:
    """Those of a run that was killed would else fill the folder for ever."""
    (tmp_path / ".quark-01234567.tmp").mkdir()
    store = Store(0, str(tmp_path))
    store["a"] = np.ones(3)
    (folder,) = tmp_path.iterdir()
    assert folder.name != ".quark-01234567.tmp" and store["a"].sum() == 3
    del store
    assert not list(tmp_path.iterdir())
