"""GPTQ, GPTAQ, Qronos and coordinate descent against independent formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import solve_triangular

from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import compute_qparams, elementwise, fake_quantize, quantize_elements, range_of
from quark.core.scales import qparams_from_range
from quark.core.schemes import SCHEMES
from quark.core.solvers import gptq, importance
from quark.core.solvers.columns import triangles
from quark.core.solvers.importance import weighted_qparams
from quark.core.solvers.kept_share import freedom, kept_share
from quark.core.solvers.refine import refine
from quark.core.spec import ScaleType, TensorSpec, spec
from quark.errors import CalibrationError, ConfigError

ROWS, COLUMNS, TOKENS = 12, 24, 200


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W (rows, columns), X (columns, tokens) with correlated channels, and what really arrives, X~."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(COLUMNS, COLUMNS)) * (1 + 3 * random.random(COLUMNS))[:, None]
    x = mixing @ random.normal(size=(COLUMNS, TOKENS))
    return random.normal(size=(ROWS, COLUMNS)), x, x + 0.3 * random.normal(size=x.shape) + 0.2 * np.roll(x, 1, 0)


def grid_of(weight: np.ndarray, rule: TensorSpec, order: np.ndarray | None = None) -> gptq.Rounder:
    """Rounds columns on the scales of the float weight."""
    params = compute_qparams(np.float32(weight), rule)
    scale, zero = elementwise(params, rule, weight.shape)
    columns = np.arange(weight.shape[1]) if order is None else order
    return lambda i, work: quantize_elements(
        work[i], scale[:, columns[i]], None if zero is None else zero[:, columns[i]], rule
    )


def textbook(weight: np.ndarray, hessian: np.ndarray, rounder: gptq.Rounder) -> np.ndarray:
    """Optimal brain quantization, as its definition has it: the inverse Hessian of what is left, at every column."""
    work, result = weight.T.copy(), np.zeros_like(weight.T)
    for i in range(len(work)):
        inverse = np.linalg.inv(hessian[i:, i:])
        result[i] = rounder(i, work)
        error = (work[i] - result[i]) / inverse[0, 0]
        work[i:] -= inverse[0][:, None] * error
    return result.T


def loss(weight: np.ndarray, quantized: np.ndarray, x: np.ndarray, real: np.ndarray) -> float:
    return float(((weight @ x - quantized @ real) ** 2).sum())


RULES = [
    spec("int4", PerChannel(0)),
    spec("uint4", PerGroup(-1, 8), symmetric=False),
    spec("int2", PerGroup(-1, 12), symmetric=False),
    spec("int8", PerTensor()),
    spec("fp8_e4m3", PerChannel(0)),
    spec("fp4_e2m1", PerGroup(-1, 8)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gptq_is_optimal_brain_quantization(rule: TensorSpec) -> None:
    weight, x, _ = problem()
    rounder, hessian = grid_of(weight, rule), gptq.damped(x @ x.T, 0.01)
    feedback, _, damp = gptq.factor(x @ x.T, 0.01)
    assert damp == 0.01
    solved = gptq.solve(np.float32(weight.T), np.float32(feedback), rounder).T
    expected = textbook(weight, hessian, rounder)
    # The same codes, but for values within float32 of a tie: at most one such here.
    assert (~np.isclose(solved, expected, rtol=1e-5, atol=1e-6)).sum() <= 1
    plain = fake_quantize(np.float32(weight), compute_qparams(np.float32(weight), rule), rule)
    assert loss(weight, solved, x, x) < 0.8 * loss(weight, plain, x, x)


def test_numpy_and_torch_solve_alike() -> None:
    weight, x, _ = problem()
    feedback, importance, _ = gptq.factor(x @ x.T, 0.01)
    other, _, _ = gptq.factor(torch.from_numpy(x @ x.T), 0.01)
    assert np.allclose(feedback, other.numpy(), rtol=1e-9, atol=1e-12)
    assert np.allclose(feedback * importance @ feedback.T, gptq.damped(x @ x.T, 0.01), rtol=1e-9)
    feedback, other = np.float32(feedback), other.float()
    rounder = grid_of(weight, RULES[0])
    solved = gptq.solve(np.float32(weight.T), feedback, rounder)
    params = compute_qparams(torch.from_numpy(np.float32(weight)), RULES[0])
    scale, zero = elementwise(params, RULES[0], weight.shape)
    assert zero is not None
    again = gptq.solve(
        torch.from_numpy(np.float32(weight.T).copy()),
        other,
        lambda i, work: quantize_elements(work[i], scale[:, i], zero[:, i], RULES[0]),
    )
    assert np.array_equal(solved, again.numpy())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_damping_has_a_share_of_the_mean_and_one_of_each_columns_own_moment(dtype: str) -> None:
    _, x, _ = problem()
    hessian = (x @ x.T).astype(dtype)
    expected = hessian + np.diag(0.01 * np.diag(hessian).mean() + 0.2 * np.diag(hessian))
    assert np.allclose(gptq.damped(hessian, 0.01, own=0.2), expected, rtol=1e-6)
    feedback, importance, _ = gptq.factor(hessian, 0.01, own=0.2)
    assert np.allclose(feedback * importance @ feedback.T, expected, rtol=1e-4)


def test_gptaq_and_qronos_make_up_for_the_drift_of_the_inputs() -> None:
    weight, x, real = problem()
    rounder = grid_of(weight, RULES[1])
    hessian, cross = real @ real.T, real @ x.T
    columns = np.float32(weight.T)
    factored = gptq.factor(hessian, 0.001)[:2]
    feedback = np.float32(factored[0])
    plain = gptq.solve(columns, feedback, rounder).T
    drift = gptq.drift_matrix((x - real) @ real.T, *factored, 1.0)
    gptaq = gptq.solve(columns, feedback, rounder, drift).T
    pull = (cross - hessian) @ columns
    qronos = gptq.solve(columns + gptq.moved_target(pull, *factored), feedback, rounder).T
    assert loss(weight, gptaq, x, real) < 0.9 * loss(weight, plain, x, real)
    assert loss(weight, qronos, x, real) < 0.9 * loss(weight, plain, x, real)
    # Nearly without damping, W' is least squares.
    exact = np.linalg.lstsq(real.T, (weight @ x).T, rcond=None)[0]
    assert np.allclose(columns + gptq.moved_target(pull, *gptq.factor(hessian, 1e-9)[:2]), exact, atol=1e-4)


@pytest.mark.parametrize("tokens", [30, 60, 600])
def test_what_a_regression_on_few_tokens_finds_is_kept_as_far_as_it_holds_on_others(tokens: int) -> None:
    random, columns, rows = np.random.default_rng(tokens), 48, 32
    real = random.normal(size=(rows, columns)) * 0.1

    def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        own = np.random.default_rng(seed)
        x = own.normal(size=(count, columns))
        return x, x @ real.T + own.normal(size=(count, rows))

    (x, drift), (others, drift_there) = drawn(tokens, 1), drawn(20000, 2)
    hessian, damp = x.T @ x / tokens, 1e-4
    feedback, importance, _ = gptq.factor(hessian, damp)
    added = damp * np.diag(hessian).mean()
    free = freedom(feedback, importance, np.full(columns, added))
    exact = np.trace(hessian @ np.linalg.inv(hessian + added * np.eye(columns)))
    assert abs(float(free) - exact) < 0.1 * exact
    pull = np.float32(x.T @ drift / tokens)
    moved = gptq.moved_target(pull, feedback, importance)
    kept = float(kept_share((pull * moved).sum(), (drift**2).sum() / tokens, free, tokens))

    def left(share: float) -> float:
        return float(((drift_there - share * others @ moved) ** 2).sum())

    best = min(left(share) for share in np.linspace(0, 1, 101))
    # At most a twentieth of what remains is lost by not knowing the best share, and nothing is made worse.
    assert left(kept) < 1.05 * best and left(kept) <= 1.001 * left(0.0)


def test_of_noise_little_is_kept_and_of_what_holds_nearly_all() -> None:
    one = np.float64(1.0)
    assert kept_share(0.1 * one, one, 10 * one, 100) == pytest.approx(0.0, abs=1e-9)
    assert kept_share(one, one, 10 * one, 100) == pytest.approx(0.99)
    assert kept_share(one, one, 100 * one, 100) == 0.0
    assert kept_share(0.0 * one, 0.0 * one, 10 * one, 100) == 0.0


def test_the_drift_of_gptaq_is_what_later_columns_can_project_away() -> None:
    """Row i of P F^-1: w_i (x_i - x~_i) written as a combination of the later columns of X~, by least squares."""
    _, x, real = problem()
    feedback, importance, _ = gptq.factor(real @ real.T, 1e-12)
    found = gptq.drift_matrix((x - real) @ real.T, feedback, importance, 1.0) @ np.linalg.inv(feedback)
    for i in (0, 7, COLUMNS - 2):
        expected = np.linalg.lstsq(real[i + 1 :].T, (x - real)[i], rcond=None)[0]
        assert np.allclose(found[i, i + 1 :], expected, atol=1e-6)
        assert not found[i, : i + 1].any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gptaq_and_qronos_are_those_of_their_papers(rule: TensorSpec) -> None:
    """Weights that are moved, from which errors then count: with the inverse of F, and with W'."""
    weight, x, real = problem()
    rounder = grid_of(weight, rule)
    factored = gptq.factor(real @ real.T, 0.01)[:2]
    feedback, columns = np.float32(factored[0]), np.float32(weight.T)
    drift = gptq.drift_matrix((x - real) @ real.T, *factored, 0.5)
    of_paper, moved, expected = drift @ np.linalg.inv(factored[0]), columns * 1.0, np.empty_like(columns)
    found = np.empty_like(columns)
    for j in range(COLUMNS):
        moved[j] += of_paper[:j, j] @ found[:j]
        found[j] = moved[j] + feedback[:j, j] @ (moved[:j] - expected[:j])
        expected[j] = rounder(j, found)
    residual = np.empty_like(columns)
    solved = gptq.solve(columns, feedback, rounder, drift, residual=residual)
    assert np.allclose(residual, feedback.T @ (columns - solved), atol=1e-4)
    # The same codes, but for values within float32 of a tie.
    assert (~np.isclose(solved, expected, rtol=1e-5, atol=1e-6)).mean() < 0.01
    pull = (real @ x.T - real @ real.T) @ columns
    offset = np.float32(gptq.offset_of(pull, *factored))
    assert np.allclose(
        gptq.drawn(columns, gptq.drift_matrix((x - real) @ real.T, *factored, 1.0, whole=True)), offset, atol=1e-5
    )
    target = columns + gptq.moved_target(pull, *factored)
    expected = gptq.solve(target, feedback, rounder)
    solved = gptq.solve(columns, feedback, rounder, offset=offset, residual=residual)
    assert (~np.isclose(solved, expected, rtol=1e-5, atol=1e-6)).mean() < 0.01
    assert np.allclose(residual, feedback.T @ (target - solved), atol=1e-4)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("shape", [(40, 40), (300, 300), (2, 150, 150)], ids=str)
def test_triangles_are_solved_as_scipy_does(shape: tuple[int, ...], wrap: Callable[[np.ndarray], Any]) -> None:
    random, columns = np.random.default_rng(0), shape[-1]
    feedback = np.triu(random.normal(size=shape) / columns, 1) + np.eye(columns)
    right, square = random.normal(size=(*shape[:-1], 7)), random.normal(size=shape)
    upper, lower = (
        np.asarray(solve(wrap(feedback), wrap(right))) for solve in (triangles.solve_upper, triangles.solve_lower)
    )
    other = feedback + 2 * np.eye(columns)
    scaled = np.asarray(triangles.solve_right(wrap(square * 1.0), wrap(other), unit=False))
    beside, above = (
        np.asarray(triangles.solve_right(wrap(square * 1.0), wrap(feedback), way)) for way in (False, True)
    )
    for index in np.ndindex(shape[:-2]):
        f, b, d = feedback[index], right[index], square[index]
        assert np.allclose(upper[index], solve_triangular(f, b), rtol=1e-10, atol=1e-12)
        assert np.allclose(lower[index], solve_triangular(f, b, trans=1), rtol=1e-10, atol=1e-12)
        expected = solve_triangular(f, d.T).T  # Y F^T = D
        assert np.allclose(beside[index], expected, rtol=1e-10, atol=1e-12)
        assert np.allclose(scaled[index], solve_triangular(other[index], d.T).T, rtol=1e-10, atol=1e-12)
        assert np.allclose(above[index], np.triu(expected, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("columns", [40, 700])
def test_the_gradient_of_a_solution_follows_from_what_its_columns_missed(wrap: Any, columns: int) -> None:
    rng = np.random.default_rng(5)
    weight, x = rng.normal(size=(columns, 6)), rng.normal(size=(columns, 900))
    feedback, importance, _ = gptq.factor(wrap(x @ x.T), 0.01)
    target = wrap(np.float32(weight))
    residual = target * 0.0
    solved = gptq.solve(
        target, wrap(np.float32(feedback)), lambda i, work: (work[i] * 4).round() / 4, residual=residual
    )
    assert np.abs(np.asarray(residual)).max() <= 1 / 8 + 1e-6  # half a step
    found = gptq.gradient_of(residual, wrap(np.float32(feedback)), wrap(np.float32(importance)))
    missed, f = weight - np.asarray(solved, np.float64), np.asarray(feedback)
    expected = gptq.damped(x @ x.T, 0.01) @ missed
    # What sums of n terms may miss in float32 (Higham 2002, 3.5), W standing beside its error: n eps |F| d |F^T| |W|.
    bound = np.abs(f) @ (np.asarray(importance)[:, None] * (np.abs(f.T) @ np.abs(weight)))
    assert (np.abs(np.asarray(found) - expected) <= columns * np.finfo(np.float32).eps * bound).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_refining_never_makes_the_objective_larger(rule: TensorSpec) -> None:
    weight, x, _ = problem(3)
    rounder, hessian = grid_of(weight, rule), gptq.damped(x @ x.T, 0.01)
    columns = np.float32(weight.T)

    def objective(quantized: np.ndarray) -> float:
        error = columns - quantized
        return float((error * (hessian @ error)).sum())

    first = gptq.solve(columns, np.float32(gptq.factor(x @ x.T, 0.01)[0]), rounder)
    once = refine(columns, first, hessian, rounder, 1)
    twice = refine(columns, first, hessian, rounder, 2)
    assert objective(twice) <= objective(once) * (1 + 1e-6) <= objective(first) * (1 + 2e-6)
    if rule.dtype.bits < 8:
        assert objective(twice) < 0.99 * objective(first)


def test_scales_are_fitted_by_least_squares_group_after_group() -> None:
    weight, x, _ = problem(4)
    hessian, columns = gptq.damped(x @ x.T, 0.01), np.float32(weight.T)
    first = np.float32(np.round(columns * 2) / 2)
    root, now = np.linalg.cholesky(hessian).T, np.float64(first)
    seen: list[np.ndarray] = []

    def fit(group: int, factor: np.ndarray) -> np.ndarray:
        """Compare with least squares on what the groups before have become; the columns then keep their codes."""
        here = slice(8 * group, 8 * group + 8)
        part = np.zeros_like(now)
        part[here] = now[here]
        rest = columns - (now - part)
        expected = [np.linalg.lstsq((root @ part[:, [r]]), root @ rest[:, r], rcond=None)[0][0] for r in range(ROWS)]
        assert np.allclose(factor, np.clip(expected, 0.5, 2), rtol=1e-4)
        now[here] *= factor
        scales[here] *= factor
        seen.append(factor)
        return factor

    scales = np.ones_like(columns)
    # A grid with one value for each element, what it was first: nothing is rounded to another code.
    result = refine(columns, first, hessian, lambda i, work: first[i] * scales[i], 1, 8, fit)
    assert len(seen) == 3 and np.allclose(result, now, rtol=1e-5)


@pytest.mark.parametrize(("power", "allowed"), [(1, True), (1.5, False)])
def test_what_rounded_products_cost_is_known_before(
    power: float, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a solution whose products are rounded 16 times as coarsely as bfloat16, as that costs 256 times as much:
    what another choice among equal codes gains or loses, half a percent here, is then small beside it.
    F is rounded once for all rows, so what is measured is a mean over few numbers.
    """
    random = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(192, 192, generator=random))[0] * torch.arange(1, 193) ** -float(power)
    hessian, weight = mixing @ mixing.T, torch.randn(192, 400, generator=random)
    order = gptq.importance_order(hessian)
    feedback, importance, _ = gptq.factor(hessian, 1e-3, order)
    feedback, importance = feedback.float(), importance.float()
    damped = torch.as_tensor(gptq.damped(hessian, 1e-3))[order][:, order]

    def lost() -> float:
        error = (weight - gptq.solve(weight, feedback, lambda i, work: work[i].mul(4).round() / 4)).double()
        return float((error * (damped @ error)).sum())

    def coarse(x: torch.Tensor) -> torch.Tensor:
        significand, exponent = torch.frexp(x)
        return torch.ldexp(significand.mul(16).round() / 16, exponent)

    exact, expected, plain = lost(), float(gptq.growth_if_rounded(feedback, importance)), gptq.add_product
    monkeypatch.setattr(gptq, "add_product", lambda to, left, right, *_: plain(to, coarse(left), coarse(right)))
    assert lost() / exact - 1 == pytest.approx(256 * expected, rel=0.5)
    assert (expected <= gptq.ALLOWED) == allowed


@pytest.mark.parametrize(("bits", "allowed"), [(9, True), (3, False)])
def test_the_drift_is_rounded_where_little_of_it_is_lost(
    bits: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(600, 300, generator=random) @ torch.randn(300, 300, generator=random)
    drift, plain = torch.randn(300, 300, generator=random), triangles.add_product
    feedback, importance, _ = gptq.factor(x.T @ x, 0.01)

    def coarse(x: torch.Tensor) -> torch.Tensor:
        significand, exponent = torch.frexp(x)
        return torch.ldexp(significand.mul(2.0**bits).round() / 2**bits, exponent)

    def product(to: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sign: int, rounded: bool) -> None:
        plain(to, *((coarse(left), coarse(right)) if rounded else (left, right)), sign)

    monkeypatch.setattr(triangles, "add_product", product)
    assert gptq.drift_may_round(drift, feedback.float(), importance.float()) is allowed


def test_the_largest_eigenvalue_is_found_from_below() -> None:
    _, x, _ = problem()
    expected = np.linalg.eigvalsh(x @ x.T)[-1]
    assert 0.98 * expected < gptq.largest_eigenvalue(x @ x.T) <= expected * (1 + 1e-9)
    assert gptq.largest_eigenvalue(torch.from_numpy(x @ x.T)) == pytest.approx(gptq.largest_eigenvalue(x @ x.T))


def test_order_by_importance_keeps_groups_together() -> None:
    hessian = np.diag([1.0, 9.0, 2.0, 3.0, 8.0, 7.0])
    assert gptq.importance_order(hessian).tolist() == [1, 4, 5, 3, 2, 0]
    assert gptq.importance_order(hessian, 2).tolist() == [4, 5, 1, 0, 3, 2]
    assert gptq.importance_order(torch.from_numpy(hessian), 3).tolist() == [4, 5, 3, 1, 2, 0]


def test_a_hessian_that_is_not_positive_definite_is_damped_more_then_refused() -> None:
    x = np.ones((6, 3))
    feedback, _, damp = gptq.factor(x @ x.T, 0.01)
    assert damp == 0.01
    assert np.isfinite(feedback).all()
    indefinite = np.diag([1.0, 1.0, 1.0, -0.05])
    assert gptq.factor(indefinite, 0.01)[2] == pytest.approx(0.1)
    with pytest.raises(CalibrationError, match="not positive definite, even with damp_percent=1"):
        gptq.factor(np.diag([1.0, -9.0]), 0.01)
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        gptq.factor(np.full((2, 2), np.nan), 0.01)
    with pytest.raises(ConfigError, match="quantized once more"):
        elementwise(compute_qparams(x, spec("int8")), spec("fp8_e4m3", code_spec=spec("int4")), x.shape)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weighted_scales_never_lose_more_than_the_full_range(rule: TensorSpec) -> None:
    weight, _, _ = problem(1)
    weight = np.float32(weight)
    importance = np.float32(np.random.default_rng(2).random(COLUMNS) ** 4)

    def error(params: object) -> float:
        return float(((fake_quantize(weight, params, rule) - weight) ** 2 * importance).sum())  # type: ignore[arg-type]

    found = weighted_qparams(weight, importance, rule)
    full = error(compute_qparams(weight, rule))
    assert error(found) <= full
    if rule.dtype.bits <= 4:
        assert error(found) < 0.9 * full
        low, high = range_of(weight, rule)
        shares = np.linspace(0.4, 1.0, 61)
        assert error(found) < 1.05 * min(error(qparams_from_range(low * a, high * a, rule)) for a in shares)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "rule",
    [
        spec("int4", PerChannel(0)),
        spec("uint4", PerGroup(-1, 16), symmetric=False),
        spec("fp4_e2m1", PerGroup(-1, 16), scale_type=ScaleType.float8_e8m0fnu),
        SCHEMES["nvfp4"].weight,
    ],
    ids=str,
)
def test_candidates_that_are_tried_at_once_find_the_scales_that_each_alone_finds(
    rule: TensorSpec, wrap: Callable[[np.ndarray], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance, "compiles", lambda _: False)
    monkeypatch.setattr(importance, "part_errors", lambda *_: None)
    random = np.random.default_rng(4)
    weight, weighing = np.float32(random.standard_t(3, (24, 64))), np.float32(random.random((24, 64)) ** 4)
    for weigh in (weighing, weighing[0]):
        together = weighted_qparams(wrap(weight), wrap(weigh), rule)
        with monkeypatch.context() as patch:
            patch.setattr(importance, "SMALL", 0)
            alone = weighted_qparams(wrap(weight), wrap(weigh), rule)
        assert (np.asarray(together.scale) == np.asarray(alone.scale)).all()


@pytest.mark.parametrize(("gain", "taken"), [(1e-7, False), (1e-3, True)])
def test_a_scale_that_gains_only_rounding_is_not_taken(
    gain: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance._Search, "_error", lambda self, a, b: 1 - gain * (a < 1))
    weight = np.float32(problem()[0])
    rule = spec("int4", PerChannel(0))
    found = weighted_qparams(weight, np.ones(COLUMNS, np.float32), rule)
    assert (found.scale != compute_qparams(weight, rule).scale).all() == taken


def wrap_like(x: Any, y: Any) -> Any:
    """X in the type of y."""
    return x.to(y.dtype) if isinstance(x, torch.Tensor) else x.astype(y.dtype)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_problems_of_one_shape_are_solved_at_once_as_each_alone(wrap: Callable[[np.ndarray], Any]) -> None:
    rule = RULES[1]
    parts = [problem(seed) for seed in range(3)]
    damping = [0.01, 0.003, 0.1]

    def solved(some: list[int]) -> list[Any]:
        weight, x, real = (np.stack([parts[i][k] for i in some]) for k in range(3))
        scale, zero = (
            np.stack([elementwise(compute_qparams(np.float32(w), rule), rule, w.shape)[k].T for w in weight])  # type: ignore[union-attr]
            for k in (0, 1)
        )
        squares, cross = real @ real.swapaxes(1, 2), real @ x.swapaxes(1, 2)
        arrays = (np.float32(weight).swapaxes(1, 2).copy(), squares, cross, scale.copy(), zero.copy())
        w, h, c, s, z = (wrap(a if len(some) > 1 else a[0]) for a in arrays)
        damp: Any = [damping[i] for i in some] if len(some) > 1 else damping[some[0]]

        def rounder(i: int, work: Any) -> Any:
            return quantize_elements(work[..., i, :], s[..., i, :], z[..., i, :], rule)

        def fit(group: int, factor: Any) -> Any:
            s[..., 8 * group : 8 * group + 8, :] *= factor[..., None, :]
            return factor

        feedback, importance, _ = gptq.factor(h, damp)
        drift = gptq.drift_matrix(c - h, feedback, importance, 0.5)
        goal = w + gptq.moved_target((c - h) @ wrap_like(w, h), feedback, importance)
        first = gptq.solve(w, wrap_like(feedback, w), rounder, drift)
        refined = refine(goal, first, gptq.damped(h, damp), rounder, 2)
        fitted = refine(goal, refined, gptq.damped(h, damp), rounder, 1, 8, fit)
        found = [feedback, drift, goal, first, refined, fitted]
        return [np.asarray(one) for one in found]

    together = solved([0, 1, 2])
    for index in range(3):
        for whole, alone in zip(together, solved([index]), strict=True):
            assert alone.shape == whole.shape[1:]
            assert np.allclose(whole[index], alone, rtol=1e-5, atol=1e-5)


def test_several_matrices_are_damped_as_asked_or_refused() -> None:
    indefinite = np.stack([np.eye(4), np.diag([1.0, 1.0, 1.0, -0.05])])
    for hessian in (indefinite, torch.from_numpy(indefinite)):
        with pytest.raises(CalibrationError, match=r"not positive definite, even with damp_percent=0\.02"):
            gptq.factor(hessian, [0.01, 0.02])
        feedback, importance, _ = gptq.factor(hessian, [0.01, 0.2])
        assert np.allclose(feedback[0], np.eye(4)) and np.allclose(importance[0], 1.01)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_a_factor_of_many_columns_is_that_of_the_matrix(
    wrap: Callable[[np.ndarray], Any], dtype: type, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq, "FACTOR_BLOCK", 64)
    x = np.random.default_rng(0).normal(size=(301, 400))
    hessian = (x @ x.T / 400).astype(dtype)
    feedback, importance, _ = gptq.factor(wrap(hessian), 0.01)
    assert feedback.dtype == wrap(hessian).dtype
    feedback, importance = np.float64(np.asarray(feedback)), np.float64(np.asarray(importance))
    assert np.allclose(feedback * importance @ feedback.T, gptq.damped(hessian, 0.01), rtol=rtol, atol=rtol)
    assert not np.tril(feedback, -1).any() and np.array_equal(np.diagonal(feedback), np.ones(301))


def test_a_matrix_that_float32_cannot_factor_is_factored_in_float64() -> None:
    """Channels 3000 times stronger than the rest: eps of their squares is as large as the damping."""
    x = np.random.default_rng(0).normal(size=(40, 400))
    assert gptq.factor(np.float32(x @ x.T), 0.01)[0].dtype == np.float32
    x[:8] = 3000 * x[8:16] + x[:8]
    hessian = np.float32(x @ x.T)
    feedback, importance, damp = gptq.factor(hessian, 1e-6)
    assert feedback.dtype == np.float64 and damp == 1e-6
    assert np.allclose(feedback * importance @ feedback.T, gptq.damped(hessian, 1e-6), rtol=1e-9)
