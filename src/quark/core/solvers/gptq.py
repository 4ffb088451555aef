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
"""

from __future__ import annotations

from collections.abc import Callable

from quark.core.array import Array, astype, is_torch, namespace
from quark.errors import CalibrationError

Rounder = Callable[[int, Array], Array]
"""(i, work) -> the quantized values of column i, given the columns as they are now, shape (columns, rows)."""

LADDER = (1.0, 10.0, 100.0)
"""Factors on the damping that are tried in turn when the Hessian is not positive definite."""


def damped(hessian: Array, damp: float) -> Array:
    """H in float64 with `damp` times the mean of its diagonal added; a channel that was always 0 counts as 1."""
    xp = namespace(hessian)
    hessian = astype(hessian, "float64") * 1.0
    diagonal = xp.diagonal(hessian)
    added = xp.where(diagonal == 0, 1.0, damp * diagonal.mean())
    hessian[range(len(hessian)), range(len(hessian))] += added
    return hessian


def inverse_factor(hessian: Array, damp: float) -> tuple[Array, float]:
    """U with (H + damping)^-1 = U^T U, and the damping that it took.

    Args:
        hessian: X X^T in any scale, shape (columns, columns).
        damp: Share of the mean of the diagonal that is added to it.

    Raises:
        CalibrationError: H holds NaN or Inf, or is not positive definite even with 100 times the damping.
    """
    xp = namespace(hessian)
    if not bool(xp.isfinite(hessian).all()):
        raise CalibrationError("The second moments of the inputs hold NaN or Inf.")
    for factor in LADDER:
        try:
            # H = R R^T with R upper triangular is the Cholesky factor of the flipped matrix, flipped; U = R^-1.
            lower = xp.linalg.cholesky(xp.flip(damped(hessian, damp * factor), (0, 1)))
        except xp.linalg.LinAlgError:
            continue
        upper = xp.flip(lower, (0, 1))
        del lower  # a matrix in float64 less
        return _inverse_upper(upper), damp * factor
    raise CalibrationError(
        f"The second moments of the inputs ({len(hessian)} channels) are not positive definite, even with "
        f"damp_percent={damp * LADDER[-1]:g}. Possible: a larger damp_percent, or more calibration data."
    )


def _inverse_upper(upper: Array) -> Array:
    xp = namespace(upper)
    if is_torch(upper):
        unit = xp.eye(len(upper), dtype=upper.dtype, device=upper.device)
        return xp.linalg.solve_triangular(upper, unit, upper=True, out=unit)
    return xp.triu(xp.linalg.solve(upper, xp.eye(len(upper))))


def drift_matrix(drift: Array, upper: Array, alpha: float) -> Array:
    """GPTAQ's P from D = (X - X~) X~^T, shape (columns, columns), in the order of U."""
    xp = namespace(upper)
    return alpha * (xp.triu(astype(drift, "float64") @ upper.T, 1) @ upper)


def best_target(weight: Array, hessian: Array, cross: Array, damp: float) -> Array:
    """Qronos' W', transposed: the float weight for X~ that comes nearest to W X.

    Args:
        weight: W transposed, shape (columns, rows).
        hessian: X~ X~^T.
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
        weight: W transposed, shape (columns, rows), float32; not changed.
        upper: `inverse_factor` of the Hessian in the same order of columns.
        rounder: Quantizes one column.
        drift: `drift_matrix`, for GPTAQ.
        align: Groups whose scale the rounder finds at their first column: multiples of this are not split.

    Returns:
        The quantized values, shape (columns, rows), float32.
    """
    work, error = weight * 1.0, namespace(weight).empty_like(weight)
    result = namespace(weight).empty_like(weight)
    pivots = namespace(upper).diagonal(upper).tolist()
    spread = astype(upper, "float32")
    pull = None if drift is None else astype(drift, "float32")

    def step(i: int) -> None:
        result[i] = rounder(i, work)
        error[i] = (work[i] - result[i]) / pivots[i]

    def carry(start: int, middle: int, stop: int) -> None:
        work[middle:stop] -= spread[start:middle, middle:stop].T @ error[start:middle]
        if pull is not None:
            work[middle:stop] += pull[start:middle, middle:stop].T @ work[start:middle]

    _in_halves(0, len(weight), step, carry, align)
    return result


def refine(weight: Array, quantized: Array, hessian: Array, rounder: Rounder, passes: int) -> Array:
    """Coordinate descent on (W - Q) H (W - Q)^T from a first solution: each column is rounded again, others fixed.

        q_i <- quantize(q_i + ((W - Q) H)_i / H_ii)

    The best value of a column with all others fixed, so no step makes the objective larger (Behdin et al. 2023,
    arXiv:2309.01885).

    Args:
        weight, quantized: Transposed, shape (columns, rows).
        hessian: Damped H in the same order, shape (columns, columns).
        rounder: Quantizes one column of what it is given.
        passes: How often all columns are visited.
    """
    xp = namespace(weight)
    hessian, result = astype(hessian, "float32"), quantized * 1.0
    diagonal = xp.diagonal(hessian).tolist()
    change = xp.empty_like(result)
    for _ in range(passes):
        gradient = hessian @ (weight - result)

        def step(i: int, gradient: Array = gradient) -> None:
            change[i] = result[i]
            result[i] += gradient[i] / diagonal[i]
            result[i] = rounder(i, result)
            change[i] -= result[i]

        def carry(start: int, middle: int, stop: int, gradient: Array = gradient) -> None:
            gradient[middle:stop] += hessian[middle:stop, start:middle] @ change[start:middle]

        _in_halves(0, len(weight), step, carry)
    return result


def refit(weight: Array, quantized: Array, hessian: Array, groups: Array, count: int) -> Array:
    """Factors on the scales that lose least with the codes as they are: least squares under H, group after group.

        f = 1 + q_g (H E)_g / (q_g H_gg q_g)        E = W - Q, q_g the quantized columns of group g, one f for each row

    Args:
        weight, quantized: Transposed, shape (columns, rows).
        hessian: Damped H in the same order.
        groups: Group of each column, shape (columns,).
        count: Number of groups.

    Returns:
        Shape (rows, count), between 1/2 and 2.
    """
    xp = namespace(weight)
    hessian, result = astype(hessian, "float32"), quantized * 1.0
    factors = []
    for group in range(count):
        columns = groups == group
        part, rows = result[columns], hessian[columns]
        push = (part * (rows @ (weight - result))).sum(0)
        curve = (part * (rows[:, columns] @ part)).sum(0)
        factor = xp.clip(1 + push / xp.where(curve > 0, curve, xp.inf), 0.5, 2.0)
        result[columns] = part * factor
        factors.append(factor)
    return xp.stack(factors, -1)


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
    xp = namespace(hessian)
    diagonal = xp.diagonal(hessian) * 1.0
    if group is None or group >= len(diagonal):
        return _descending(diagonal)
    parts = diagonal.reshape(-1, group)
    inner = _descending(parts)
    outer = _descending(parts.mean(-1))
    return (
        inner + group * xp.arange(len(parts), **({"device": diagonal.device} if is_torch(diagonal) else {}))[:, None]
    )[outer].reshape(-1)


def _descending(x: Array) -> Array:
    return namespace(x).argsort(-x, **({"stable": True} if is_torch(x) else {"kind": "stable"}))
