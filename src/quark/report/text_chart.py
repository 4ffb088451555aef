"""Named points as a chart of text, ten lines high, in characters that every terminal has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from quark.errors import one_line

Point = tuple[str, float, float]
"""Name, x, y."""
ROWS, COLUMNS, GUTTER = 7, 68, 8
"""Of the field of the points, and the columns before it, which have the ends and the middle of y."""
POINT, MARKED = "o*"


def drawable(points: Sequence[Point], log: bool) -> list[Point]:
    """The points that have a place, by x: those whose y is finite, and above 0 where it is logarithmic."""
    kept = [point for point in points if math.isfinite(point[2]) and (point[2] > 0 or not log)]
    return sorted(kept, key=lambda point: point[1])


def unbeaten(points: Sequence[Point], *, low_is_best: bool) -> set[str]:
    """The names of the points that no other beats: one with at most their x, and at most their loss, and less of one.

    Args:
        points: Name, size, and figure of each; one whose figure is NaN is not among them.
        low_is_best: Whether the figure is a loss; else a gain, as SQNR is.
    """
    ranked = [(name, x, y if low_is_best else -y) for name, x, y in points if not math.isnan(y)]
    return {
        name
        for name, x, y in ranked
        if not any(there <= x and loss <= y and (there, loss) != (x, y) for _, there, loss in ranked)
    }


def text_chart(
    points: Sequence[Point],
    title: str,
    unit: str,
    *,
    log: bool,
    marked: Collection[str],
) -> str:
    """Points with their names, from left to right by x, and y upwards.

    A name stands beside its point, or nowhere where others leave it no room. Those that are marked have stars, and
    their names come first.

    Args:
        points: Name, x, y; see `drawable` for those that are left out.
        title: The first line.
        unit: Of x.
        log: Whether y is logarithmic.
        marked: Names.

    Returns:
        The lines of the chart; "" where fewer than two points differ.
    """
    kept = drawable(points, log)
    if len({(x, y) for _, x, y in kept}) < 2:
        return ""
    raised = [(name, x, math.log(y) if log else y) for name, x, y in kept]
    heights = [y for _, _, y in raised]
    (left, right), (low, high) = (kept[0][1], kept[-1][1]), (min(heights), max(heights))
    named = defaultdict[tuple[int, int], list[str]](list)
    for name, x, y in raised:
        named[ROWS - 1 - _cell(y, low, high, ROWS), _cell(x, left, right, COLUMNS)].append(name)
    ticks = {0: high, ROWS // 2: (low + high) / 2, ROWS - 1: low} if high > low else {ROWS - 1: low}
    shown = {row: f"{math.exp(height) if log else height:.3g}" for row, height in ticks.items()}
    lines = [f"{shown.get(row, ''):>{GUTTER}} |{text}" for row, text in enumerate(_rows(named, marked))]
    lines += [f"{'':{GUTTER}} +{'-' * COLUMNS}"]
    first, last = (f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in (left, right))
    lines += [f"{'':{GUTTER}}  {first}{f'{last} {unit}':>{COLUMNS - len(first)}}"]
    return "\n".join(text.rstrip() for text in (title, *lines))


def _rows(named: Mapping[tuple[int, int], Sequence[str]], marked: Collection[str]) -> list[str]:
    """The rows of the field, from top to bottom; `named` has the names of the points in each cell, row and column."""
    starred = {cell: any(name in marked for name in names) for cell, names in named.items()}
    field = [[" "] * COLUMNS for _ in range(ROWS)]
    for (row, column), star in starred.items():
        field[row][column] = MARKED if star else POINT
    for cell in sorted(named, key=lambda cell: not starred[cell]):
        _write_beside(field[cell[0]], cell[1], one_line(", ".join(named[cell])))
    return ["".join(cells) for cells in field]


def _cell(value: float, low: float, high: float, cells: int) -> int:
    """The cell of a value, of so many between two ends; the first where these are one."""
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def _write_beside(row: list[str], column: int, text: str) -> None:
    """Write a text into a row to the right of a column, or to the left; nowhere if neither is free."""
    for start in (column + 2, column - 1 - len(text)):
        around = row[max(start - 1, 0) : start + len(text) + 1]
        if start >= 0 and start + len(text) <= len(row) and not "".join(around).strip():
            row[start : start + len(text)] = text
            return
