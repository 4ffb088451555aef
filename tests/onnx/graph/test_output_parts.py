"""The parts of an output: those tensors that the runtime gives for what a Concat joined, wherever it is moved to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from quark.onnx.graph.model_file import load
from quark.onnx.graph.output_parts import output_parts
from tests.models.onnx_zoo import Builder


def joined(b: Builder) -> tuple[str, str]:
    """Boxes (n, 4, 6) and scores (n, 3, 6)."""
    boxes = b.node("MatMul", [b.constant("left", b.random.uniform(0, 9, (4, 5))), "x"], "boxes")
    scores = b.node(
        "Sigmoid", [b.node("MatMul", [b.constant("right", b.random.normal(size=(3, 5))), "x"], "s")], "scores"
    )
    return boxes, scores


def plain(b: Builder) -> None:
    b.node("Concat", [*joined(b)], "y", axis=1)


def from_the_end(b: Builder) -> None:
    b.node("Concat", [*joined(b)], "y", axis=-2)


def turned(b: Builder) -> None:
    b.node("Transpose", [b.node("Concat", [*joined(b)], "both", axis=1)], "y", perm=[0, 2, 1])


def with_an_axis(b: Builder) -> None:
    both = b.node("Concat", [*joined(b)], "both", axis=1)
    b.node("Unsqueeze", [both, b.integers("axes", [0])], "y")


def regrouped(b: Builder) -> None:
    both = b.node("Concat", [*joined(b)], "both", axis=1)
    b.node("Reshape", [both, b.integers("shape", [-1, 7, 2, 3])], "y")


def scaled(b: Builder) -> None:
    both = b.node("Concat", [*joined(b)], "both", axis=1)
    b.node("Mul", [both, b.constant("factor", np.full((1, 1, 1), 2.0))], "y")


def of_two_maps(b: Builder) -> None:
    """Along another axis the parts of two maps, each of both: these are the parts of all."""
    both = b.node("Concat", [*joined(b)], "both", axis=1)
    b.node("Concat", [both, both], "y", axis=2)


def nested(b: Builder) -> None:
    boxes, scores = joined(b)
    some = b.node("Concat", [boxes, boxes], "some", axis=1)
    b.node("Concat", [some, scores, scores], "y", axis=1)


MODELS: dict[str, tuple[Callable[[Builder], None], list[str]]] = {
    "plain": (plain, ["y[:, :4]", "y[:, 4:]"]),
    "from the end": (from_the_end, ["y[:, :4]", "y[:, 4:]"]),
    "turned": (turned, ["y[:, :, :4]", "y[:, :, 4:]"]),
    "with an axis": (with_an_axis, ["y[:, :, :4]", "y[:, :, 4:]"]),
    "regrouped": (regrouped, ["y[:, :4]", "y[:, 4:]"]),
    "scaled": (scaled, ["y[:, :4]", "y[:, 4:]"]),
    "of two maps": (of_two_maps, ["y[:, :4]", "y[:, 4:]"]),
    "nested": (nested, ["y[:, :4]", "y[:, 4:8]", "y[:, 8:]"]),
}


def built(build: Callable[[Builder], None], rank: int = 3) -> onnx.ModelProto:
    b = Builder()
    build(b)
    return b.model({"x": ["n", 5, 6]}, {"y": [None] * rank})


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_those_that_a_concat_joined(name: str) -> None:
    build, expected = MODELS[name]
    parts = output_parts(load(built(build, 4 if name in ("with an axis", "regrouped") else 3)))["y"]
    assert [str(part) for part in parts] == expected
    assert [part.bounded for part in parts] == [text == expected[-1] and name != "scaled" for text in expected]


def test_what_is_not_known_is_one_part() -> None:
    """A Reshape that mixes the axes, something that computes, and two tensors of unknown sizes."""

    def mixed(b: Builder) -> None:
        both = b.node("Concat", [*joined(b)], "both", axis=1)
        b.node("Reshape", [both, b.integers("shape", [-1, 3, 14])], "y")

    def computed(b: Builder) -> None:
        b.node("Softmax", [b.node("Concat", [*joined(b)], "both", axis=1)], "y", axis=1)

    def unknown(b: Builder) -> None:
        b.node("Concat", ["x", "x"], "y", axis=0)

    for build in (mixed, computed, unknown):
        assert [str(part) for part in output_parts(load(built(build)))["y"]] == ["y"]


def test_the_values_of_a_part_are_those_of_its_tensor() -> None:
    array = np.arange(2 * 7 * 6).reshape(2, 7, 6)
    first, second = output_parts(load(built(plain)))["y"]
    np.testing.assert_array_equal(first.of(array), array[:, :4])
    np.testing.assert_array_equal(second.of(array), array[:, 4:])
