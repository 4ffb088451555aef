"""The figures of a page, as SVG in the page's own colours.

matplotlib draws each in placeholder colours, which become variables of the page's style: one figure is readable in
light and in dark. Text stays text, so that it can be searched and copied; it is never taken for markup or mathematics.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from quark.core.array import NumpyArray
from quark.errors import require_packages
from quark.report.text_chart import drawable

INK, FAINT, GRID, FIRST, SECOND, THIRD, BAD, SOFT, PAPER = (f"#0102{i:02x}" for i in range(9))
VARIABLES = dict(
    zip(
        (INK, FAINT, GRID, FIRST, SECOND, THIRD, BAD, SOFT, PAPER),
        ("ink", "faint", "grid", "first", "second", "third", "bad", "soft", "panel"),
        strict=True,
    )
)
ELSEWHERE = {
    "ink": "#6b7480", "faint": "#808994", "grid": "#9aa3ae", "first": "#3d85cc", "second": "#d97a35",
    "third": "#3f9a66", "bad": "#d0443c", "soft": "#9aa3ae", "panel": "#80808020",
}  # fmt: skip
"""The colours where no page says them, as in a notebook: readable on white and on black."""
SERIES = (FIRST, SECOND, THIRD)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "quark", "text.parse_math": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "text.color": INK, "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
    "axes.unicode_minus": False,
}  # fmt: skip
WIDTH = 9.4
"""Inches, of 72 points."""
MOST_BARS = 400
"""Rows of a figure; of more, the worst are drawn."""
LONGEST_NAME = 60
MARKED = 5
"""Cells of a heat map that have a frame."""
NUMBERED = 3
"""Outliers that are named."""
BINS = 96
MOST_CHANNELS = 64
"""Bars of channels; of more, each bar is the largest of several."""
OUTLIER = 6.0
"""How many times the median an outlier is."""


@dataclass(frozen=True)
class ClippedHistogram:
    """The values of a float tensor, and the range beyond which its codes cannot go.

    Attributes:
        title: Whose.
        edges, counts: As of `numpy.histogram`.
        clip: The smallest and the largest value that codes stand for; None where the range is live.
        beyond: Share of the values outside.
    """

    title: str
    edges: NumpyArray
    counts: NumpyArray
    clip: tuple[float, float] | None
    beyond: float = 0.0

    @staticmethod
    def of(title: str, values: NumpyArray, clip: tuple[float, float] | None) -> ClippedHistogram:
        """Count finite values in equal bins, over the values and the same over the range."""
        flat = np.asarray(values, np.float64).ravel()
        flat = flat[np.isfinite(flat)]
        ends = [*(clip or ()), *((flat.min(), flat.max()) if flat.size else ())]
        counts, edges = np.histogram(flat, BINS, (min(ends), max(ends)) if ends else None)
        beyond = float(np.mean((flat < clip[0]) | (flat > clip[1]))) if clip and flat.size else 0.0
        return ClippedHistogram(title, edges, counts, clip, beyond)

    @property
    def caption(self) -> str:
        """The range in words, with the share of the values beyond it."""
        if self.clip is None:
            return "The range follows each input; nothing is clipped."
        share = f"{self.beyond:.2%}" if self.beyond >= 1e-4 else "under 0.01%"
        rest = f"{share} of the values are beyond" if self.beyond else "no values are beyond"
        return f"Codes reach from {self.clip[0]:.4g} to {self.clip[1]:.4g}; {rest}."


@dataclass(frozen=True)
class ChannelMaxima:
    """The largest magnitude of each channel of what a layer reads, m_c = max |x_c|.

    A channel is an outlier if m_c > 6 median(m), where the median is that of the channels that are not always 0.

    Attributes:
        layer: Its name.
        values: m, (channels,), NaN as inf.
    """

    layer: str
    values: NumpyArray

    @property
    def median(self) -> float:
        """Of the channels that are not always 0; 0 where all are."""
        used = self.values[self.values > 0]
        return float(np.median(used)) if used.size else 0.0

    @property
    def spread(self) -> float:
        """The largest as a multiple of the median; 1 where all are 0, or most are infinite."""
        median = self.median
        return float(self.values.max()) / median if 0 < median < math.inf else 1.0

    @property
    def outliers(self) -> list[int]:
        """Numbers of the channels that are outliers, the largest first."""
        order = np.argsort(-self.values, kind="stable")
        return [int(channel) for channel in order if self.values[channel] > OUTLIER * self.median]

    @property
    def outlier_share(self) -> float:
        """The share of the largest magnitude that outliers alone reach: 1 - max of the others / max; 0 without any."""
        found = self.outliers
        if not found:
            return 0.0
        return 1.0 - float(np.delete(self.values, found).max()) / float(self.values[found[0]])

    @property
    def named(self) -> str:
        """The largest outliers, each with its magnitude: "17 (812), 5 (44), 9 (31) and 4 more"."""
        found = self.outliers
        words = ", ".join(f"{channel} ({self.values[channel]:.3g})" for channel in found[:NUMBERED])
        return f"{words} and {len(found) - NUMBERED} more" if len(found) > NUMBERED else words

    @property
    def caption(self) -> str:
        """The outliers in words."""
        count, found = len(self.values), len(self.outliers)
        start = f"The median of {count} channels is {self.median:.3g}, the largest {float(self.values.max()):.3g}."
        if not found:
            return f"{start} None is more than {OUTLIER:g} times the median."
        which = f"{found} outlier{'' if found == 1 else 's'}: channel {self.named}."
        return f"{start} {which} {self.outlier_share:.0%} of the range is for outliers alone."


def channel_bars(found: ChannelMaxima) -> str:
    """The channels of a layer in their order, outliers in another colour and the largest with their numbers.

    Of more than 64, a bar is the largest of several that are beside each other. A line is at the median.
    """
    finite = found.values[np.isfinite(found.values)]
    highest = 1.08 * (float(finite.max(initial=0.0)) or 1.0)
    heights, outliers = np.minimum(found.values, highest), found.outliers
    groups = np.array_split(np.arange(len(heights)), min(len(heights), MOST_CHANNELS))
    with _figure(WIDTH / 2, 2.3) as (figure, axes):
        for group in groups:
            own, height = {*group.tolist()}, float(heights[group].max())
            color = FIRST if own.isdisjoint(outliers) else BAD
            axes.bar(group[0], height, 0.86 * len(group), align="edge", color=color)
            if numbers := [str(channel) for channel in outliers[:NUMBERED] if channel in own]:
                left = 2 * group[0] > len(heights)
                _label(axes, ", ".join(numbers), (group[0] if left else group[-1] + 1, height), 7, left=left)
        axes.axhline(found.median, color=THIRD, linewidth=1.2, linestyle="--", label=f"median {found.median:.3g}")
        axes.set_xlim(0, len(heights))
        axes.set_title(_short(found.layer), fontsize=8, color=INK)
        axes.set(xlabel="channel", ylabel="largest |x|", ylim=(0, 1.25 * highest))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right", fontsize=8)
        return _svg(figure, f"Channels of the input of {found.layer}")


def bars(rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], unit: str) -> str:
    """Horizontal bars, one group for each row, from top to bottom.

    Args:
        rows: Name, and a value for each of `series`; NaN: none. inf is drawn as the longest bar.
        series: What the values are.
        unit: Of all of them.
    """
    values = np.array([row for _, row in rows], np.float64).reshape(len(rows), len(series))
    finite = values[np.isfinite(values)]
    longest = max(1.0, float(finite.max())) * 1.08 if finite.size else 1.0
    place, height = np.arange(len(rows)), 0.8 / len(series)
    with _figure(WIDTH, 0.9 + 0.24 * len(rows)) as (figure, axes):
        for index, (name, color) in enumerate(zip(series, SERIES, strict=False)):
            column = np.nan_to_num(values[:, index], nan=0.0, posinf=longest, neginf=0.0)
            axes.barh(place + height * (index - (len(series) - 1) / 2), column, height * 0.92, color=color, label=name)
        for row, column in zip(*np.nonzero(np.isinf(values)), strict=True):
            text = "equal" if values[row, column] > 0 else "lost"
            where = (max(0.0, min(longest, float(np.nan_to_num(values[row, column])))), row)
            _label(axes, text, where, 7, color=FAINT)
        axes.set_yticks(place, [_short(name) for name, _ in rows], color=INK, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_tick_params(labeltop=len(rows) > 40)
        figure.legend(loc="outside upper left", ncols=len(series))
        return _svg(figure, f"{' and '.join(series)} of {len(rows)} layers")


def heat_map(values: Mapping[str, float], unit: str, *, low_is_worst: bool) -> str:
    """Blocks from left to right, kinds of layer from top to bottom, the darker the worse; the worst have a frame.

    Args:
        values: Name of a layer -> its value, in the order of the model. Of several in one cell (experts) the worst is
            drawn, NaN not at all, and names without the number of a block not at all.
        unit: Of the values.
        low_is_worst: Whether the lowest value is the worst one, as of SQNR; else the highest.

    Returns:
        The figure; "" where the layers are of fewer than two blocks, or no value is finite.
    """
    cells = _cells(values, min if low_is_worst else max)
    order = sorted((cell for cell, value in cells.items() if math.isfinite(value)), key=cells.__getitem__)
    if not order or len({block for block, _ in cells}) < 2:
        return ""
    worst_first = order if low_is_worst else order[::-1]
    worst, best = cells[worst_first[0]], cells[worst_first[-1]]
    shades = {cell: (cells[cell] - best) / (worst - best) if worst != best else 0.0 for cell in order}
    blocks, kinds = 1 + max(block for block, _ in cells), [*dict.fromkeys(kind for _, kind in cells)]
    with _figure(WIDTH, 1.1 + 0.3 * len(kinds)) as (figure, axes):
        for block, kind in cells:
            shade = 0.06 + 0.94 * shades.get((block, kind), 0.0)
            axes.barh(kinds.index(kind), 1, 1, block - 0.5, color=BAD, alpha=shade)
        for block, kind in worst_first[:MARKED]:
            axes.barh(kinds.index(kind), 0.88, 0.88, block - 0.44, fill=False, edgecolor=INK, linewidth=1.4, zorder=3)
        axes.set_xlim(-0.5, blocks - 0.5)
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_yticks(range(len(kinds)), [_short(kind, 32) for kind in kinds], color=INK, fontsize=8)
        framed = min(MARKED, len(order))
        axes.set_xlabel(f"block; {unit} from {best:.3g} (pale) to {worst:.3g} (dark), the {framed} worst framed")
        axes.grid(visible=False)
        return _svg(figure, f"{unit} of {len(kinds)} kinds of layer in {blocks} blocks")


def _cells(values: Mapping[str, float], worse: Callable[[float, float], float]) -> dict[tuple[int, str], float]:
    """Block and kind of layer -> the worst value of the layers that are of it."""
    found: dict[tuple[int, str, str], float] = {}
    for name, value in values.items():
        parts = name.split(".")
        place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if place is None or place == len(parts) - 1 or math.isnan(value):
            continue
        kind = ".".join("*" if part.isdigit() else part for part in parts[place + 1 :])
        key = int(parts[place]), ".".join(parts[:place]), kind
        found[key] = worse(found[key], value) if key in found else value
    several = len({stack for _, stack, _ in found}) > 1
    return {(block, f"{stack}.{kind}" if several else kind): value for (block, stack, kind), value in found.items()}


def histogram(values: ClippedHistogram) -> str:
    """The values, on a logarithmic axis, and lines at the ends of the range."""
    with _figure(WIDTH / 2, 2.3) as (figure, axes):
        axes.stairs(values.counts, values.edges, fill=True, color=FIRST, alpha=0.75)
        for side in values.clip or ():
            axes.axvline(side, color=BAD, linewidth=1.4, linestyle="--")
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(_tick_text)
        axes.set_ylim(bottom=0)
        axes.set_title(_short(values.title), fontsize=8, color=INK)
        axes.set(xlabel="value", ylabel="count")
        return _svg(figure, f"Histogram of {values.title}")


def scatter(
    points: Sequence[tuple[str, float, float]],
    x: str,
    y: str,
    *,
    log: bool,
    line: Sequence[tuple[float, float]] = (),
    marked: str = "",
) -> str:
    """Named points.

    Args:
        points: Name, x, y; see `drawable` for those that are left out.
        x, y: What the axes are.
        log: Whether y is logarithmic.
        line: x and y of a line that is drawn under them.
        marked: The name of one that is to be seen.
    """
    kept = drawable(points, log)
    with _figure(WIDTH, 3.6) as (figure, axes):
        if line:
            axes.plot([p[0] for p in line], [p[1] for p in line], color=SOFT, linewidth=1)
        for index, (name, here, there) in enumerate(kept):
            color = SECOND if name == marked else FIRST
            axes.plot([here], [there], "o", color=color, markersize=6)
            _label(axes, name, (here, there), 8, left=2 * here > kept[0][1] + kept[-1][1], rise=5 - 10 * (index % 2))
        axes.margins(0.12)
        axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
        if log:
            values = [point[2] for point in kept] or [1.0]
            _label_decades(axes.yaxis, min(values), max(values))
        return _svg(figure, f"{y} against {x}")


def search_path(steps: Sequence[tuple[str, float, float, bool]], y: str, target: float | None = None) -> str:
    """Return a figure of the trials of a search, in time, and the best so far.

    Args:
        steps: Name, seconds that it took, what it reached (NaN: nothing), whether it was kept.
        y: What is reached.
        target: A line.
    """
    ends = np.cumsum([step[1] for step in steps])
    best = [(end, value) for end, (_, _, value, kept) in zip(ends, steps, strict=True) if kept and math.isfinite(value)]
    with _figure(WIDTH, 3.6) as (figure, axes):
        if best:
            line = [*best, (float(ends[-1]), best[-1][1])]
            axes.step([p[0] for p in line], [p[1] for p in line], where="post", color=THIRD, label="best so far")
        for end, (name, _, value, kept) in zip(ends, steps, strict=True):
            if math.isfinite(value):
                axes.plot([end], [value], "o", color=THIRD if kept else SOFT, markersize=6)
                _label(axes, name, (float(end), value), 7, left=2 * end > ends[-1], rise=5)
        if target is not None and math.isfinite(target):
            axes.axhline(target, color=BAD, linestyle="--", linewidth=1.2, label="target")
        axes.margins(0.12)
        axes.set(xlabel="seconds", ylabel=y)
        if best or target is not None:
            axes.legend(loc="best", fontsize=8)
        return _svg(figure, f"{y} over time")


def pictures(rows: Sequence[tuple[str, Any, Any]]) -> str:
    """Pictures beside those that they are compared with, and the difference.

    Args:
        rows: Name, and two arrays of one shape, (height, width) or (height, width, 3), of any range.
    """
    with _figure(WIDTH / 2, 0.3 + 1.55 * len(rows)) as (figure, axes):
        axes.remove()
        grid = figure.subplots(len(rows), 3, squeeze=False)
        for line, (name, first, second) in zip(grid, rows, strict=True):
            low, high = float(np.min(first)), float(np.max(first))
            scale = (high - low) or 1.0
            difference = np.abs(np.asarray(first, np.float64) - second)
            shown = [*((np.asarray(x, np.float64) - low) / scale for x in (first, second)), difference / scale]
            for place, image, title in zip(line, shown, (name, "quantized", "difference"), strict=True):
                place.imshow(np.clip(image, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                place.set_title(_short(title, 24), fontsize=7, color=INK)
                place.axis("off")
        return _svg(figure, f"Pictures of {len(rows)} prompts")


def token_divergence(values: NumpyArray) -> str:
    """How many tokens have which KL divergence, on a logarithmic axis, with the median and the mean."""
    flat = np.maximum(np.asarray(values, np.float64).ravel(), 1e-9)
    edges = np.geomspace(flat.min() * 0.9, max(flat.max(), flat.min() * 10) * 1.1, 64)
    with _figure(WIDTH, 2.6) as (figure, axes):
        axes.stairs(np.histogram(flat, edges)[0], edges, fill=True, color=FIRST, alpha=0.75)
        for name, value, color in (("median", np.median(flat), THIRD), ("mean", flat.mean(), SECOND)):
            axes.axvline(value, color=color, linewidth=1.4, label=f"{name} {value:.3g}")
        axes.set(xscale="log", xlabel="KL divergence of a token, nats", ylabel="tokens")
        _label_decades(axes.xaxis, edges[0], edges[-1])
        axes.legend(fontsize=8)
        return _svg(figure, "KL divergence by token")


@dataclass(frozen=True)
class DrawnNode:
    """A node of a drawn graph.

    Attributes:
        op_type, name: Its label.
        kind: Index into the kinds.
        reads: Indices of the nodes that it reads.
        of_sizes: Whether what it gives follows from the sizes of tensors and from constants alone.
    """

    op_type: str
    name: str
    kind: int
    reads: tuple[int, ...]
    of_sizes: bool = False

    @property
    def label(self) -> str:
        """Both."""
        return f"{self.op_type} {self.name}".rstrip()


def graph(nodes: Sequence[DrawnNode], kinds: Sequence[str]) -> str:
    """Nodes from top to bottom, each below all that it reads, coloured by kind.

    Args:
        nodes: In an order in which each reads earlier ones only.
        kinds: What the colours say; the last is drawn faintly.
    """
    place = _layers(nodes)
    colors = [*SERIES[: len(kinds) - 1], SOFT]
    columns, rows = (max(p[i] for p in place) + 1 for i in (0, 1))
    with _figure(max(WIDTH, 1.0 + 1.15 * columns), 0.6 + 0.3 * rows) as (figure, axes):
        lines = [(place[source], place[i]) for i, node in enumerate(nodes) for source in node.reads]
        for (x1, y1), (x2, y2) in lines:
            axes.plot([x1, x2], [y1, y2], color=SOFT, linewidth=0.7, zorder=1)
        for kind, name in enumerate(kinds):
            own = [place[i] for i, node in enumerate(nodes) if node.kind == kind]
            label = f"{name}: {len(own)}"
            axes.scatter([p[0] for p in own], [p[1] for p in own], 42, colors[kind], marker="s", label=label, zorder=2)
        for (x, y), node in zip(place, nodes, strict=True):
            _label(axes, _short(node.label, 18), (x, y), 6.5)
        axes.set_ylim(rows - 0.3, -0.7)
        axes.set_xlim(-0.3, columns)
        axes.axis("off")
        figure.legend(loc="outside upper left", ncols=len(kinds))
        return _svg(figure, "The graph by kind of node")


def region_bars(
    stretches: Sequence[tuple[int, Sequence[tuple[str, int, float]]]], kinds: Sequence[str], unit: str
) -> str:
    """Regions of a graph from top to bottom, coloured by kind; what repeats stands once, with how often.

    Args:
        stretches: How often each repeats, and its regions: label, index into `kinds`, and the length of the bar.
        kinds: What the colours say; the last is drawn faintly.
        unit: Of the lengths.
    """
    rows = [row for _, regions in stretches for row in regions]
    colors, longest = [*SERIES[: len(kinds) - 1], SOFT], max(size for _, _, size in rows) or 1.0
    with _figure(WIDTH, 0.9 + 0.24 * len(rows)) as (figure, axes):
        for kind, name in enumerate(kinds):
            # One that is small beside the others is seen too.
            own = [(row, max(size, 0.006 * longest)) for row, (_, its, size) in enumerate(rows) if its == kind]
            if not own:
                continue
            axes.barh([row for row, _ in own], [size for _, size in own], 0.74, color=colors[kind], label=name)
        _draw_brackets(axes, [(repeats, len(regions)) for repeats, regions in stretches], -0.012 * longest)
        axes.set_yticks(range(len(rows)), [_short(label) for label, _, _ in rows], color=INK, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(-0.09 * longest if max(repeats for repeats, _ in stretches) > 1 else 0, 1.04 * longest)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=len(kinds))
        return _svg(figure, f"{len(rows)} regions of the graph by kind")


def _draw_brackets(axes: Any, stretches: Sequence[tuple[int, int]], x: float) -> None:
    """A line beside the rows of each stretch that repeats, with how often; stretches are repetitions and rows."""
    first = 0
    for repeats, rows in stretches:
        if repeats > 1:
            ends = (first - 0.4, first + rows - 0.6)
            axes.plot([x, x], ends, color=INK, linewidth=1.4)
            _label(axes, f"x {repeats}", (x, sum(ends) / 2), 9, left=True)
        first += rows


def _layers(nodes: Sequence[DrawnNode]) -> list[tuple[int, int]]:
    """Column and row of each node: the row below all that it reads, the column of its first reader's line."""
    rows: list[int] = []
    taken: set[tuple[int, int]] = set()
    place: list[tuple[int, int]] = []
    for node in nodes:
        rows.append(1 + max((rows[source] for source in node.reads), default=-1))
        column = min((place[source][0] for source in node.reads), default=0)
        while (column, rows[-1]) in taken:
            column += 1
        taken.add((column, rows[-1]))
        place.append((column, rows[-1]))
    return place


def _short(name: str, longest: int = LONGEST_NAME) -> str:
    """A name in one line, its middle left out where it is long."""
    text = " ".join(str(name).split())
    return text if len(text) <= longest else f"{text[: longest // 3]}...{text[-(longest - longest // 3 - 3) :]}"


def _tick_text(value: float, position: int | None = None) -> str:
    """A tick of a logarithmic axis; matplotlib's own are formulas, which a page shows as their source."""
    return f"{value:g}"


def _label_decades(axis: Any, least: float, most: float) -> None:
    """Numbers at the decades of a logarithmic axis, and between them where the values span few."""
    axis.set_major_formatter(_tick_text)
    if most < 10 * least:  # there may be no other tick
        axis.set_minor_formatter(_tick_text)
    else:
        shown = "25" if most < 100 * least else ""
        axis.set_minor_formatter(lambda value, place: _tick_text(value, place) if f"{value:e}"[0] in shown else "")


def _label(
    axes: Any, text: str, place: tuple[float, float], size: float, color: str = INK, left: bool = False, rise: int = 0
) -> None:
    """A text to the right or left of a point, raised by some units of type size.

    It takes no room: a long one is cut, and does not press the axes.
    """
    shift, side = (-5, "right") if left else (5, "left")
    drawn = axes.annotate(
        _short(text), place, (shift, rise), textcoords="offset points", fontsize=size, color=color, va="center", ha=side
    )
    drawn.set_in_layout(False)


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """A figure of some inches and its axes, in the style of the page until the end."""
    require_packages("A picture", "report", "matplotlib")
    import matplotlib  # of an extra of its own, and slow
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _svg(figure: Any, label: str) -> str:
    """The markup of a figure in the variables of the page."""
    out = io.StringIO()
    absent: Mapping[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=absent)
    text = out.getvalue()
    text = text[text.index("<svg") :]  # no prologue of XML within HTML

    def in_page(match: re.Match[str]) -> str:
        name = VARIABLES[match[2]]
        return f"{match[1]}: var(--{name}, {ELSEWHERE[name]})"

    text = re.sub(r"(fill|stroke): (#0102\w\w)", in_page, text)
    shown = escape(label, {'"': "&quot;"})
    return text.replace("<svg ", f'<svg role="img" aria-label="{shown}" ', 1)
