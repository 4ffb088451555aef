"""A file that is slower than the float model, as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import SlowerThanFloatError
from quark.onnx import ModelQuantizer
from quark.onnx.graph.model_file import load
from quark.onnx.search.latency import whole_file as module
from quark.onnx.search.latency.whole_file import FEWEST, FileRatio, file_ratio, refuse_slower

FEED = {"x": np.ones((8, 8), np.float32)}


def products(count: int) -> onnx.ModelProto:
    """MatMuls in a row."""
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", [f"x{i}" if i else "x", "w"], [f"x{i + 1}"]) for i in range(count)]
    nodes.append(helper.make_node("Identity", [f"x{count}"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "products", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def turns(*ratios: float) -> Callable[[], float]:
    """A clock by which the second of two files takes these times as long as the first, look by look."""

    def ticks() -> Iterator[float]:
        now = 0.0
        for ratio in ratios:
            for pair in range(FEWEST):
                for which in ((0, 1), (1, 0))[pair % 2]:
                    yield now
                    now += ratio if which else 1.0
                    yield now

    found = ticks()
    return lambda: next(found)


@pytest.mark.parametrize(
    ("ratios", "expected", "slower"),
    [((0.9,), 0.9, False), ((1.01,), 1.01, False), ((1.5, 1.4), 1.4, True), ((1.5, 0.99), 0.99, False)],
)
def test_a_file_is_slower_where_two_looks_say_so(ratios: tuple[float, ...], expected: float, slower: bool) -> None:
    found = file_ratio(load(products(1)), products(1), FEED, clock=turns(*ratios))
    assert found.ratio == pytest.approx(expected)
    assert found.slower is slower


@pytest.mark.parametrize(
    ("ratio", "sizes", "refused"), [(1.0, (9, 9), True), (1.0, (9, 8), False), (0.9, (9, 9), False)]
)
def test_a_file_that_is_better_in_nothing_is_refused(
    ratio: float, sizes: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "file_ratio", lambda *_, **__: FileRatio(ratio, 1.0, 0.5))
    settings = ModelQuantizer("INT8_CPU_DYNAMIC").settings
    with pytest.raises(SlowerThanFloatError, match="neither faster .* nor smaller") if refused else nullcontext():
        refuse_slower(load(products(1)), products(1), [FEED], settings, sizes)


def test_what_few_runs_say_makes_no_file_slower() -> None:
    assert not FileRatio(1.3, 1.0, 0.6).slower
    assert FileRatio(1.3, 1.0, 0.9).slower


@pytest.mark.slow
def test_a_hundred_products_for_one_are_refused_and_one_for_a_hundred_is_not() -> None:
    settings = ModelQuantizer("INT8_CPU_DYNAMIC").settings
    with pytest.raises(SlowerThanFloatError, match=r"takes \d+\.\d+ times as long .* the first sample"):
        refuse_slower(load(products(1)), products(100), [FEED], settings)
    refuse_slower(load(products(100)), products(1), [FEED], settings)
