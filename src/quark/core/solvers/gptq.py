"""GPTQ, GPTAQ and Qronos: rounding with the error spread over the columns that follow.

    objective   || W X - Q X~ ||^2     X (columns, n): what the float model feeds the layer, X~: what it really gets
    H = X~ X~^T + damp * mean(diag) I      H^-1 = U^T U, U upper triangular

    GPTQ        q_i = quantize(w_i),  e_i = (w_i - q_i) / U_ii,  w_j -= e_i U_ij for j > i            (X = X~)
    GPTAQ       ... and w_j += w_i P_ij,  P = alpha * triu(D U^T, 1) U,  D = (X - X~) X~^T
    Qronos      W' = (H)^-1 X~ X^T W first, which is the best float weight for X~; then GPTQ of W'

Frantar et al. 2022 (arXiv:2210.17323), Li et al. 2025 (arXiv:2504.02692), Zhang et al. 2025 (arXiv:2505.11695).
Rows of W are independent given H, so all layers that read the same input are solved at once with one factor. Work is
split in halves: what the left half leaves over reaches the right half as one matrix product. Arrays hold the *columns*
of W as rows (transposed), so that each step reads contiguous memory.

Problems of one shape (the experts of a mixture) are solved at once: every array may have leading axes, H is then
(..., columns, columns) and W (..., columns, rows), and each step serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quark.core.array import Array, astype, is_torch, like, namespace
from quark.errors import CalibrationError

Rounder = Callable[[int, Array], Array]
"""(i, work) -> the quantized values of column i, given the columns as they are now, shape (..., columns, rows)."""

LADDER = (1.0, 10.0, 100.0)
"""Factors on the damping that are tried in turn when the Hessian is not positive definite."""


SMALL = 64
"""Columns of a triangle that is inverted at once."""


def damped(hessian: Array, damp: float | Sequence[float]) -> Array:
    """H in float64 with `damp` times the mean of its diagonal added; a channel that was always 0 counts as 1.

    Args:
        hessian: Shape (..., columns, columns).
        damp: One number, or one for each matrix.
    """
    xp = namespace(hessian)
    hessian = astype(hessian, "float64") * 1.0
    diagonal, places = _diagonal(hessian), range(hessian.shape[-1])
    mean = like(damp, hessian, "float64")[..., None] * diagonal.mean(-1, keepdims=True)
    hessian[..., places, places] += xp.where(diagonal == 0, 1.0, mean)
    return hessian


def inverse_factor(hessian: Array, damp: float | Sequence[float]) -> tuple[Array, float | Sequence[float]]:
    """U with (H + damping)^-1 = U^T U, and the damping that it took.

    Args:
        hessian: X X^T in any scale, shape (..., columns, columns).
        damp: Share of the mean of the diagonal that is added to it; one number, or one for each matrix.

    Raises:
        CalibrationError: H holds NaN or Inf, or is not positive definite even with 100 times the damping. Of several
            matrices, one is not with the damping as it is: each alone may be with more.
    """
    xp = namespace(hessian)
    if not bool(xp.isfinite(hessian).all()):
        raise CalibrationError("The second moments of the inputs hold NaN or Inf.")
    ladder = LADDER if hessian.ndim == 2 else LADDER[:1]
    for factor in ladder:
        tried = damp if factor == 1 else factor * float(np.max(damp))
        try:
            # H = R R^T with R upper triangular is the Cholesky factor of the flipped matrix, flipped; U = R^-1.
            lower = xp.linalg.cholesky(xp.flip(damped(hessian, tried), (-2, -1)))
        except xp.linalg.LinAlgError:
            continue
        upper = xp.flip(lower, (-2, -1))
        del lower  # a matrix in float64 less
        return _inverse_upper(upper), tried
    raise CalibrationError(
        f"The second moments of the inputs ({hessian.shape[-1]} channels) are not positive definite, even with "
        f"damp_percent={float(np.max(damp)) * ladder[-1]:g}. Possible: a larger damp_percent, or more calibration data."
    )


def _inverse_upper(upper: Array) -> Array:
    xp = namespace(upper)
    if is_torch(upper):
        unit = xp.zeros_like(upper)
        _diagonal(unit).fill_(1.0)
        return xp.linalg.solve_triangular(upper, unit, upper=True, out=unit)
    size, half = upper.shape[-1], upper.shape[-1] // 2
    if size <= SMALL:
        return xp.triu(xp.linalg.inv(upper))
    # [[A, B], [0, C]]^-1 = [[A^-1, -A^-1 B C^-1], [0, C^-1]]: products, where numpy has no triangular solver.
    inverse = xp.zeros_like(upper)
    inverse[..., :half, :half] = first = _inverse_upper(upper[..., :half, :half])
    inverse[..., half:, half:] = last = _inverse_upper(upper[..., half:, half:])
    inverse[..., :half, half:] = -(first @ upper[..., :half, half:] @ last)
    return inverse


def drift_matrix(drift: Array, upper: Array, alpha: float) -> Array:
    """GPTAQ's P from D = (X - X~) X~^T, shape (..., columns, columns), in the order of U."""
    xp = namespace(upper)
    return alpha * (xp.triu(astype(drift, "float64") @ _transposed(upper), 1) @ upper)


def best_target(weight: Array, hessian: Array, cross: Array, damp: float) -> Array:
    """Qronos' W', transposed: the float weight for X~ that comes nearest to W X.

    Args:
        weight: W transposed, shape (..., columns, rows).
        hessian: X~ X~^T, shape (..., columns, columns).
        cross: X~ X^T, in the same scale.
        damp: Share of the mean of the diagonal that pulls W' towards W where the data says little.
    """
    xp = namespace(hessian)
    matrix = damped(hessian, damp)
    pull = matrix - astype(hessian, "float64")
    return astype(xp.linalg.solve(matrix, (astype(cross, "float64") + pull) @ astype(weight, "float64")), "float32")


def solve(weight: Array, upper: Array, rounder: Rounder, drift: Array | None = None, align: int = 1) -> Array:
    """Quantize all columns, each with the errors of those before it made up for.

    Args:
        weight: W transposed, shape (..., columns, rows), float32; not changed.
        upper: `inverse_factor` of the Hessian in the same order of columns.
        rounder: Quantizes one column.
        drift: `drift_matrix`, for GPTAQ.
        align: Groups whose scale the rounder finds at their first column: multiples of this are not split.

    Returns:
        The quantized values, shape (..., columns, rows), float32.
    """
    work, error = weight * 1.0, namespace(weight).empty_like(weight)
    result = namespace(weight).empty_like(weight)
    pivots, spread = _pivots(upper), astype(upper, "float32")
    pull = None if drift is None else astype(drift, "float32")

    now, rounded, missed = (columns_of(x) for x in (work, result, error))

    def step(i: int) -> None:
        rounded[i][...] = rounder(i, work)
        missed[i][...] = (now[i] - rounded[i]) / pivots[i]

    def carry(start: int, middle: int, stop: int) -> None:
        left, right = slice(start, middle), slice(middle, stop)
        work[..., right, :] -= _transposed(spread[..., left, right]) @ error[..., left, :]
        if pull is not None:
            work[..., right, :] += _transposed(pull[..., left, right]) @ work[..., left, :]

    _in_halves(0, weight.shape[-2], step, carry, align)
    return result


def refine(weight: Array, quantized: Array, hessian: Array, rounder: Rounder, passes: int) -> Array:
    """Coordinate descent on (W - Q) H (W - Q)^T from a first solution: each column is rounded again, others fixed.

        q_i <- quantize(q_i + ((W - Q) H)_i / H_ii)

    The best value of a column with all others fixed, so no step makes the objective larger (Behdin et al. 2023,
    arXiv:2309.01885).

    Args:
        weight, quantized: Transposed, shape (..., columns, rows).
        hessian: Damped H in the same order, shape (..., columns, columns).
        rounder: Quantizes one column of what it is given.
        passes: How often all columns are visited.
    """
    xp = namespace(weight)
    hessian, result = astype(hessian, "float32"), quantized * 1.0
    pivots, change = _pivots(hessian), xp.empty_like(result)
    now, changed = columns_of(result), columns_of(change)
    for _ in range(passes):
        gradient = hessian @ (weight - result)
        slopes = columns_of(gradient)

        def step(i: int, slopes: list[Array] = slopes) -> None:
            changed[i][...] = now[i]
            now[i] += slopes[i] / pivots[i]
            now[i][...] = rounder(i, result)
            changed[i] -= now[i]

        def carry(start: int, middle: int, stop: int, gradient: Array = gradient) -> None:
            left, right = slice(start, middle), slice(middle, stop)
            gradient[..., right, :] += hessian[..., right, left] @ change[..., left, :]

        _in_halves(0, weight.shape[-2], step, carry)
    return result


def refit(weight: Array, quantized: Array, hessian: Array, groups: Array, count: int) -> Array:
    """Factors on the scales that lose least with the codes as they are: least squares under H, group after group.

        f = 1 + q_g (H E)_g / (q_g H_gg q_g)        E = W - Q, q_g the quantized columns of group g, one f for each row

    Args:
        weight, quantized: Transposed, shape (..., columns, rows).
        hessian: Damped H in the same order.
        groups: Group of each column, shape (..., columns); groups are as large in all problems.
        count: Number of groups.

    Returns:
        Shape (..., rows, count), between 1/2 and 2.
    """
    xp = namespace(weight)
    hessian, result = astype(hessian, "float32"), quantized * 1.0
    (*lead, length, rows), factors = weight.shape, []
    for group in range(count):
        columns = groups == group
        part, sides = result[columns].reshape(*lead, -1, rows), hessian[columns].reshape(*lead, -1, length)
        push = (part * (sides @ (weight - result))).sum(-2)
        corner = _transposed(sides)[columns].reshape(*lead, -1, part.shape[-2])
        curve = (part * (_transposed(corner) @ part)).sum(-2)
        factor = xp.clip(1 + push / xp.where(curve > 0, curve, xp.inf), 0.5, 2.0)
        result[columns] = (part * factor[..., None, :]).reshape(-1, rows)
        factors.append(factor)
    return xp.stack(factors, -1)


def columns_of(x: Array) -> list[Array]:
    """Views of the columns of x, shape (..., columns, rows), which holds them as rows."""
    return list(namespace(x).moveaxis(x, -2, 0))


def _diagonal(matrix: Array) -> Array:
    return namespace(matrix).diagonal(matrix, 0, -2, -1)


def _transposed(matrix: Array) -> Array:
    return namespace(matrix).swapaxes(matrix, -1, -2)


def _pivots(matrix: Array) -> list[Array]:
    """The elements of the diagonal, float32, each to be divided by: shape (..., 1)."""
    return list(namespace(matrix).moveaxis(astype(_diagonal(matrix), "float32"), -1, 0)[..., None])


def _in_halves(
    start: int, stop: int, step: Callable[[int], None], carry: Callable[[int, int, int], None], align: int = 1
) -> None:
    """Step through columns; between the left and the right half of every range, `carry` what the left one changed."""
    if stop - start <= 1:
        if stop > start:
            step(start)
        return
    middle = _middle(start, stop, align)
    _in_halves(start, middle, step, carry, align)
    carry(start, middle, stop)
    _in_halves(middle, stop, step, carry, align)


def _middle(start: int, stop: int, align: int) -> int:
    half = (start + stop) // 2
    aligned = half // align * align
    return aligned if aligned > start else half


def largest_eigenvalue(hessian: Array, steps: int = 30) -> float:
    """The largest eigenvalue of a symmetric non-negative matrix, by power iteration; from below."""
    xp = namespace(hessian)
    vector, value = xp.diagonal(hessian) * 1.0 + 1e-30, 0.0
    for _ in range(steps):
        vector = hessian @ (vector / xp.sqrt((vector * vector).sum()))
        value = float(xp.sqrt((vector * vector).sum()))
    return value


def importance_order(hessian: Array, group: int | None = None) -> Array:
    """Order of the columns, most important (largest diagonal of H) first.

    Args:
        hessian: X X^T.
        group: With a group size, groups stay together: they are ordered by their mean, columns within each.
    """
    diagonal = namespace(hessian).diagonal(hessian) * 1.0
    if group is None or group >= len(diagonal):
        return _descending(diagonal)
    parts = diagonal.reshape(-1, group)
    first_columns = like(range(0, len(diagonal), group), diagonal, "int64")
    columns = first_columns[:, None] + _descending(parts)
    return columns[_descending(parts.mean(-1))].reshape(-1)


def _descending(x: Array) -> Array:
    """Indices that sort the last axis, largest first; equal values keep their order."""
    return (-x).argsort(stable=True) if is_torch(x) else np.argsort(-x, kind="stable")
