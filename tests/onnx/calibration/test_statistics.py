"""Calibration statistics: one pass serves every method, through a file too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.core.granularity import PerChannel
from quark.core.observers import OBSERVERS
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, FormatError, NonFiniteError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.calibration.statistics import Statistics, _digest, fingerprint
from quark.onnx.config.settings import CalibrationSettings, QDQSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, vectors

U8 = spec("uint8", symmetric=False)
BASE = Settings(SpecSettings(LayerSpec(weight=spec("int8", PerChannel(0)), input=U8)), qdq=QDQSettings(fold_relu=True))
METHODS = ["min_max", "moving_average", "percentile", "layerwise_percentile", "distribution", "mse", "entropy"]
METHODS += ["pof2_min_max", "pof2_non_overflow", "pof2_min_mse"]


def scales(model: onnx.ModelProto) -> dict[str, Any]:
    return {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer if i.name.endswith("_scale")}


def assert_same(one: onnx.ModelProto, other: onnx.ModelProto) -> None:
    ours, theirs = scales(one), scales(other)
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_a_file_written_by_one_method_serves_every_other_without_data(method: str, tmp_path: Path) -> None:
    file = str(tmp_path / "statistics.npz")
    quantize(load(cnn()), replace(BASE, calibration=CalibrationSettings(statistics=file)), Reader(images()))
    layer = replace(BASE.specs.layer, input=replace(U8, observer=method))
    settings = replace(BASE, specs=replace(BASE.specs, layer=layer))
    reused = to_proto(quantize(load(cnn()), replace(settings, calibration=CalibrationSettings(statistics=file)), None))
    assert_same(reused, to_proto(quantize(load(cnn()), settings, Reader(images()))))


def test_methods_are_all_registered() -> None:
    assert set(METHODS) <= set(OBSERVERS)


@pytest.mark.slow
def test_a_file_has_what_any_scheme_of_the_model_needs(tmp_path: Path) -> None:
    file = str(tmp_path / "statistics.npz")
    quantize(
        load(cnn()),
        replace(
            BASE,
            specs=replace(BASE.specs, nodes=("stem_conv_node", "stem_node")),
            calibration=CalibrationSettings(statistics=file),
        ),
        Reader(images()),
    )
    for settings in (
        BASE,
        replace(BASE, qdq=replace(BASE.qdq, target="ort_x64")),
        replace(BASE, qdq=replace(BASE.qdq, fold_relu=False, align=("Concat", "Pool"))),
    ):
        reused = to_proto(
            quantize(load(cnn()), replace(settings, calibration=CalibrationSettings(statistics=file)), None)
        )
        assert_same(reused, to_proto(quantize(load(cnn()), settings, Reader(images()))))


@pytest.mark.slow
def test_tensors_that_a_file_lacks_are_added_to_it(tmp_path: Path) -> None:
    file = str(tmp_path / "statistics.npz")
    settings = replace(BASE, calibration=CalibrationSettings(statistics=file))
    first = to_proto(quantize(load(cnn()), settings, Reader(images())))
    partial = Statistics.load(file, fingerprint(load(cnn())))
    del partial.states["both"]
    partial.save(file)
    with pytest.raises(CalibrationError, match=r"lacks 1 tensors.*\(both, .*once more"):
        quantize(load(cnn()), settings, None)
    assert_same(first, to_proto(quantize(load(cnn()), settings, Reader(images()))))
    assert_same(first, to_proto(quantize(load(cnn()), settings, None)))


@pytest.mark.slow
def test_another_model_or_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "statistics.npz"
    settings = replace(BASE, calibration=replace(BASE.calibration, statistics=str(file)))
    quantize(load(cnn()), settings, Reader(images()))
    with pytest.raises(CalibrationError, match="another float model"):
        quantize(load(mlp()), settings, Reader(vectors()))
    changed = cnn()
    weight = next(i for i in changed.graph.initializer if i.name == "stem_w")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, "stem_w"))
    with pytest.raises(CalibrationError, match="another float model"):
        quantize(load(changed), settings, Reader(images()))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FormatError, match="not a statistics file"):
        quantize(load(cnn()), settings, Reader(images()))


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("low", None, "no array 'low'"),
        ("low", lambda a: a[:-1], "low has .* values for"),
        ("low", lambda a: a + 1e9, "low: one is above its high"),
        ("low", lambda a: a.astype("U9"), "low is <U9"),
        ("ends", lambda a: a[::-1], "ends: they go down"),
        ("bins", lambda a: a.astype(np.uint32) + (1 << 16), "bins: not all lie"),
        ("counts", lambda a: a[:-3], "bins and counts"),
        ("counts", lambda a: a - 10**9, "counts: one is no number"),
        ("count", lambda a: a * 0, "count: one is no number"),
        ("names", lambda a: np.repeat(a[:1], len(a)), "names: one stands twice"),
    ],
)
def test_arrays_that_nobody_wrote_are_refused_whatever_their_digest(
    key: str, change: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "statistics.npz"
    settings = replace(BASE, calibration=replace(BASE.calibration, statistics=str(file)))
    quantize(load(cnn()), settings, Reader(images(1)))
    with np.load(file) as opened:
        arrays = {name: opened[name] for name in opened.files if name != "digest"}
    arrays |= {} if change is None else {key: change(arrays[key])}
    if change is None:
        del arrays[key]
    np.savez(file, digest=np.array(_digest(arrays)), **arrays)
    with pytest.raises(FormatError, match=message):
        quantize(load(cnn()), settings, None)


def test_the_option_reaches_the_flow(tmp_path: Path) -> None:
    file = tmp_path / "statistics.npz"
    config = QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=UInt8Spec()), Statistics=str(file))
    first = ModelQuantizer(config).quantize_model(cnn(), None, Reader(images()))
    assert file.exists()
    second = ModelQuantizer(config).quantize_model(cnn())
    assert first is not None and second is not None
    assert_same(first, second)


def test_nan_anywhere_in_a_tensor_is_found_and_named() -> None:
    """(ReduceMin of ONNX Runtime loses a NaN that is not the first value.)"""
    b = Builder()
    b.node("MatMul", [b.node("Log", ["x"], "log"), b.constant("w", np.ones((8, 4)))], "y")
    model = b.model({"x": ["n", 8]}, {"y": ["n", 4]})
    x = np.ones((2, 8), np.float32)
    x[1, 5] = -1
    for observer in ("min_max", "percentile"):
        settings = Settings(SpecSettings(LayerSpec(weight=spec("int8"), input=replace(U8, observer=observer))))
        with pytest.raises(NonFiniteError, match="log"):
            quantize(load(model), settings, Reader([{"x": x}]))


@pytest.mark.slow
def test_layerwise_percentile_takes_a_candidate_for_each_tensor() -> None:
    """Every scale is that of plain Percentile with one of the candidates; the metric decides which."""
    data = images(8)
    for feed in data:
        feed["x"].reshape(-1)[::5000] *= 12

    def encoded(method: CalibMethod, **options: Any) -> np.ndarray:
        layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=method), weight=Int8Spec())
        done = ModelQuantizer(QConfig(layer, **options)).quantize_model(cnn(), None, Reader(data))
        assert done is not None
        scales = {i.name: onnx.numpy_helper.to_array(i) for i in done.graph.initializer}
        return np.array([scales[node.input[1]] for node in done.graph.node if node.op_type == "QuantizeLinear"])

    candidates = [99.0, 99.9, 100.0]
    plain = np.stack([encoded(CalibMethod.Percentile, Percentile=candidate) for candidate in candidates])
    chosen = {}
    for metric in ("mae", "mse"):
        found = encoded(CalibMethod.LayerwisePercentile, PercentileCandidates=candidates, LWPMetric=metric)
        assert np.isclose(plain, found, rtol=1e-6).any(0).all()
        chosen[metric] = [int(np.argmin(abs(plain[:, i] - found[i]))) for i in range(len(found))]
    assert chosen["mae"] != chosen["mse"] and len(set(chosen["mae"])) > 1
