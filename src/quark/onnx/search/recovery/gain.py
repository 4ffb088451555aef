"""gain: whether one model is better than another, or the few samples that both were compared on say so by chance.

    g(S) = d_before(S) - d_after(S)

is above t times its error (`search/sums.py`), or above 0 for each sample by itself. The difference is taken sample by
sample: what is hard for both is in both.
"""

from __future__ import annotations

import math

from quark.core.metrics import Metric
from quark.onnx.search.sums import SURE, Parts, Sums, margin, total, without_each, worst_part


def is_sure(metric: Metric, before: Sums, after: Sums) -> bool:
    """Tell whether a second model is better by more than the samples differ in that.

    Args:
        metric: Of the worst part of the outputs.
        before: The sums of a model on each sample.
        after: Those of another one, on the same samples.

    Returns:
        True for any gain on one sample, which tells no error, and where one of both gives values that are not finite.
    """
    if not before or len(before) != len(after):
        return True
    ahead = _ahead(metric, total(before), total(after))
    if len(before) < 2 or not math.isfinite(ahead):
        return not ahead <= 0
    if ahead > 0 and all(_ahead(metric, *pair) > 0 for pair in zip(before, after, strict=True)):
        return True
    return ahead > margin(
        [_ahead(metric, *pair) for pair in zip(*map(without_each, (before, after)), strict=True)], SURE
    )


def _ahead(metric: Metric, before: Parts, after: Parts) -> float:
    """The distance that a second model is nearer."""
    return metric.distance(worst_part(metric, before)[0]) - metric.distance(worst_part(metric, after)[0])
