"""The parts of a graph that run alike: what repeats is said once, and an island of floats among integers is seen."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.onnx import graph_parts
from quark.onnx.evaluation.graph_parts import GraphParts, _folded
from quark.onnx.evaluation.ort_fusion import kernel_graph
from quark.report.figures import DrawnNode
from tests.models.onnx_zoo import Builder
from tests.onnx.evaluation.test_fusion import IMAGE, Graph

BLOCK = "MatMul MatMul Add | softmax | MatMul Gelu"
"""Parts of other kinds begin at bars; float ones are in small letters."""


def nodes(*words: str) -> list[DrawnNode]:
    """Nodes of op types, integer where they begin with a capital."""
    names = [word for text in words for word in text.replace("|", "").split()]
    return [DrawnNode(name, f"n{i}", 0 if name[0].isupper() else 2, ()) for i, name in enumerate(names)]


def parts(*words: str) -> list[tuple[int, list[str]]]:
    found = GraphParts.of(nodes(*words))
    return [(stretch.repeats, [str(region) for region in stretch.regions]) for stretch in found.stretches]


def test_eight_equal_blocks_are_said_once() -> None:
    words = ("gather norm", *[BLOCK] * 8, "norm", "MatMul")
    assert parts(*words) == [
        (1, ["gather, norm"]),
        (8, ["MatMul x 2, Add", "softmax", "MatMul, Gelu"]),
        (1, ["norm", "MatMul"]),
    ]
    found = GraphParts.of(nodes(*words))
    lines = [line.strip("│ ").split("│") for line in str(found).splitlines() if "│" in line]
    assert [line[0].strip() for line in lines] == ["float", "/ x 8", "|", "\\", "float", "integer"]


@pytest.mark.slow
def test_a_notebook_has_a_picture_with_a_bracket_at_what_repeats() -> None:
    shown = GraphParts.of(nodes("gather norm", *[BLOCK] * 8))._repr_html_()
    assert shown.startswith("<svg") and ">x 8<" in shown


def test_one_block_that_runs_otherwise_stands_apart() -> None:
    odd = BLOCK.replace("Gelu", "gelu")
    assert [(count, len(regions)) for count, regions in parts(*[BLOCK] * 3, odd, *[BLOCK] * 4)] == [
        (3, 3),
        (1, 4),
        (4, 3),
    ]


def test_a_few_nodes_that_run_alike_are_counted_and_blocks_of_them_folded() -> None:
    assert parts("Conv Relu " * 12) == [(1, ["Conv x 12, Relu x 12"])]
    assert parts("Conv Relu softmax " * 12) == [(12, ["Conv, Relu", "softmax"])]
    assert parts("Pool", "Conv Relu Conv Add " * 8) == [(1, ["Pool"]), (8, ["Conv x 2, Relu, Add"])]
    assert parts("A A A B B C D E F G") == [(1, ["A x 3, B x 2, C, D, E, 2 more"])]


def test_a_repetition_begins_where_another_kind_does() -> None:
    """The last node of each block is before the first, too: a block could begin there."""
    assert parts("gather norm", *["MatMul Gelu add norm"] * 3) == [
        (1, ["gather, norm"]),
        (3, ["MatMul, Gelu", "add, norm"]),
    ]


@settings(max_examples=40)
@given(st.lists(st.sampled_from("ABcd"), max_size=40))
def test_folded_pieces_are_all_nodes_in_order_and_equal_where_they_repeat(names: list[str]) -> None:
    place = 0
    for low, size, count in _folded(nodes(*names)):
        assert low == place and size * count > 0
        assert names[low : low + size * count] == names[low : low + size] * count
        place = low + size * count
    assert place == len(names)


def test_times_are_of_all_repetitions() -> None:
    found = GraphParts.of(nodes("a", "B c " * 2), {"n0": 1e-3, "n1": 1e-3, "n2": 2e-3, "n3": 1e-3, "n4": 3e-3}, 1e-2)
    assert [region.seconds for stretch in found.stretches for region in stretch.regions] == pytest.approx(
        [1e-3, 2e-3, 5e-3]
    )
    assert [row[-1] for row in found.tables()[0].rows] == ["10.0%", "20.0%", "50.0%"]


def test_an_island_of_floats_shows_in_a_file(tmp_path: Path) -> None:
    g = Graph()
    x = g.q(g.node("Sigmoid", [g.q("x")], "first"))
    x = g.node("Tanh", [x], "island")
    x = g.node("Erf", [x], "float")
    x = g.q(g.node("Sigmoid", [g.q(x)], "last"))
    found = graph_parts(g.write(tmp_path / "m.onnx", [x], IMAGE))
    kinds = [(region.runs_as, str(region)) for stretch in found.stretches for region in stretch.regions]
    assert kinds == [("integer", "Sigmoid"), ("float, 1 quantized", "Tanh, Erf"), ("integer", "Sigmoid")]


def test_what_follows_from_sizes_alone_is_no_part(tmp_path: Path) -> None:
    b = Builder()
    size = b.node("Shape", ["x"], "size")
    rows = b.node("Gather", [size, b.integers("zero", 0)], "rows")
    count = b.node("Unsqueeze", [rows, b.integers("axis", [0])], "count")
    b.node("Reshape", ["x", b.node("Concat", [count, b.integers("rest", [-1])], "sizes", axis=0)], "y")
    onnx.save(b.model({"x": ["n", 2, 2]}, {"y": ["n", 4]}), tmp_path / "m.onnx")
    found = GraphParts.of(kernel_graph(tmp_path / "m.onnx", []))
    assert found.of_sizes == 4 and [str(r) for s in found.stretches for r in s.regions] == ["Reshape"]
    assert not GraphParts.of([]).drawn() and not GraphParts.of([]).tables()[0].rows
