"""Calibration data of bodies: what each run reads, beside what the runtime shows of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.core.spec import LayerSpec
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.flow.body_model import bodies_of
from quark.onnx.flow.float_bodies import BodyFeeds
from quark.onnx.graph.model_file import load
from tests.models.onnx_bodies import rows, sums
from tests.models.onnx_zoo import Array, branches

SETTINGS = Settings(SpecSettings(LayerSpec()))


def outputs(model: onnx.ModelProto, feed: dict[str, Array], *names: str) -> list[Any]:
    model = onnx.ModelProto.FromString(model.SerializeToString())
    present = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(list(names), feed))


def test_a_branch_gets_what_it_captures_from_the_samples_that_run_it() -> None:
    model = branches()
    data = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2, 3)]
    loaded = load(model)
    found = {body.attribute: list(BodyFeeds(loaded, body, data, SETTINGS)) for body in bodies_of(loaded.graph)}
    expected = [outputs(model, feed, "hidden")[0] for feed in data]
    assert [list(feed) for feed in found["then_branch"]] == [["hidden"], ["hidden"]]
    assert np.array_equal([feed["hidden"] for feed in found["then_branch"]], [expected[0], expected[2]])
    assert np.array_equal([feed["hidden"] for feed in found["else_branch"]], [expected[1]])


@pytest.mark.parametrize("op_type", ["Loop", "Scan"])
def test_a_loop_is_fed_the_state_of_every_step(op_type: str) -> None:
    """The model gives the state that each step read; a Scan reads its rows from the last one on."""
    model, data = sums(op_type), rows(2, 5)
    loaded = load(model)
    (body,) = bodies_of(loaded.graph)
    feeds = BodyFeeds(loaded, body, data, SETTINGS)
    found = list(feeds)
    states = np.concatenate([outputs(model, feed, "all")[0] for feed in data])
    # The steps run one by one here, so that sums may be taken in another order: 4 products of float32.
    np.testing.assert_allclose([feed["s"] for feed in found], states, rtol=0, atol=float(4 * np.finfo(np.float32).eps))
    if op_type == "Loop":
        assert [int(feed["i"]) for feed in found] == [0, 1, 2, 3, 4] * 2
    else:
        assert np.array_equal([feed["e"] for feed in found], np.concatenate([feed["x"][::-1] for feed in data]))
    assert len(list(feeds)) == len(found)


def test_a_loop_ends_where_its_condition_does() -> None:
    model = sums("Loop")
    (node,) = (node for node in model.graph.node if node.op_type == "Loop")
    steps = node.attribute[0].g
    del steps.node[0]
    three = onnx.numpy_helper.from_array(np.array(2, np.int64), "two")
    model.graph.initializer.append(three)
    steps.node.insert(0, onnx.helper.make_node("Less", ["i", "two"], ["go_on"], name="less"))
    loaded = load(model)
    (body,) = bodies_of(loaded.graph)
    assert [int(feed["i"]) for feed in BodyFeeds(loaded, body, rows(1), SETTINGS)] == [0, 1, 2]
