"""GPTQ, GPTAQ and Qronos: rounding with the error spread over the columns that follow.

    objective   || W X - Q X~ ||^2     X (columns, n): what the float model feeds the layer, X~: what it really gets
    H = X~ X~^T + damp * mean(diag) I + own * diag = F diag(d) F^T, F upper triangular, F_jj = 1

    GPTQ        q_j = quantize(v_j),  v_j = w_j + sum_{i < j} (w_i - q_i) F_ij                        (X = X~)
    GPTAQ       v_j += sum_{i < j} v_i P_ij,  P = alpha * D F^-T d^-1,  D = (X - X~) X~^T
    Qronos      v_j += y_j,  y = d^-1 F^-1 k (X~ X^T - X~ X~^T) W,    which is P^T W with alpha = k
                k: how much of that is learned, and not the noise of few tokens (`kept_share.py`)

Frantar et al. 2022 (arXiv:2210.17323), Li et al. 2025 (arXiv:2504.02692), Zhang et al. 2025 (arXiv:2505.11695).
The papers write GPTQ with U, of H^-1 = U^T U: e_i = (v_i - q_i) / U_ii, v_j -= e_i U_ij. Then W - Q = e U, so
(W - Q) U^-1 = e, which is the line above: no inverse is needed (Chee et al. 2023, arXiv:2307.13304).
Li et al. write GPTAQ with P F^-1, which moves the weight w_i that errors count from, too; Qronos is GPTQ of the moved
weight W' = W + F^-T y, with k = 1 the best float weight for X~. Both cost a triangular solution more than the lines
above, which are the same: (w'_i - q_i) F_ij = (w_i - q_i) F_ij + (w'_i - w_i) F_ij, and the latter add up to y_j.
Rows of W are independent given H, so all layers that read the same input are solved at once with one factor. Work is
split in halves: what the left half leaves over reaches the right half as one matrix product. Arrays hold the *columns*
of W as rows (transposed), so that each step reads contiguous memory.

Problems of one shape (the experts of a mixture) are solved at once: every array may have leading axes, H is then
(..., columns, columns) and W (..., columns, rows), and each step serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quark.base.log import logger
from quark.core.array import (
    Array,
    astype,
    copied_once,
    dtype_name,
    is_torch,
    like,
    minmax,
    namespace,
    on_cpu,
    row_major,
)
from quark.core.checks import read
from quark.core.kernels import products
from quark.core.solvers.columns import triangles
from quark.core.solvers.columns.block_solvers import alignment, block_solver, grid_of_block
from quark.core.solvers.columns.halves import add_product, in_halves
from quark.errors import CalibrationError

Rounder = Callable[[int, Array], Array]
"""(i, work) -> the quantized values of column i, given the columns as they are now, shape (..., columns, rows)."""

_Damping = float | Sequence[float] | Array
"""Share of the mean of the diagonal: one number, or one for each matrix; an array stays on its device."""

Share = Callable[[Sequence[Array], Callable[[int], object]], None]
"""(parts, fill) -> fill(i) for each i, of which each fills parts[i] in place and needs no other part; in any order, and
each by one process, which gives its parts to the others.
"""


def fill_alone(parts: Sequence[Array], fill: Callable[[int], object]) -> None:
    """A `Share` of one process."""
    for index in range(len(parts)):
        fill(index)


_LADDER = (1.0, 10.0, 100.0)
"""Factors on the damping that are tried in turn when the Hessian is not positive definite."""

ROWS = 64
"""Rows of a layer by which its error is told: of 4096 they cost a hundredth of what finding H does."""

FACTOR_BLOCK = 512
"""Columns of a triangle that is factored at once."""

_GRADIENT_BLOCK = 64
"""Columns whose gradient is found at once where products are rounded; elsewhere FACTOR_BLOCK: fewer launches."""

_ROUNDED_PRODUCT = 2 * 2.0**-16 / 3 * 0.541
"""Mean square of the relative error of a product of two numbers that are rounded to bfloat16: a rounding is off by up
to 2^-8 of 1, evenly, of a significand m; the mean of 1 / m^2 is 0.541."""

ALLOWED = 5e-4
"""Share of what a solution loses that rounded products may add to it."""

OF_FEW = 0.25
"""Share of the median of the diagonal that is added, at least, for each column to a token; see `_least_damping`. Half
is no better for language models, and worse where the tokens have few directions."""

PROBES, SLIGHT = 8, 0.01
"""A factor is exact if it misses less than SLIGHT of the damping, measured with so many vectors: then it is the factor
of a problem whose damping is that much another one."""


def damped(
    hessian: Array, damp: _Damping, dtype: str = "float64", order: Array | None = None, own: float = 0.0
) -> Array:
    """A copy of H with `added_to` its diagonal.

    Args:
        hessian: Shape (..., columns, columns).
        damp: One number, or one for each matrix.
        dtype: Of the result.
        order: Of the rows and columns of the result, (columns,); None: as they are.
        own: Share of its own diagonal that each column gets, too.
    """
    if order is not None:
        hessian = _ordered(hessian, order, dtype)
    else:
        hessian = astype(hessian, dtype) if dtype_name(hessian) != dtype else hessian * 1.0
    diagonal = _diagonal(hessian)
    diagonal += added_to(diagonal, damp, own)
    return hessian


def added_to(diagonal: Array, damp: _Damping, own: float = 0.0) -> Array:
    """The damping of each column: `damp` times the mean, and a share of its own; a channel that was always 0 gets 1.

    Args:
        diagonal: Of H, (..., columns).
        damp: One number, or one for each matrix.
        own: Share of its own diagonal that each column gets.
    """
    # A number is not copied to a device, which would wait.
    share = float(damp) if isinstance(damp, float) else like(damp, diagonal, dtype_name(diagonal))[..., None]
    added = share * diagonal.mean(-1, keepdims=True) + own * diagonal
    return namespace(diagonal).where(diagonal == 0, 1.0, added)


def _least_damping(diagonal: Array, tokens: int) -> Array:
    """Share of the mean of the diagonal below which what few tokens say of H is taken for what all others do.

        damp >= OF_FEW columns / tokens * min(1, median(diag H) / mean(diag H))

    The noise in the eigenvalues of H falls with tokens / columns, and those below it are told wrongly: a solution that
    trusts them loses on other tokens what it wins on these. With next to no tokens it comes near to plain rounding.
    The noise is that of the many channels; the mean is that of the few large ones, where there are such.

    Args:
        diagonal: Of H, (..., columns).
        tokens: That H was found of.

    Returns:
        One for each matrix, where the diagonal is.
    """
    xp, columns = namespace(diagonal), diagonal.shape[-1]
    mean = diagonal.mean(-1)
    median = xp.sort(diagonal, -1)
    median = (median.values if is_torch(diagonal) else median)[..., columns // 2]
    share = xp.where(mean > 0, median / xp.where(mean > 0, mean, 1.0), 1.0)
    return OF_FEW * columns / max(1, tokens) * xp.clip(share, 0.0, 1.0)


def damping_at_least(given: float | Array, diagonal: Array, tokens: int) -> float | Array:
    """A damping that is asked for, or `_least_damping` where that is more; a number where nothing has to be found.

    Args:
        given: Share of the mean of the diagonal, for all matrices or for each.
        diagonal, tokens: As `_least_damping` takes them.
    """
    if isinstance(given, (int, float)) and given >= OF_FEW * diagonal.shape[-1] / max(1, tokens):
        return given
    return namespace(diagonal).clip(_least_damping(diagonal, tokens), given, None)


def _ordered(matrix: Array, order: Array, dtype: str) -> Array:
    """A copy with rows and columns in another order, some rows at a time: no third matrix is made on the way."""
    result = like([], matrix, dtype).reshape(0)
    result = namespace(matrix).empty_like(matrix, dtype=result.dtype)
    for start in range(0, len(order), FACTOR_BLOCK):
        here = slice(start, start + FACTOR_BLOCK)
        rows = matrix[order[here]]
        result[here] = rows.index_select(1, order) if is_torch(matrix) else rows[:, order]
    return result


def factor(
    hessian: Array, damp: _Damping, order: Array | None = None, share: Share = fill_alone, own: float = 0.0
) -> tuple[Array, Array, _Damping]:
    """F, d and the damping that it took: H + damping = F diag(d) F^T, F upper triangular with ones on its diagonal.

    d_j is the importance of column j: what a unit of error in it costs when the columns after it make up for it.

    In float32 where that solves the same problem: what it misses of the matrix is then below SLIGHT of the damping, as
    measured. Else in float64.

    Args:
        hessian: X X^T in any scale, shape (..., columns, columns).
        damp: Share of the mean of the diagonal that is added to it; one number, or one for each matrix.
        order: Of the columns, in which they are factored, (columns,), for one matrix; None: as they are.
        share: Who finds which rows.
        own: As `damped` takes it.

    Raises:
        CalibrationError: H holds NaN or Inf, or is not positive definite even with 100 times the damping. Of several
            matrices, one is not with the damping as it is: each alone may be with more.
    """
    xp = namespace(hessian)
    if dtype_name(hessian) == "float32":
        with np.errstate(invalid="ignore", over="ignore"):
            single = _factor_in(hessian, damp, "float32", order, share, own)
            exact = bool(read(_is_exact(single, hessian, damp, order, own))[0])  # the one wait, where float32 is enough
        if exact:  # which nothing is that holds NaN or Inf
            return *_pivots_apart(single), damp
        del single
    low, high = minmax(hessian, range(hessian.ndim))
    if not bool(xp.isfinite(low).all() & xp.isfinite(high).all()):
        raise CalibrationError("The second moments of the inputs hold NaN or Inf.")
    logger.debug("A factor of %d channels needs float64.", hessian.shape[-1])
    ladder = _LADDER if hessian.ndim == 2 else _LADDER[:1]
    for times in ladder:
        tried = damp if times == 1 else times * _largest(damp)
        found = _factor_in(hessian, tried, "float64", order, share, own)
        if bool(xp.isfinite(_diagonal(found)).all()):
            return *_pivots_apart(found), tried
    raise CalibrationError(
        f"The second moments of the inputs ({hessian.shape[-1]} channels) are not positive definite, even with "
        f"damp_percent={_largest(damp) * ladder[-1]:g}. Possible: a larger damp_percent, or more calibration data."
    )


def _largest(damp: _Damping) -> float:
    return float(like(damp, np.empty(0)).max()) if isinstance(damp, (float, Sequence)) else float(damp.max())


def _factor_in(hessian: Array, damp: _Damping, dtype: str, order: Array | None, share: Share, own: float) -> Array:
    """R; NaN on its diagonal where the damped matrix is not positive definite in that precision."""
    matrix = damped(hessian, damp, dtype, order, own)
    _factor_in_place(matrix, share)
    return matrix


def _cholesky(matrix: Array) -> Array:
    """The lower factor; NaN where there is none, which torch is not asked for: a device would be waited for."""
    xp = namespace(matrix)
    if is_torch(matrix):
        lower, failed = xp.linalg.cholesky_ex(matrix)
        return lower * xp.where(failed == 0, 1.0, xp.nan)[..., None, None]
    try:
        return xp.linalg.cholesky(matrix)
    except xp.linalg.LinAlgError:
        return xp.full_like(matrix, xp.nan)


def _factor_in_place(matrix: Array, share: Share) -> None:
    """Turn H into R, block after block from the last: R_22 of H_22, R_12 = H_12 R_22^-T, then H_11 - R_12 R_12^T.

    Rows of R_12 need no others, and are found some at a time, who ever finds them.
    """
    xp, size = namespace(matrix), matrix.shape[-1]
    if size <= FACTOR_BLOCK or not is_torch(matrix):
        # R of a matrix is the Cholesky factor of the flipped one, flipped.
        whole = xp.triu(matrix) + _transposed(xp.triu(matrix, 1))
        matrix[...] = xp.flip(_cholesky(xp.flip(whole, (-2, -1))), (-2, -1))
        return
    half = size // 2
    first, last = slice(half), slice(half, size)
    _factor_in_place(matrix[..., last, last], share)
    side, known = matrix[..., first, last], matrix[..., last, last]
    some = [slice(start, min(start + FACTOR_BLOCK, half)) for start in range(0, half, FACTOR_BLOCK)]
    solved = [side[..., rows, :] for rows in some] if on_cpu(matrix) else [side]  # a GPU is slow at small parts
    share(solved, lambda index: triangles.solve_right(solved[index], known, unit=False))
    totals = [matrix[..., rows, rows.start : half] for rows in some]  # the upper half of a symmetric product

    def subtract(index: int) -> None:
        start = some[index].start
        add_product(totals[index], side[..., some[index], :], _transposed(side[..., start:half, :]), -1)

    share(totals, subtract)
    matrix[..., last, first] = 0.0
    _factor_in_place(matrix[..., first, first], share)


def _is_exact(factor: Array, hessian: Array, damp: _Damping, order: Array | None, own: float) -> Array:
    """Return True where R R^T differs from H + damping by less than SLIGHT of the damping, on vectors of random
    signs; one bool where the arrays are.
    """
    columns = hessian.shape[-1]
    probes = copied_once(
        ("signs", columns), lambda: np.random.default_rng(0).choice([-1.0, 1.0], (columns, PROBES)), hessian
    )
    added = added_to(_diagonal(hessian), damp, own)[..., None]
    wanted = hessian @ probes + added * probes
    if order is not None:
        probes, wanted = probes[order], wanted[order]
    # Few columns times a matrix that lies the other way round take BLAS ten times as long.
    lost = factor @ _transposed(_transposed(probes) @ factor) - wanted
    return ((lost * lost).mean(-1).mean(-1) < (SLIGHT * added[..., 0].mean(-1)) ** 2).all()


def _pivots_apart(factor: Array) -> tuple[Array, Array]:
    """F and d of R, in its place."""
    pivots = _diagonal(factor) * 1.0
    factor /= pivots[..., None, :]
    return factor, pivots * pivots


def drift_matrix(
    drift: Array, feedback: Array, importance: Array, alpha: float, whole: bool = False, rounded: bool = False
) -> Array:
    """GPTAQ's P = alpha * D F^-T d^-1 from D = (X - X~) X~^T, shape (..., columns, columns), float32.

    Args:
        drift: D, in the order of F; overwritten where it is of the dtype of F. What is below its diagonal is only read
            for P whole.
        feedback, importance: F and d.
        alpha: Factor on the result.
        whole: Whether what is not above the diagonal is found too, which `drawn` needs and `solve` does not; else 0.
        rounded: Whether the solution may round what it multiplies to bfloat16; see `drift_may_round`.
    """
    found = triangles.solve_right(row_major(astype(drift, dtype_name(feedback))), feedback, not whole, rounded)
    found *= alpha / importance[..., None, :]
    return astype(found, "float32")


def drift_may_round(drift: Array, feedback: Array, importance: Array) -> bool:
    """Return True where `drift_matrix` and its factors may round to bfloat16: of some rows of P, above the diagonal and
    in the measure in which errors of columns count, at most ALLOWED is then lost.

    Args:
        drift: D of one problem, (columns, columns), in the order of F, of torch; not changed.
        feedback, importance: F and d, float32.
    """
    rows = namespace(drift).arange(len(drift), device=drift.device)[some_rows(len(drift))]
    above = rows[:, None] < namespace(drift).arange(len(drift), device=drift.device)
    exact, rounded = (triangles.solve_right(drift[rows] * above, feedback, rounded=way) for way in (False, True))
    lost, all_of_it = (((x * x) * above / importance).sum() for x in (rounded - exact, exact))
    return bool(lost <= ALLOWED * all_of_it)


def drawn(weight: Array, drift: Array, rounded: bool = False) -> Array:
    """P^T W, shape (..., columns, rows): y of Qronos' weight, from P whole.

    Args:
        weight: Transposed, in the order of P.
        drift: P of `drift_matrix`, whole.
        rounded: Whether operands may be rounded to bfloat16.
    """
    found = namespace(weight).zeros_like(weight)
    add_product(found, _transposed(drift), weight, 1, rounded)
    return found


def offset_of(pull: Array, feedback: Array, importance: Array, rounded: bool = False) -> Array:
    """Qronos' y = d^-1 F^-1 pull, shape (..., columns, rows), in the order of F and of its dtype: F^T (W' - W).

    Args:
        pull: (X~ X^T - H) W, in the order of F.
        feedback, importance: F and d.
        rounded: Whether the solution may round what it multiplies to bfloat16.
    """
    found = triangles.solve_upper(feedback, astype(pull, dtype_name(feedback)), rounded)
    found /= importance[..., None]
    return found


def moved_target(pull: Array, feedback: Array, importance: Array) -> Array:
    """(H + damping)^-1 pull, shape (..., columns, rows), in the order of F: how far Qronos' W' is from W.

        W' = W + (H + damping)^-1 (X~ X^T - H) W

    W' is the float weight for X~ that comes nearest to W X; damping pulls it towards W where the data says little.
    """
    return astype(triangles.solve_lower(feedback, offset_of(pull, feedback, importance)), "float32")


def may_round(feedback: Array, importance: Array) -> bool:
    """Return True where products in `solve` may round their factors to bfloat16, on a machine where that is faster: a
    solution then loses at most ALLOWED more, of each matrix.

    Args:
        feedback, importance: F and d, float32.
    """
    return products.serves(feedback) and bool((growth_if_rounded(feedback, importance) <= ALLOWED).all())


def growth_if_rounded(feedback: Array, importance: Array) -> Array:
    """The share by which what a solution loses grows where products in `solve` round what they multiply to bfloat16.

        v_j is off by  sum_i (w_i - q_i) F_ij eps_ij,  so the share is
        <eps^2> sum_i H_ii e_i^2 / sum_j d_j r_j^2,     e = W - Q = F^-T r,  H_ii = sum_j F_ij^2 d_j

    r, by how much columns are off when they are rounded, is like noise: PROBES vectors of random signs stand for it.

    Args:
        feedback, importance: F and d, of torch.

    Returns:
        One for each matrix, where the arrays are.
    """
    xp, columns = namespace(feedback), feedback.shape[-1]
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (columns, PROBES))
    probes = like(signs, feedback, dtype_name(feedback)).expand(*feedback.shape[:-1], PROBES)
    errors = xp.linalg.solve_triangular(_transposed(feedback), probes, upper=False)
    errors = (errors * errors).mean(-1)
    lost = xp.zeros_like(importance[..., 0])
    for start in range(0, columns, FACTOR_BLOCK):
        rows = feedback[..., start : start + FACTOR_BLOCK, :]
        diagonal = ((rows * rows) @ importance[..., None])[..., 0]
        lost += (diagonal * errors[..., start : start + FACTOR_BLOCK]).sum(-1)
    return _ROUNDED_PRODUCT * lost / importance.sum(-1)


def solve(
    weight: Array,
    feedback: Array,
    rounder: Rounder,
    drift: Array | None = None,
    align: int = 1,
    residual: Array | None = None,
    rounded: bool = False,
    offset: Array | None = None,
    drift_rounded: bool = False,
) -> Array:
    """Quantize all columns, each with the errors of those before it made up for.

    Args:
        weight: W transposed, shape (..., columns, rows), float32; not changed.
        feedback: F of `factor`, in the same order of columns; float32.
        rounder: Quantizes one column.
        drift: `drift_matrix`, for GPTAQ. What is not above its diagonal is not read.
        align: Groups whose scale the rounder finds at their first column: multiples of this are not split.
        residual: Filled with F^T (W' - Q), without drift what each column was off when it was rounded.
        rounded: Whether what is carried over may be rounded; see `may_round`.
        offset: `offset_of`, for Qronos: it solves for W' = W + F^-T offset.
        drift_rounded: Whether what the drift adds may be rounded; see `drift_may_round`.

    Returns:
        The quantized values, shape (..., columns, rows), float32.
    """
    # A triangular solve of torch gives its result with the axes the other way round.
    xp, weight, feedback = namespace(weight), row_major(weight), row_major(feedback)
    drift = None if drift is None else row_major(drift)
    work, missed, result = weight * 1.0, xp.empty_like(weight), xp.empty_like(weight)
    if offset is not None:
        work += offset
    # Columns are moved by the drift and by errors; where the residual is asked for, it tells one from the other.
    moved = work
    if drift is not None and residual is not None:
        moved = residual
        moved[...] = 0.0
    blocks = block_solver(rounder, weight)

    def step(start: int, stop: int) -> None:
        here = slice(start, stop)
        grid = grid_of_block(rounder, start, stop, work)
        now, goal, lost, solved = (x[..., here, :] for x in (work, weight, missed, result))
        own, pull = feedback[..., here, here], None if drift is None else drift[..., here, here]
        if moved is work:
            blocks.solve(grid, now, goal, lost, solved, own, pull)
            return
        of_errors = now - goal
        now += moved[..., here, :]
        blocks.solve(grid, now, goal, lost, solved, own, pull)
        add_product(of_errors, _transposed(own), lost)
        moved[..., here, :] = of_errors

    def carry(start: int, middle: int, stop: int) -> None:
        left, right = slice(start, middle), slice(middle, stop)
        add_product(work[..., right, :], _transposed(feedback[..., left, right]), missed[..., left, :], 1, rounded)
        if drift is not None:
            sides = _transposed(drift[..., left, right])
            add_product(moved[..., right, :], sides, work[..., left, :], 1, drift_rounded)

    align = align if align > 1 else alignment(blocks, rounder)
    in_halves(0, weight.shape[-2], step, carry, align, blocks.most if align == 1 else min(blocks.most, align))
    if residual is not None and moved is work:
        residual[...] = work  # columns keep what they were when they were rounded
        residual -= result
    return result


def gradient_of(residual: Array, feedback: Array, importance: Array, rounded: bool = False) -> Array:
    """(H + damping) (W - Q) = F d F^T (W - Q) from the residual of `solve`, in the order of F.

    Half the work of the product itself, as F is a triangle, and without its cancellation: the residual of a column is
    at most half a step, while W - Q is what F spread of all before.

    Args:
        residual: F^T (W - Q), shape (..., columns, rows); overwritten.
        feedback, importance: F and d.
        rounded: Whether the operands may be rounded to bfloat16. The gradient is then off by less than a hundredth of a
            step: of column i by <eps^2> sum_j F_ij^2 d_j^2 r_j^2 / H_ii^2 <= <eps^2> max(d) / H_ii of r^2.
    """
    residual *= importance[..., None]

    def step(start: int, stop: int) -> None:
        here = slice(start, stop)
        residual[..., here, :] = feedback[..., here, here] @ residual[..., here, :]

    def carry(start: int, middle: int, stop: int) -> None:  # from the right half, which is not changed before
        left, right = slice(start, middle), slice(middle, stop)
        add_product(residual[..., left, :], feedback[..., left, right], residual[..., right, :], 1, rounded)

    in_halves(0, residual.shape[-2], step, carry, most=_GRADIENT_BLOCK if rounded else FACTOR_BLOCK)
    return residual


def _diagonal(matrix: Array) -> Array:
    """A view that may be written."""
    return matrix.diagonal(0, -2, -1) if is_torch(matrix) else np.einsum("...ii->...i", matrix)


def _transposed(matrix: Array) -> Array:
    return namespace(matrix).swapaxes(matrix, -1, -2)


def largest_eigenvalue(hessian: Array, steps: int = 30) -> Array:
    """The largest eigenvalue of a symmetric non-negative matrix, by power iteration; from below. One number, where the
    matrix is: no step waits for a device.
    """
    xp = namespace(hessian)
    vector = xp.diagonal(hessian) * 1.0 + 1e-30
    for _ in range(steps):
        vector = hessian @ (vector / xp.linalg.norm(vector))
    return xp.linalg.norm(vector)


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


# What is lost. -------------------------------------------------------------------------------------------------------


def some_rows(count: int) -> slice:
    """The rows of a layer of `count` rows that `output_error` looks at: at most `ROWS`, evenly spread."""
    return slice(0, None, -(-count // ROWS) or 1)


def output_error(goal: Array, rounded: Array, gram: Array) -> Array:
    """The share of a layer's output that each rounding loses; 0 where the layer gives nothing but 0. They stay where
    the arrays are.

        ||X (W - Q)||^2 / ||X W||^2 = sum_r (w_r - q_r) H (w_r - q_r)^T / sum_r w_r H w_r^T,   H = X^T X

    Args:
        goal: Rows of the weight that would lose nothing, shape (rows, columns).
        rounded: The same rows as they are rounded, in one way or more, shape (ways, rows, columns).
        gram: H, shape (columns, columns), in any unit.

    Returns:
        Shape (ways,).
    """
    goal, rounded, gram = (astype(x, "float32") for x in (goal, rounded, gram))
    xp = namespace(goal)
    both = xp.concatenate([goal[None], goal - rounded])
    flat = both.reshape(-1, both.shape[-1])
    pushed = xp.zeros_like(flat)  # by one product for all: H is read once
    add_product(pushed, flat, gram, rounded=products.serves(gram))
    sums = (pushed.reshape(both.shape) * both).sum(-1).sum(-1)
    return xp.where(sums[0] > 0, sums[1:] / xp.where(sums[0] > 0, sums[0], 1.0), 0.0)
