"""Scales of input channels and steps of weight groups, from activation statistics.

    y = x W^T    G = X^T X / n, the second moments of the input    loss(E) = tr(E G E^T), the mean of |x E^T|^2

    SmoothQuant   s = max|x|^a / max|W|^(1 - a)                            Xiao et al. 2022 (arXiv:2211.10438)
                  noise = step^2 / 12 |W|^2 + sum_i E x_i^2 |Q(W_i) - W_i|^2       of outputs, W_i read channel i
    equalizing    s = (E x^2 / |W_i|^2)^(1/4)
    AWQ           s = mean|x|^r / sqrt(max s * min s), r = 0, 1/20 ...     Lin et al. 2023 (arXiv:2306.00978)
                  of least loss(Q(W s) / s - W)
    steps         a factor c for the range [min, max] of each group of each row, of least loss(Q_c(W) - W)

G replaces the data exactly: no candidate runs the layer again. The steps of one row depend on each other through G, so
they are found by coordinate descent: group by group, given the errors of all others in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quark.core.array import Array, chunk_bytes_for, like, namespace, on_cpu
from quark.core.quantize import effective
from quark.core.scales import QParams
from quark.core.solvers.columns.columns import candidate_dots, candidate_errors, row_dots
from quark.core.spec import TensorSpec

SMALLEST = 1e-4
"""Floor of an AWQ scale before it is normalised."""

SPREAD = 1e3
"""Largest equalizing scale, and of the smallest the reciprocal, of channels that are 1 in the mean."""

STEPS = 20
"""Candidates between exponent 0 and 1."""

WORTH = 0.95
"""A scale is kept if it brings the loss below this share of what it is without it; less is noise."""

FACTORS = tuple((44 - i) / 40 for i in range(29))
"""Candidates for the factor of a group's range, 1.1 to 0.4."""
BLOCK = 512
"""Columns of G that are read at once."""
ELEMENTS, LEAST_ROWS = 1 << 22, 32
"""Weights that are done at once, about, and rows that are done at least."""


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


def equalizing_scale(input_power: Array, weight_power: Array) -> Array:
    """The scale of each input channel for which inputs and weights have proportional norms; its geometric mean is 1.

    Args:
        input_power: Mean of x^2 of each channel, (channels,).
        weight_power: Sum of W^2 over what reads each input channel, (channels,).

    Returns:
        (channels,), from 1 / SPREAD to SPREAD. A channel without activations or weights has scale 1.
    """
    xp = namespace(input_power)
    dead = (input_power <= 0) | (weight_power <= 0)
    logs = (xp.log(xp.where(dead, 1.0, input_power)) - xp.log(xp.where(dead, 1.0, weight_power))) / 4
    alive = xp.where(dead, 0.0, 1.0)
    mean = (logs * alive).sum() / xp.clip(alive.sum(), 1.0, None)
    return xp.where(dead, 1.0, xp.clip(xp.exp(logs - mean), 1 / SPREAD, SPREAD))


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
    """Mean squared output error of each row, tr(E G E^T) in parts: (out,) for E (out, in) and G (in, in), symmetric.

    Of G only the upper triangle is read, by blocks of columns: half the work.
    """
    total = namespace(error).zeros_like(error[:, 0])
    for start in range(0, error.shape[-1], BLOCK):
        here, before = slice(start, start + BLOCK), slice(start)
        pulled = error[:, here] @ gram[here, here]
        pulled += 2 * (error[:, before] @ gram[before, here])
        total += (pulled * error[:, here]).sum(-1)
    return total


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


def best_candidate(
    candidate: Callable[[int], Array],
    loss: Callable[[Array], Array],
    count: int,
    worth: float = 1.0,
    plain: Array | None = None,
) -> Array | None:
    """The candidate that `search` finds, if it is worth it.

    Args:
        candidate: Number -> scales, (channels,).
        loss: Scales -> what they lose, one value.
        count: How many candidates there are.
        worth: The share of what is lost without, below which a candidate's loss must be.
        plain: Without: these scales; None: the first candidate.

    Returns:
        The scales, or None where none is worth it. On a device, which would have to be waited for, they are 1 then.
    """
    first = candidate(0)
    if not on_cpu(first):
        return _best_on_device(candidate, loss, count, worth, plain)
    losses: dict[int, float] = {}
    best = search(lambda i: losses.setdefault(i, float(loss(candidate(i)))), count)
    without = losses[0] if plain is None else float(loss(plain))
    return candidate(best) if losses[best] < worth * without else None


def _best_on_device(
    candidate: Callable[[int], Array], loss: Callable[[Array], Array], count: int, worth: float, plain: Array | None
) -> Array:
    """The best candidate without a look at any loss, or scales of 1: every second one is tried, and those that `search`
    would not have reached are left out of the choice.
    """
    tried = [candidate(index) for index in range(count)]
    xp, scales = namespace(tried[0]), namespace(tried[0]).stack(tried)
    losses = xp.stack([loss(s) for s in tried[::2]])
    rises = xp.zeros_like(losses, dtype=xp.bool)
    rises[1:] = losses[1:] > losses[:-1]
    ends = losses > 2 * losses.cummin(0).values
    ends[1:] &= rises[1:] & rises[:-1]
    ends[:1] = False
    reached = ends.cumsum(0) - ends.long() == 0
    middle = 2 * xp.where(reached, losses, xp.inf).argmin()
    near = xp.stack([middle, middle - 1, middle + 1])
    inside = (near >= 0) & (near < count)
    scales = scales.index_select(0, near.clamp(0, count - 1))
    lost = xp.where(inside, xp.stack([loss(one) for one in scales]), xp.inf)
    best = lost.argmin().reshape(1)
    without = losses[0] if plain is None else loss(plain)
    return xp.where(lost.amin() < worth * without, scales.index_select(0, best)[0], 1.0)


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
        The scale, (in,); see `best_candidate`.
    """

    def candidate(index: int) -> Array:
        return allowed(salience_scale(mean_abs, index / STEPS))

    def loss(s: Array) -> Array:
        errors = [quantize(w * s) / s - w for w, quantize in zip(weights, quantizers, strict=True)]
        return sum(gram_loss(error, gram).sum() for error in errors)

    return best_candidate(candidate, loss, STEPS, WORTH)


def best_steps(
    weight: Array,
    gram: Array,
    params: Callable[..., QParams],
    spec: TensorSpec,
    groups: int,
    sweeps: int = 3,
    rows: int = 0,
) -> Array:
    """The factor of the range of each group of each row that leaves the least output error.

    Args:
        weight: (out, in), float32; every row has `groups` groups of equal size.
        gram: Second moments of the input, (in, in).
        params: (factors (rows, groups), rows) -> scales of those rows of the weight, their ranges times factors.
        spec: What the weight is quantized to; one scale for each group of each row.
        groups: Groups in a row.
        sweeps: Passes of the coordinate descent, from the first group to the last and back by turns.
        rows: Rows done at a time (they are independent); bounds the memory. 0: as many as ELEMENTS allows.

    Returns:
        Factors, (out, groups); 1 is round to nearest. No row has a larger loss than with all factors 1.
    """
    parts = []
    step = rows or max(LEAST_ROWS, ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, min(start + step, len(weight)))
        candidates = _Candidates(weight[part], partial(params, rows=part), spec, groups)
        parts.append(_descend(candidates, gram, sweeps))
    return namespace(weight).concatenate(parts)


class _Candidates:
    """The losses of some rows of a weight under each factor. Errors are made where they are read, a few rows at once:
    making them again costs less than fetching them from memory.

    Attributes:
        groups, rows, width: Groups in a row, rows, columns.
        columns: The columns of each group.
        weight: (groups, rows, columns of a group).
        scale, zero: (groups, rows, factors).
        step: Rows whose errors are made at once.
        buffers: Two arrays for their errors, (2, step, factors, columns of a group).
    """

    def __init__(self, weight: Array, params: Callable[[Array], QParams], spec: TensorSpec, groups: int) -> None:
        xp = namespace(weight)
        self.groups, (self.rows, self.width), self.spec = groups, weight.shape, spec
        size = self.width // groups
        self.columns = [slice(start, start + size) for start in range(0, self.width, size)]
        self.weight = xp.stack([weight[:, here] for here in self.columns])
        ones = xp.ones_like(weight[:, :groups])
        made = [effective(params(ones * factor), spec) for factor in FACTORS]
        zeros = [each.zero_point for each in made if each.zero_point is not None]
        # Contiguous: (groups, rows, factors).
        self.scale = xp.stack([each.scale.reshape(-1, groups).T for each in made], -1)
        self.zero = xp.stack([zero.reshape(-1, groups).T for zero in zeros], -1) if zeros else None
        # Two buffers that stay in the cache: new memory for each step would cost more than what is computed in it.
        self.step = min(self.rows, max(LEAST_ROWS, chunk_bytes_for(weight) // (16 * size)))
        errors = xp.stack([self.weight[0, : self.step]] * len(FACTORS), 1)
        self.buffers = xp.stack([errors, errors])
        self._row = like(list(range(self.rows)), weight, "int64")

    def losses(self, group: int, gram: Array) -> Array:
        """Of every factor, as if all other groups were exact: (rows, factors)."""
        weight, scale, zero = self._of_group(group)
        parts = []
        for start in range(0, self.rows, self.step):
            rows = slice(start, min(start + self.step, self.rows))
            error, work = self.buffers[:, : rows.stop - start]
            candidate_errors(weight[rows], scale[rows], None if zero is None else zero[rows], self.spec, error)
            flat, out = (x.reshape(-1, gram.shape[0]) for x in (error, work))
            namespace(gram).matmul(flat, gram, out=out)
            parts.append(row_dots(error, work))
        return namespace(weight).concatenate(parts)

    def dots(self, group: int, other: Array) -> Array:
        """The errors of every factor times other, (rows, columns of the group): (rows, factors)."""
        return candidate_dots(*self._of_group(group), self.spec, other)

    def errors(self, chosen: Array, group: int) -> Array:
        """Q(W) - W of one group under the factors chosen, (rows,): (rows, columns of the group)."""
        scale, zero = (None if x is None else x[group][self._row, chosen][:, None] for x in (self.scale, self.zero))
        error = namespace(scale).zeros_like(self.weight[group])
        candidate_errors(self.weight[group], scale, zero, self.spec, error[:, None])
        return error

    def taken(self, of_factors: Array, chosen: Array) -> Array:
        """Of each row of (rows, factors), the entry of the factor chosen."""
        return of_factors[self._row, chosen]

    def _of_group(self, group: int) -> tuple[Array, Array, Array | None]:
        """Weights, scales and zero points of one group."""
        return self.weight[group], self.scale[group], None if self.zero is None else self.zero[group]


def _descend(candidates: _Candidates, gram: Array, sweeps: int) -> Array:
    """Group by group, from what is best alone: of all factors, the one that loses least given the rest of the row.

    How the groups that a sweep has passed pull at a group is summed on the way, and is what the next sweep, which comes
    back, has before it: each sweep costs half a product with G.
    """
    xp, columns = namespace(gram), candidates.columns
    alone = [candidates.losses(g, gram[here, here]) for g, here in enumerate(columns)]

    def start(chosen: Sequence[Array]) -> tuple[Array, Array]:
        """The errors, and how the groups ahead pull at each before the first sweep."""
        error = xp.concatenate([candidates.errors(best, g) for g, best in enumerate(chosen)], -1)
        pulled = xp.empty_like(error)
        for here in columns:
            pulled[:, here] = _product(error, gram, here, slice(here.stop, None))
        return error, pulled

    def loss(chosen: Sequence[Array], error: Array, pulled: Array) -> Array:
        """E G E^T of each row; every pair of groups pulls at each other once."""
        own = sum(candidates.taken(losses, best) for losses, best in zip(alone, chosen, strict=True))
        return own + 2 * (pulled * error).sum(-1)

    plain = [xp.full_like(losses.argmin(-1), FACTORS.index(1.0)) for losses in alone]
    without = loss(plain, *start(plain))
    chosen = [losses.argmin(-1) for losses in alone]
    error, ahead = start(chosen)
    for sweep in range(sweeps):
        passed = xp.empty_like(error)
        for g in reversed(range(candidates.groups)) if sweep % 2 else range(candidates.groups):
            here = columns[g]
            visited = slice(here.stop, None) if sweep % 2 else slice(here.start)
            passed[:, here] = _product(error, gram, here, visited)
            rest = passed[:, here] + ahead[:, here]
            chosen[g] = (alone[g] + 2 * candidates.dots(g, rest)).argmin(-1)
            error[:, here] = candidates.errors(chosen[g], g)
        ahead = passed
    better = loss(chosen, error, ahead) < without
    return xp.where(better[:, None], like(FACTORS, gram)[xp.stack(chosen, -1)], 1.0)


def _product(error: Array, gram: Array, here: slice, others: slice) -> Array:
    """Return the pull of the errors of other columns on these; G is symmetric, and its rows are contiguous."""
    return error[:, others] @ gram[here, others].T
