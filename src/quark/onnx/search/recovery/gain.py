"""gain: whether one model is better than another, or the few samples that both were compared on say so by chance.

With d(S) the distance of a model on the samples S (`core/metrics.py`: for a ratio in dB the dB with the other sign), n
samples, and S_i all of them but the i-th:

    g(S) = d_before(S) - d_after(S)      g_i = g(S_i)      error = sqrt((n - 1) / n * sum_i (g_i - mean g)^2)

The difference is taken sample by sample: what is hard for both is in both. Error: jackknife (Quenouille 1949, Tukey
1958).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from quark.core.metrics import Comparison, Metric
from quark.onnx.graph.output_parts import OutputPart
from quark.onnx.search.evaluator import Sums, total, worst_part

SURE = 1.0
"""Errors that a gain has to be above: five in six gains of nothing are below."""


def is_sure(metric: Metric, before: Sums, after: Sums) -> bool:
    """Tell whether a second model is better by more than the samples differ in that.

    Args:
        metric: Of the worst part of the outputs.
        before: The sums of a model on each sample.
        after: Those of another one, on the same samples.

    Returns:
        True for any gain on one sample, which tells no error, and where one of both gives values that are not finite.
    """
    whole = total(before), total(after)
    if not before or len(before) != len(after):
        return True
    ahead = _ahead(metric, *whole)
    if len(before) < 2 or not math.isfinite(ahead):
        return not ahead <= 0
    without = [_ahead(metric, *map(_without, whole, pair)) for pair in zip(before, after, strict=True)]
    if not np.isfinite(without).all():
        return ahead > 0
    return ahead > SURE * math.sqrt((len(without) - 1) * float(np.var(without)))


_Parts = Mapping[OutputPart, Comparison]


def _ahead(metric: Metric, before: _Parts, after: _Parts) -> float:
    """The distance that a second model is nearer."""
    return metric.distance(worst_part(metric, before)[0]) - metric.distance(worst_part(metric, after)[0])


def _without(whole: _Parts, one: _Parts) -> dict[OutputPart, Comparison]:
    """The sums of all samples but one."""
    return {part: replace(comparison).add(one[part], -1) for part, comparison in whole.items()}
