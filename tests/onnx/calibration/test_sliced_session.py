"""A model that runs in slices gives what it gives as a whole, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.errors import CalibrationError
from quark.onnx.calibration import sliced_session
from quark.onnx.calibration.calibrate import _all_tensors
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.sliced_session import SlicedSession, tensor_bytes
from quark.onnx.graph.model_file import infer_shapes, load, split_weights, to_proto
from quark.onnx.graph.sessions import session_over
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import cnn, images, mlp, vectors


def sliced(proto: onnx.ModelProto, feed: Feed) -> tuple[SlicedSession, list[str]]:
    """Sessions on slices that are as small as can be, and the names of the observed tensors."""
    model = load(proto)
    infer_shapes(model)
    wanted = [name for name in _all_tensors(model) if name not in model_inputs(model)]

    def open_session(part: onnx.ModelProto, weights: dict[str, Any], arena: bool) -> onnxruntime.InferenceSession:
        return session_over(part, weights, onnxruntime.SessionOptions())

    return SlicedSession(model, wanted, feed, open_session), wanted


def assert_like_the_whole(proto: onnx.ModelProto, session: SlicedSession, wanted: list[str], feed: Feed) -> None:
    """Every observed tensor comes once, with the bits of one run of the whole."""
    whole = to_proto(load(proto))
    have = {output.name for output in whole.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in have)
    expected = onnxruntime.InferenceSession(whole.SerializeToString()).run(wanted, feed) if wanted else []
    parts = list(session.run(feed)) if wanted else []
    assert sorted(name for part in parts for name in part) == sorted(wanted)
    found = {name: array for part in parts for name, array in part.items()}
    for name, array in zip(wanted, expected, strict=True):
        assert np.array_equal(found[name], array, equal_nan=True), name


@pytest.mark.slow
@pytest.mark.parametrize(("make", "data"), [(cnn, images), (mlp, vectors)], ids=["cnn", "mlp"])
def test_slices_give_the_bits_of_the_whole(
    make: Callable[[], onnx.ModelProto], data: Callable[[], list[Feed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_session, "SLICE_BYTES", 1)
    monkeypatch.setattr(sliced_session, "MOST_SLICES", 1 << 20)
    proto, feeds = make(), data()
    session, wanted = sliced(proto, feeds[0])
    assert len(session.slices) > 2
    for feed in feeds[:2]:
        assert_like_the_whole(proto, session, wanted, feed)


@pytest.mark.slow
@pytest.mark.parametrize("make", odd.RIGHT, ids=lambda make: make.__name__)
def test_slices_of_odd_models_give_the_bits_of_the_whole(
    make: Callable[[], onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_session, "SLICE_BYTES", 1)
    monkeypatch.setattr(sliced_session, "MOST_SLICES", 1 << 20)
    proto = make()
    feed = odd.sample(proto)
    session, wanted = sliced(proto, feed)
    assert_like_the_whole(proto, session, wanted, feed)


@pytest.mark.parametrize(("kept", "expected"), [(None, True), (1, False)])
def test_slices_keep_the_memory_of_a_run_where_that_is_little(
    kept: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_session, "SLICE_BYTES", 1)
    monkeypatch.setattr(sliced_session, "MOST_SLICES", 1 << 20)
    if kept is not None:
        monkeypatch.setattr(sliced_session, "_KEPT_BYTES", kept)
    model, arenas = load(cnn()), list[bool]()
    infer_shapes(model)

    def open_session(part: onnx.ModelProto, weights: dict[str, Any], arena: bool) -> onnxruntime.InferenceSession:
        arenas.append(arena)
        return session_over(part, weights, onnxruntime.SessionOptions())

    wanted = [name for name in _all_tensors(model) if name not in model_inputs(model)]
    SlicedSession(model, wanted, images()[0], open_session)
    assert len(arenas) > 2 and set(arenas) == {expected}


def test_a_small_model_is_one_slice() -> None:
    session, wanted = sliced(cnn(), images()[0])
    assert [part.gives for part in session.slices] == [wanted]


def test_sizes_are_those_of_the_arrays() -> None:
    model = load(cnn())
    infer_shapes(model)
    feed = images()[0]
    proto, weights = split_weights(model)
    names = [name for name in _all_tensors(model) if name not in feed]
    sizes = tensor_bytes(proto, names, feed)
    have = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    arrays = session_over(proto, weights, onnxruntime.SessionOptions()).run(names, feed)
    assert sizes == {name: array.nbytes for name, array in zip(names, arrays, strict=True)}


@pytest.mark.slow
def test_a_sample_that_fails_in_a_later_slice_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_session, "SLICE_BYTES", 1)
    feed = images()[0]
    session, _ = sliced(cnn(), feed)
    (name,) = feed
    with pytest.raises(CalibrationError, match=rf"The model fails on a sample \({name}: float32 \[1, 3, 2, 2\]\)"):
        list(session.run({name: np.ones((1, 3, 2, 2), np.float32)}))
