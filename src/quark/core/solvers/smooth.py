"""Scales of input channels and steps of weight groups, from activation statistics.

    y = x W^T    G = X^T X / n, the second moments of the input    loss(E) = tr(E G E^T), the mean of |x E^T|^2

    SmoothQuant   s = max|x|^a / max|W|^(1 - a)                            Xiao et al. 2022 (arXiv:2211.10438)
                  noise = step^2 / 12 |W|^2 + sum_i E x_i^2 |Q(W_i) - W_i|^2       of outputs, W_i read channel i
    AWQ           s = mean|x|^r / sqrt(max s * min s), r = 0, 1/20 ...     Lin et al. 2023 (arXiv:2306.00978)
                  of least loss(Q(W s) / s - W)
    steps         a factor c for the range [min, max] of each group of each row, of least loss(Q_c(W) - W)

G replaces the data exactly: no candidate runs the layer again. The steps of one row depend on each other through G, so
they are found by coordinate descent: group by group, given the errors of all others in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quark.core.array import Array, like, namespace

SMALLEST = 1e-4
"""Floor of an AWQ scale before it is normalised."""

STEPS = 20
"""Candidates between exponent 0 and 1."""

WORTH = 0.95
"""A scale is kept if it brings the loss below this share of what it is without it; less is noise."""

FACTORS = tuple((44 - i) / 40 for i in range(29))
"""Candidates for the factor of a group's range, 1.1 to 0.4."""
ELEMENTS, LEAST_ROWS = 1 << 23, 32
"""Elements of the errors of all candidates that are in memory at once, about, and rows that are done at least."""


def smoothing_scale(act_max: Array, weight_max: Array, alpha: float, floor: float = 1e-3) -> Array:
    """SmoothQuant's scale of each input channel, which divides the activation and multiplies the weight.

    Args:
        act_max: Largest |x| of each channel, (channels,).
        weight_max: Largest |W| of each channel over all layers that read it, (channels,).
        alpha: Share of the difficulty that moves to the weights, 0 to 1.
        floor: Smallest scale. A channel without activations or weights keeps scale 1.
    """
    xp = namespace(act_max)
    dead = (act_max <= 0) | (weight_max <= 0)
    act, weight = xp.where(dead, 1.0, act_max), xp.where(dead, 1.0, weight_max)
    return xp.where(dead, 1.0, xp.clip(act**alpha / weight ** (1 - alpha), floor, None))


def output_noise(step: float, weight_power: Array, error_power: Array, input_power: Array) -> float:
    """Expected squared error of the outputs of quantized layers that read one input.

    Rounding errors of the input are uniform and independent, those of the weights are given.

    Args:
        step: Of the quantized input, one for all channels.
        weight_power: Sum of W^2 over what reads each input channel, (channels,).
        error_power: Sum of (Q(W) - W)^2, likewise.
        input_power: Mean of x^2 of each channel, (channels,).
    """
    return float(step**2 / 12 * weight_power.sum() + (input_power * error_power).sum())


def salience_scale(mean_abs: Array, ratio: float) -> Array:
    """AWQ's scale for one exponent: mean|x|^ratio, its largest and smallest value reciprocal."""
    xp = namespace(mean_abs)
    s = xp.clip(mean_abs**ratio, SMALLEST, None)
    return s / (xp.amax(s) * xp.amin(s)) ** 0.5


def gram_loss(error: Array, gram: Array) -> Array:
    """Mean squared output error of each row, tr(E G E^T) in parts: (out,) for E (out, in) and G (in, in)."""
    return ((error @ gram) * error).sum(-1)


def search(loss: Callable[[int], float], count: int = STEPS) -> int:
    """The index in [0, count) of least loss: every second one, then the neighbours of the best.

    Ends early where the loss has risen for two steps to twice the least.
    """
    losses: dict[int, float] = {}
    rising = 0
    for index in range(0, count, 2):
        losses[index] = loss(index)
        rising = rising + 1 if index and losses[index] > losses[index - 2] else 0
        if rising >= 2 and losses[index] > 2 * min(losses.values()):
            break
    best = min(losses, key=lambda i: losses[i])
    losses |= {i: loss(i) for i in (best - 1, best + 1) if 0 <= i < count}
    return min(losses, key=lambda i: losses[i])


def best_scale(
    weights: Sequence[Array],
    quantizers: Sequence[Callable[[Array], Array]],
    gram: Array,
    mean_abs: Array,
    allowed: Callable[[Array], Array],
) -> Array | None:
    """AWQ's scale for layers that read one input.

    Args:
        weights: (out, in) each, float32; some of the rows are enough.
        quantizers: For each weight, what quantizes and dequantizes it.
        gram: Second moments of the input, (in, in).
        mean_abs: Mean |x| of each channel, (in,).
        allowed: Nearest scale that can be folded away.

    Returns:
        The scale, (in,), or None where none is worth it.
    """

    def loss(index: int) -> float:
        s = allowed(salience_scale(mean_abs, index / STEPS))
        errors = [quantize(w * s) / s - w for w, quantize in zip(weights, quantizers, strict=True)]
        return float(sum(gram_loss(error, gram).sum() for error in errors))

    losses: dict[int, float] = {}
    best = search(lambda i: losses.setdefault(i, loss(i)))
    if best == 0 or losses[best] > WORTH * losses[0]:
        return None
    return allowed(salience_scale(mean_abs, best / STEPS))


def best_steps(
    weight: Array, gram: Array, quantize: Callable[..., Array], groups: int, sweeps: int = 2, rows: int = 0
) -> Array:
    """The factor of the range of each group of each row that leaves the least output error.

    Args:
        weight: (out, in), float32; every row has `groups` groups of equal size.
        gram: Second moments of the input, (in, in).
        quantize: (factors (rows, groups), rows) -> those rows of the weight, quantized with their ranges times factors.
        groups: Groups in a row.
        sweeps: Passes of the coordinate descent.
        rows: Rows done at a time (they are independent); bounds the memory. 0: as many as ELEMENTS allows.

    Returns:
        Factors, (out, groups); 1 is round to nearest. No row has a larger loss than with all factors 1.
    """
    parts = []
    step = rows or max(LEAST_ROWS, ELEMENTS // (weight.shape[1] * len(FACTORS)))
    for start in range(0, len(weight), step):
        part = slice(start, min(start + step, len(weight)))
        parts.append(_descend(weight[part], gram, partial(quantize, rows=part), groups, sweeps))
    return namespace(weight).concatenate(parts)


def _descend(weight: Array, gram: Array, quantize: Callable[[Array], Array], groups: int, sweeps: int) -> Array:
    """Group by group, from what is best alone: of all factors, the one that loses least given the rest of the row."""
    xp, (rows, width) = namespace(weight), weight.shape
    size = width // groups
    row = like(list(range(rows)), weight, "int64")

    def split(x: Array) -> Array:
        """Turn (rows, width) into (groups, rows, size)."""
        return xp.swapaxes(x.reshape(rows, groups, size), 0, 1)

    errors = xp.stack([split(weight)] * len(FACTORS), 1)  # group, factor, row, column of the group
    for index, factor in enumerate(FACTORS):
        errors[:, index] = split(quantize(xp.ones_like(weight[:, :groups]) * factor) - weight)
    columns = [slice(start, start + size) for start in range(0, width, size)]
    # One group after the other: what a step works on stays in the cache.
    alone = [
        gram_loss(of_group.reshape(-1, size), gram[here, here]).reshape(-1, rows)
        for of_group, here in zip(errors, columns, strict=True)
    ]
    chosen = xp.stack([losses.argmin(0) for losses in alone])
    error = xp.concatenate([of_group[best, row] for of_group, best in zip(errors, chosen, strict=True)], -1)
    pulled = error @ gram
    for g in list(range(groups)) * sweeps:
        here = columns[g]
        rest = pulled[:, here] - error[:, here] @ gram[here, here]
        chosen[g] = (alone[g] + 2 * (errors[g] * rest).sum(-1)).argmin(0)
        change = errors[g][chosen[g], row] - error[:, here]
        error[:, here] += change
        pulled += change @ gram[here]
    plain = xp.swapaxes(errors[:, FACTORS.index(1.0)], 0, 1).reshape(rows, width)
    better = (error * pulled).sum(-1) < gram_loss(plain, gram)
    return xp.where(better[:, None], like(FACTORS, weight)[chosen].T, 1.0)
