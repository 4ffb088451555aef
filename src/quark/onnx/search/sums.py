"""sums: what models gave on each sample, and how sure a figure of few samples is.

With d(S) the distance of a model on the samples S (`core/metrics.py`: for a ratio in dB the dB with the other sign), n
samples, and d_i that of all of them but the i-th:

    error = sqrt((n - 1) / n * sum_i (d_i - mean d)^2)        least = the value at d(S) + t * error

Error: jackknife (Quenouille 1949, Tukey 1958), of the logarithm where d is one, whose errors lie evenly on both sides.
t: the quantile of Student's distribution of n - 1 degrees of freedom, for few samples tell their error badly, too.

The share of decisions that are kept is not counted alone: a few samples all keep theirs by chance. Of a row of scores
z of the float model, with c its largest, and d_k = (z_c - z_k) - (y_c - y_k) the noise of the lead over class k:

    kept = 1 - sum_k P(noise > z_c - z_k),   noise normal with the mean square of the d_k; 0 where another class leads
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from quark.core.array import NumpyArray
from quark.core.metrics import Comparison, Metric
from quark.onnx.graph.output_parts import OutputPart

Parts = Mapping[OutputPart, Comparison]
"""The sums of each part of an output."""
Sums = Sequence[Parts]
"""Of each sample, the sums of each part of an output."""
Decided = Sequence[Mapping[OutputPart, tuple[float, int]]]
"""Of each sample, for each part that is a distribution: how many decisions are kept, of how many."""
LEVEL, SURE = 0.9, 5 / 6
"""Of as many sets of samples a figure is no worse than its bound; and a gain is one."""
NEAR = 8
"""Classes next to the largest that may take its place."""


def total(sums: Sums) -> dict[OutputPart, Comparison]:
    """The sums of each part over all samples."""
    found: dict[OutputPart, Comparison] = {}
    for each in sums:
        for part, comparison in each.items():
            found.setdefault(part, Comparison()).add(comparison)
    return found


def worst_part(metric: Metric, sums: Parts) -> tuple[float, OutputPart]:
    """The metric of the worst part, and that part."""
    values = {part: metric.of(comparison) for part, comparison in sums.items()}
    worst = metric.worst_of(values)
    return values[worst], worst


def without_each(sums: Sums) -> list[dict[OutputPart, Comparison]]:
    """The sums of all samples but one, for each of them."""
    whole = total(sums)
    return [{part: replace(every).add(one[part], -1) for part, every in whole.items()} for one in sums]


def spread(metric: Metric, sums: Sums) -> float:
    """Return by how much the distance on new data may be larger than on these samples.

    Returns:
        0 where there are fewer than two samples, which tell no error, or values that are not finite.
    """
    return margin([metric.distance(worst_part(metric, each)[0]) for each in without_each(sums)], LEVEL)


def margin(figures: Sequence[float], level: float) -> float:
    """Return t times the error of a figure, of which there is one without each sample; 0 where it has none."""
    count = len(figures)
    if count < 2 or not np.isfinite(figures).all():
        return 0.0
    return t_quantile(count - 1, level) * math.sqrt((count - 1) * float(np.var(figures)))


def t_quantile(freedom: int, level: float) -> float:
    """The quantile of Student's distribution (Hill 1970, the expansion about the normal one; exact for 1 and 2)."""
    if freedom == 1:
        return math.tan(math.pi * (level - 0.5))
    if freedom == 2:
        return (2 * level - 1) * math.sqrt(2 / (4 * level * (1 - level)))
    z = NormalDist().inv_cdf(level)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


_TAILS: Callable[[NumpyArray], NumpyArray] = np.vectorize(lambda x: math.erfc(x / math.sqrt(2)) / 2, otypes=[float])


def kept_decisions(x: NumpyArray, y: NumpyArray) -> tuple[float, int]:
    """Return how many rows keep their largest score, and would with as much other noise, and the number of rows.

    Args:
        x: Scores of the float model, (..., classes), at least two.
        y: Those of another one.
    """
    x, y = (each.reshape(-1, each.shape[-1]).astype(np.float64) for each in (x, y))
    count = min(NEAR + 1, x.shape[-1])
    nearest = np.argpartition(-x, count - 1, axis=-1)[:, :count]
    nearest = np.take_along_axis(nearest, np.argsort(-np.take_along_axis(x, nearest, -1), axis=-1), -1)
    before, after = (np.take_along_axis(each, nearest, -1) for each in (x, y))
    lead, other = before[:, :1] - before[:, 1:], after[:, :1] - after[:, 1:]
    noise = np.sqrt(np.mean((lead - other) ** 2, axis=-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(noise > 0, lead / noise, np.inf)
    kept = np.maximum(0, 1 - _TAILS(np.minimum(ratio, 40.0)).sum(-1))
    return float(kept[y.argmax(-1) == nearest[:, 0]].sum()), len(x)


def share_kept(decided: Decided) -> float:
    """The least share, over the parts, of the decisions that are kept; 1 where there is none."""
    counts: dict[OutputPart, tuple[float, int]] = {}
    for each in decided:
        for part, (kept, count) in each.items():
            before = counts.get(part, (0.0, 0))
            counts[part] = before[0] + kept, before[1] + count
    return min((kept / count for kept, count in counts.values() if count), default=1.0)
