"""Figures: valid markup in the colours of the page, names as text, and the values that were given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from quark.report import figures
from quark.report.figures import ChannelMaxima, ClippedHistogram, DrawnNode
from tests.report.test_page import EVIL

SVG = "{http://www.w3.org/2000/svg}"
VALUES = np.random.default_rng(0).normal(size=1000)
DRAWN: dict[str, Callable[[str], str]] = {
    "bars": lambda name: figures.bars([(name, (30.0, math.inf)), ("b", (math.nan, -math.inf))], ("w", "o"), "dB"),
    "histogram": lambda name: figures.histogram(ClippedHistogram.of(name, VALUES, (-1.0, 1.0))),
    "scatter": lambda name: figures.scatter([(name, 2.0, 0.1), ("b", 1.0, 0.0)], "MB", "KL", log=True, line=[(1, 1)]),
    "path": lambda name: figures.search_path([(name, 1.0, 10.0, True), ("b", 2.0, math.nan, False)], "dB", 20.0),
    "tokens": lambda name: figures.token_divergence(VALUES**2),
    "channels": lambda name: figures.channel_bars(ChannelMaxima(name, np.arange(200.0) ** 4)),
    "regions": lambda name: figures.region_bars([(2, [(name, 0, 3.0), ("b", 1, 0.0)])], ("integer", "float"), "nodes"),
    "graph": lambda name: figures.graph(
        [DrawnNode(name, "", 0, ()), DrawnNode("b", "", 1, (0,))], ("integer", "float")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_figures_are_markup_in_the_colours_of_the_page(kind: str) -> None:
    text = DRAWN[kind](EVIL[:50])
    root = ElementTree.fromstring(re.sub(r"xlink:href", "href", text))
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert "text" in tags and not {"script", "img", "image", "foreignObject"} & tags
    words = [" ".join((element.text or "").split()) for element in root.iter(f"{SVG}text")]
    assert kind == "tokens" or [word for word in words if word.startswith("</te")], words
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", text))
    assert colours <= {"none"} | {f"var(--{name}, {color})" for name, color in figures.ELSEWHERE.items()}


@pytest.mark.slow
def test_a_heat_map_shades_blocks_by_kinds_and_frames_the_worst() -> None:
    values = {f"m.layers.{i}.{kind}": 30.0 - i for i in range(8) for kind in ("q", "mlp.down")}
    values |= {"m.layers.3.q": -5.0, "head": 1.0, "m.layers.2.q": math.nan, "m.layers.0.experts.0.w": 40.0}
    values |= {"m.layers.0.experts.1.w": 20.0}
    text = figures.heat_map(values, "SQNR dB", low_is_worst=True)
    words = [" ".join((element.text or "").split()) for element in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert [word for word in words if word in ("q", "mlp.down", "experts.*.w", "head")] == [
        "q",
        "mlp.down",
        "experts.*.w",
    ]
    assert "block; SQNR dB from 30 (pale) to -5 (dark), the 5 worst framed" in words
    bad = f"fill: var(--bad, {figures.ELSEWHERE['bad']})"
    assert text.count(bad) == 8 + 8 - 1 + 1  # a value that is not known has no cell, experts have one
    assert text.count(f'"{bad}"') == 1  # the worst alone is no paler than the colour
    assert figures.heat_map({"m.layers.0.q": 1.0, "head": 2.0}, "dB", low_is_worst=True) == ""


@pytest.mark.slow
def test_bars_are_as_long_as_their_values() -> None:
    text = figures.bars([("a", (10.0,)), ("b", (20.0,)), ("c", (40.0,))], ("w",), "dB")
    lengths = []
    for path in re.findall(r'<path d="(M [^"]+z)[^"]*"[^>]*style="fill: var\(--first', text):
        numbers = [float(x) for x in re.findall(r"[ML] ([\d.]+)", path)]
        lengths.append(max(numbers) - min(numbers))
    first, second, third = lengths[:3]
    assert (second / first, third / first) == pytest.approx((2, 4), rel=1e-3)


@pytest.mark.slow
def test_the_same_figure_twice_is_the_same_bytes() -> None:
    assert DRAWN["bars"]("a") == DRAWN["bars"]("a")


def test_histograms_count_all_and_say_what_is_beyond() -> None:
    values = np.append(VALUES, [np.nan, np.inf])
    found = ClippedHistogram.of("t", values, (-1.0, 1.0))
    assert found.counts.sum() == len(VALUES)
    assert found.beyond == np.mean(np.abs(VALUES) > 1)
    assert f"{found.beyond:.2%}" in found.caption
    wide = ClippedHistogram.of("t", VALUES, (-9.0, 9.0))
    assert (wide.edges[0], wide.edges[-1]) == (-9, 9) and "no values are beyond" in wide.caption
    assert "follows each input" in ClippedHistogram.of("t", np.zeros(0), None).caption


@pytest.mark.slow
@pytest.mark.parametrize("span", [1.5, 15, 1e5])
def test_labels_of_a_logarithmic_axis_are_numbers(span: float) -> None:
    """Between decades too, where there are few of them; never the source of a formula."""
    made = figures.token_divergence(np.geomspace(3e-4, 3e-4 * span, 200))
    labels = re.findall(r">([^<>]+)</text>", made)
    assert "$" not in made and "0.001" in labels
    assert ("0.0005" in labels) == (span < 100)


def test_nodes_stand_below_all_that_they_read_and_apart() -> None:
    nodes = [
        DrawnNode("", "", 0, ()),
        DrawnNode("", "", 0, (0,)),
        DrawnNode("", "", 0, (0,)),
        DrawnNode("", "", 0, (1, 2)),
    ]
    place = figures._layers(nodes)
    assert [row for _, row in place] == [0, 1, 1, 2] and len(set(place)) == 4
