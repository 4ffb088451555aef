"""Automatic mixed precision: which layers another precision hurts least, and how many of them a limit allows.

    sensitivity(k) = distance(float outputs, outputs with candidate k alone at its target)
    order          = ascending sensitivity
    speed          the longest prefix of the order whose distance is <= threshold, and those after it that still fit
    quality        the shortest prefix whose distance is <= threshold, without those that it does not need
    size budget    the shortest prefix whose weights fit, without those that it does not need, in this order or in that
                   of (sensitivity - distance of none) / bytes, whichever costs less

What single layers cost does not add up, so a prefix is measured as a whole. The longer it is, the more it does, so that
its end is found by halving: a few trials, where one by one takes as many as there are candidates. The order is an
estimate: under a threshold it comes from few samples, whose scores are not the ones that are compared with it. Every
choice is measured on all. Another order by sensitivity, that of second derivatives, is in Dong et al. 2019 (HAWQ,
arXiv:1905.03696).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import required
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.algo_configs import AutoMixprecisionConfig
from quark.onnx.config.settings import Settings
from quark.onnx.search.evaluator import distance_of
from quark.onnx.search.mixed_precision.candidates import (
    Cache,
    Candidate,
    Option,
    Sensitivity,
    analyse,
    cache_key,
    find_candidates,
    stored_bytes,
    table,
    with_options,
)
from quark.onnx.search.mixed_precision.switched import SwitchedOutputs
from quark.onnx_ops.saving import weight_bytes

_RANKED_SAMPLES = 2
"""Samples that an order is found with, where all of them decide how much of it is taken."""
Score = Callable[..., float]
"""(options that change, how many samples; all by default) -> distance."""
_EXCHANGES = 4
"""Trials that look for a better choice beside the prefix; twice as many where few samples tell what to try on all."""
_MEASURES = ("data_size", "metric_output_index", "metric_distance_fn", "metric_evaluate_fn", "metric_default")
"""Parameters that scores depend on, beside the settings."""


def mix_precision(prepared: Prepared, config: AutoMixprecisionConfig, settings: Settings) -> Settings:
    """Settings with the layers that may change at their targets; those that came, where it is only measured.

    Args:
        prepared: The float model; its statistics in memory are read, and completed.
        config: Which layers may change, and how far.
        settings: Of the others.

    Raises:
        ConfigError: No layer qualifies, or the limit is out of reach: says by how much.
        CalibrationError: There are no samples.
    """
    model, data = prepared.model, required(prepared.data, config)
    qdq = replace(
        settings.qdq,
        dual_pairs=settings.qdq.dual_pairs or config.dual_quant_nodes,
        propagate_specs=config.shared_param_mode == "propagate",
    )
    base = replace(settings, qdq=qdq)
    candidates = find_candidates(model, config, base)
    path, measures = config.sensitivity_cache_file, [getattr(config, name) for name in _MEASURES]
    cache = Cache(path, cache_key(model, base, data, measures) if path is not None else "")
    trials = SwitchedOutputs(replace(prepared, data=data), _output(model, config))
    count = min(config.data_size or len(data), len(data))
    evaluator = trials.evaluator(
        distance_of(config.metric_distance_fn, config.metric_evaluate_fn, config.metric_default), count
    )

    scores: dict[tuple[frozenset[Option], int | None], float] = {}

    def score(options: Sequence[Option], count: int | None = None) -> float:
        key = frozenset(options), count
        if key not in scores:
            scores[key] = evaluator.score(with_options(base, options), count)
        return scores[key]

    def size(options: Sequence[Option]) -> float:
        return stored_bytes(model, with_options(base, options))

    # Every statistic that some candidate needs is there before workers share them.
    trials.share([with_options(base, options) for options in ([], *_wholes(candidates))])
    start, full = score([]), score(_wholes(candidates)[0])
    trials.threads = max(1, (os.cpu_count() or 1) // config.worker_num)
    ranked = analyse(candidates, lambda option: score([option], _few(config)), cache, config.worker_num)
    trials.threads = os.cpu_count() or 1
    logger.info("Distance with no layer changed: %.6g; with all of them: %.6g.\n%s", start, full, table(ranked))
    if config.metric_threshold is None:
        return settings
    float_size = weight_bytes(model)
    found = min(
        (_promote(order, config, score, size, float_size) for order in _orders(ranked, config, start, size)),
        key=lambda prefix: prefix.distance,
    )
    shown = (len(found.found), len(ranked), found.distance, size(found.options), float_size)
    logger.info("Mixed precision: %d of %d change; distance %.6g; %.0f bytes of weights, of %.0f in float.", *shown)
    return with_options(base, found.options)


def _wholes(candidates: Sequence[Candidate]) -> list[list[Option]]:
    """All candidates at their first option, at their second, ..."""
    most = max(len(candidate.options) for candidate in candidates)
    return [[candidate.options[min(i, len(candidate.options) - 1)] for candidate in candidates] for i in range(most)]


def _few(config: AutoMixprecisionConfig) -> int | None:
    """How many samples an order is found with: few, where it is no more than an order; None for all.

    A function of the user's may count on all samples, and so may who reads the table or the file.
    """
    read = config.metric_threshold is None or config.sensitivity_cache_file is not None
    own = config.metric_distance_fn is not None or config.metric_evaluate_fn is not None
    return None if own or read else _RANKED_SAMPLES


def _output(model: ir.Model, config: AutoMixprecisionConfig) -> str:
    """The name of the output that is compared. Raises ConfigError where there is none of its position."""
    outputs = [output.name or "" for output in model.graph.outputs]
    if config.metric_output_index >= len(outputs):
        raise ConfigError(
            f"AutoMixprecisionConfig.metric_output_index={config.metric_output_index}: the model has {len(outputs)} "
            f"outputs: {', '.join(outputs)}."
        )
    return outputs[config.metric_output_index]


def _orders(
    ranked: Sequence[Sensitivity],
    config: AutoMixprecisionConfig,
    start: float,
    size: Callable[[Sequence[Option]], float],
) -> list[Sequence[Sensitivity]]:
    """The orders to try: by sensitivity; where only bytes are limited, by sensitivity for each byte too."""
    if config.metric_threshold or not config.size_budget:
        return [ranked]
    before = size([])
    bytes_of = {found.candidate.name: max(1.0, abs(size([found.option]) - before)) for found in ranked}
    return [ranked, sorted(ranked, key=lambda found: (found.score - start) / bytes_of[found.candidate.name])]


@dataclass
class _Prefix:
    """The candidates that change so far, the distance that they cost, and, under a budget, the bytes of all weights."""

    found: list[Sensitivity]
    distance: float = math.nan
    size: float = math.nan

    @property
    def options(self) -> list[Option]:
        return [found.option for found in self.found]


def _promote(
    ranked: Sequence[Sensitivity],
    config: AutoMixprecisionConfig,
    score: Score,
    size: Callable[[Sequence[Option]], float],
    float_size: float,
) -> _Prefix:
    """The candidates that change: as many, in their order, as the limits ask for or allow.

    Args:
        ranked: The candidates in their order.
        config: The limits.
        score, size: The distance and the bytes of weights with some of them.
        float_size: These bytes in float.
    """
    threshold = config.metric_threshold
    budget = config.size_budget or math.inf
    budget *= float_size if budget <= 1 else 1
    prefixes = _prefixes([found for found in ranked if found.enabled], size, budget)
    now, speed = prefixes[-1], config.metric_optimize_object == "speed"
    if threshold:
        limits = _limits(prefixes, config, score)
        now = _within(prefixes, limits, speed, score)
        if budget == math.inf and now.found:
            now = _exchanged(now, prefixes, limits, speed, score)
    now.distance = score(now.options)
    _require_limits(now, config, budget)
    if not now.found:
        raise ConfigError(
            f"AutoMixprecisionConfig: no layer changes: the distance is {now.distance:.6g} without any and "
            f"{score([ranked[0].option]):.6g} with {ranked[0].candidate.name}, the least sensitive; metric_threshold "
            f"{threshold}, size_budget {config.size_budget}. Possible: other limits, or leave it out."
        )
    if threshold or not prefixes[0].size > budget:
        return now
    less = _needed(now, size, budget)
    return min(now, replace(less, distance=score(less.options)), key=lambda found: found.distance)


def _prefixes(ranked: Sequence[Sensitivity], size: Callable[[Sequence[Option]], float], budget: float) -> list[_Prefix]:
    """None of the candidates, the first, the first two, ... as far as the budget asks for them; without those that it
    does not allow.
    """
    limited = budget < math.inf
    found = [_Prefix([], size=size([]) if limited else math.nan)]
    for candidate in ranked:
        now = found[-1]
        then = _Prefix([*now.found, candidate])
        if limited:
            then.size = size(then.options)
            if then.size <= now.size <= budget:
                break
            if then.size > max(now.size, budget):
                continue
        found.append(then)
    return found


def _within(prefixes: Sequence[_Prefix], limits: Mapping[int | None, float], speed: bool, score: Score) -> _Prefix:
    """The longest prefix whose distance the threshold allows ("speed"), or the shortest that reaches it ("quality").

    Args:
        prefixes: All.
        limits: How many samples -> the threshold on them, the fewest first: these tell about where to look.
        speed: Which of the two.
        score: The distance.
    """
    end: int | None = None
    for count, limit in limits.items():

        def ends(index: int, count: int | None = count, limit: float = limit) -> bool:
            return (score(prefixes[index].options, count) > limit) == speed

        end = _first(len(prefixes), ends, end)
    assert end is not None
    return prefixes[max(0, end - 1) if speed else min(end, len(prefixes) - 1)]


def _limits(prefixes: Sequence[_Prefix], config: AutoMixprecisionConfig, score: Score) -> dict[int | None, float]:
    """How many samples, None for all -> the threshold on them.

    On few it lies as far between the distances of none and of all candidates as it does on all samples.
    """
    few, threshold = _few(config), config.metric_threshold or 0.0
    if few is None:
        return {None: threshold}
    (start, end), (few_start, few_end) = (
        (score(prefixes[0].options, count), score(prefixes[-1].options, count)) for count in (None, few)
    )
    moved = few_start + (threshold - start) * (few_end - few_start) / (end - start) if end != start else math.nan
    return ({few: moved} if math.isfinite(moved) else {}) | {None: threshold}


def _first(count: int, ends: Callable[[int], bool], guess: int | None = None) -> int:
    """The first index at which something ends, `count` if at none: by halving, around a guess if there is one."""
    low, high = 0, count
    if guess is not None and guess < count:
        # Away from the guess by 1, 2, 4, ... until the end is passed.
        down, step = ends(guess), 1
        low, high = (0, guess) if down else (guess + 1, count)
        while low < high:
            probe = max(low, high - step) if down else min(high - 1, low + step - 1)
            ended, step = ends(probe), 2 * step
            low, high = (low, probe) if ended else (probe + 1, high)
            if ended != down:
                break
    return bisect_left(range(count), True, low, high, key=ends)


def _exchanged(
    now: _Prefix, prefixes: Sequence[_Prefix], limits: Mapping[int | None, float], speed: bool, score: Score
) -> _Prefix:
    """With some of the candidates after the first that is too much ("speed"), or without some before the last, while
    the threshold holds: the order is near to that of what they do together, and not the same.

    Args:
        now: The choice so far.
        prefixes: All.
        limits: How many samples -> the threshold on them, the fewest first: what these refuse is measured on no more.
        speed: Which of the two.
        score: The distance.
    """
    tried = prefixes[-1].found[len(now.found) + 1 :] if speed else now.found[-2::-1]
    (few, least), (every, limit) = next(iter(limits.items())), list(limits.items())[-1]
    chain = [now]
    for found in tried[: _EXCHANGES * len(limits)]:
        before = chain[-1].found
        other = _Prefix([*before, found] if speed else [one for one in before if one is not found])
        if other.found and score(other.options, few) <= least:
            chain.append(other)
    # As far along the chain as all samples allow.
    end = _first(len(chain), lambda index: index > 0 and score(chain[index].options, every) > limit, len(chain) - 1)
    return chain[end - 1]


def _needed(now: _Prefix, size: Callable[[Sequence[Option]], float], budget: float) -> _Prefix:
    """Without the candidates that those after them made needless, the most sensitive first."""
    for found in reversed(now.found):
        rest = [other for other in now.found if other is not found]
        smaller = _Prefix(rest, now.distance, size([other.option for other in rest]))
        now = smaller if smaller.size <= budget else now
    return now


def _require_limits(now: _Prefix, config: AutoMixprecisionConfig, budget: float) -> None:
    """Raise ConfigError where a limit does not hold."""
    if now.size > budget:
        raise ConfigError(
            f"AutoMixprecisionConfig.size_budget={config.size_budget}: {now.size:.0f} bytes of weights, not "
            f"{budget:.0f}, with {len(now.found)} candidates changed (metric_threshold {config.metric_threshold})."
        )
    if config.metric_threshold and now.distance > config.metric_threshold:
        raise ConfigError(
            f"AutoMixprecisionConfig.metric_threshold={config.metric_threshold} is not reached: the distance is "
            f"{now.distance:.6g} with {len(now.found)} candidates changed."
        )
