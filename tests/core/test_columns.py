"""The compiled blocks of the column solvers against the same steps in numpy and torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark.base import native
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup
from quark.core.kernels.element_rule import ElementRule
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.solvers import gptq
from quark.core.solvers.columns import columns
from quark.core.solvers.importance import weighted_qparams
from quark.core.solvers.refine import refine
from quark.core.spec import TensorSpec, spec
from quark.errors import MissingDependencyError
from tests.models import column_rules
from tests.models.column_rules import RULES, all_rules, grid_of

WRAPS = pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
SIZE, ROWS = 48, 600


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where there is no compiler; where there is one, blocks must be compiled, however small they are."""
    try:
        native._command("blocks", "")
    except MissingDependencyError:
        pytest.skip("no compiler")
    assert columns._library() is not None
    monkeypatch.setattr(columns, "WORTH_COMPILING", 1)


def weights(seed: int = 0) -> np.ndarray:
    return column_rules.weights(ROWS, SIZE, seed)


def test_every_type_up_to_16_bits_is_compiled() -> None:
    left_out = {rule.dtype.name for rule in all_rules()} - {rule.dtype.name for rule in RULES}
    assert left_out == {name for name in left_out if DTYPES[name].bits > 16}


@WRAPS
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_codes_are_those_of_the_formulas(rule: TensorSpec, wrap: Callable[[np.ndarray], Any]) -> None:
    weight = weights()
    grid, target = grid_of(weight, rule, wrap), wrap(np.ascontiguousarray(weight.T * np.float32(1.3)))
    missed, result = wrap(np.empty_like(weight.T).copy()), wrap(np.ascontiguousarray(np.empty_like(weight.T)))
    missed = wrap(np.ascontiguousarray(np.asarray(missed)))
    feedback = wrap(np.zeros((SIZE, SIZE), np.float32))
    columns.solve_block(grid, target * 1.0, target, missed, result, feedback, None)
    expected = np.stack([np.asarray(grid(i, target)) for i in range(SIZE)])
    assert np.array_equal(np.asarray(result), expected)
    assert np.array_equal(np.asarray(missed), np.asarray(target) - expected)


@pytest.mark.parametrize("pulled", [False, True])
def test_what_is_carried_is_added_column_by_column(pulled: bool) -> None:
    """In the order that columns.cpp states, each product and sum rounded to float32: equal bits."""
    random, weight = np.random.default_rng(1), weights(1)
    grid = grid_of(weight, RULES[0], np.asarray)
    feedback, pull = np.float32(random.normal(size=(2, SIZE, SIZE)) * 0.1)
    work, target = (np.ascontiguousarray(weight.T) for _ in range(2))
    missed, result = np.empty_like(work), np.empty_like(work)
    columns.solve_block(grid, work, target, missed, result, feedback, pull if pulled else None)
    now, goal = (np.ascontiguousarray(weight.T) for _ in range(2))
    lost, expected = np.empty_like(now), np.empty_like(now)
    for j in range(SIZE):
        for i in range(j):
            now[j] += feedback[i, j] * lost[i]
            if pulled:
                now[j] += pull[i, j] * now[i]
        expected[j] = grid(j, now)
        lost[j] = goal[j] - expected[j]
    assert np.array_equal(result, expected) and np.array_equal(missed, lost)


@WRAPS
@pytest.mark.parametrize("rule", [RULES[0], spec("uint4", PerGroup(-1, 8), symmetric=False)], ids=str)
def test_a_compiled_solution_is_the_other_one_but_for_ties(rule: TensorSpec, wrap: Callable[[np.ndarray], Any]) -> None:
    weight, random = weights(2), np.random.default_rng(2)
    x = random.normal(size=(SIZE, SIZE)) @ random.normal(size=(SIZE, 300))
    hessian = wrap(np.float32(x @ x.T / 300))
    feedback, _, _ = gptq.factor(hessian, 0.01)
    goal, grid = wrap(np.ascontiguousarray(weight.T)), grid_of(weight, rule, wrap)
    feedback = feedback.float() if isinstance(feedback, torch.Tensor) else feedback.astype(np.float32)

    def both(rounder: Any) -> tuple[np.ndarray, np.ndarray]:
        first = gptq.solve(goal, feedback, rounder)
        return np.asarray(first), np.asarray(refine(goal, wrap_copy(first), hessian, rounder, 2))

    def objective(quantized: np.ndarray) -> float:
        error = np.float64(np.asarray(goal)) - quantized
        return float((error * (np.float64(np.asarray(hessian)) @ error)).sum())

    # A plain function has no block: it is called for each column.
    for mine, other in zip(both(grid), both(lambda i, work: grid(i, work)), strict=True):
        rows_alike = (mine == other).all(0).mean()
        assert rows_alike > 0.99
        assert objective(mine) == pytest.approx(objective(other), rel=1e-3)


@pytest.mark.parametrize("rule", [RULES[0]], ids=str)
def test_squares_may_lie_in_memory_either_way(rule: TensorSpec) -> None:
    """As results of triangular solves do."""
    weight, random = weights(7), np.random.default_rng(7)
    goal, grid = torch.from_numpy(np.ascontiguousarray(weight.T)), grid_of(weight, rule, torch.from_numpy)
    feedback, drift = (torch.from_numpy(np.float32(np.triu(random.normal(size=(SIZE, SIZE)), 1) * 0.2)) for _ in "ab")
    expected = gptq.solve(goal, feedback, grid, drift)
    turned = [x.T.contiguous().T for x in (goal, feedback, drift)]
    assert torch.equal(gptq.solve(turned[0], turned[1], grid, turned[2]), expected)
    hessian = feedback @ feedback.T + torch.eye(SIZE)
    again = refine(goal, expected, hessian, grid, 1, gradient=hessian @ (goal - expected))
    gradient = (hessian @ (goal - expected)).T.contiguous().T
    assert torch.equal(refine(goal, expected.T.contiguous().T, hessian, grid, 1, gradient=gradient), again)


def wrap_copy(x: Any) -> Any:
    return x * 1.0


@WRAPS
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.dtype.bits <= 8], ids=str)
def test_the_search_of_scales_counts_the_same_errors(rule: TensorSpec, wrap: Callable[[np.ndarray], Any]) -> None:
    weight, importance = weights(3), np.float32(np.random.default_rng(3).random(SIZE) ** 4)
    params = compute_qparams(weight, rule)
    lost = (np.float64(fake_quantize(weight, params, rule)) - weight) ** 2 * importance
    zero = None if params.zero_point is None else wrap(params.zero_point)
    size = SIZE if isinstance(rule.split, PerChannel) else 8
    arrays = wrap(weight), wrap(importance), wrap(np.ascontiguousarray(params.scale)), zero
    found = columns.part_errors(*arrays, rule, size)
    assert found is not None
    assert np.allclose(np.asarray(found), lost.reshape(-1, size).sum(1).reshape(params.scale.shape), rtol=1e-4, atol=0)
    # The diagonal of second moments has strides, and ONNX layers have a row.
    for same in (wrap(np.diag(importance)).diagonal(), wrap(importance[None])):
        again = columns.part_errors(arrays[0], same, *arrays[2:], rule, size)
        assert again is not None and bool((again == found).all())


@WRAPS
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_errors_of_candidates_are_those_of_fake_quantize(
    rule: TensorSpec, wrap: Callable[[np.ndarray], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "WORTH_CALLING", 1)
    weight = weights(5)
    expected = []
    for factor in (1.0, 0.7, 0.4):
        params = compute_qparams(weight * np.float32(factor), rule)
        expected.append((params, fake_quantize(weight, params, rule) - weight))
    size = SIZE if isinstance(rule.split, PerChannel) else 8
    scale = np.stack([params.scale.reshape(-1) for params, _ in expected], -1)
    zeros = [params.zero_point.reshape(-1) for params, _ in expected if params.zero_point is not None]
    errors = np.empty((scale.shape[0], 3, size), np.float32)
    zero = wrap(np.stack(zeros, -1)) if zeros else None
    columns.candidate_errors(wrap(weight.reshape(-1, size)), wrap(scale), zero, rule, wrap(errors))
    assert (errors == np.stack([error.reshape(-1, size) for _, error in expected], 1)).all()

    other = np.random.default_rng(6).standard_normal((len(scale), size), np.float32)
    wanted = (np.float64(errors) * other[:, None]).sum(-1)
    # A product is off by half a unit of float32, and so is each of `size` sums.
    most = 2.0**-24 * (size + 1) * (np.abs(np.float64(errors)) * np.abs(other[:, None])).sum(-1)
    for library in (columns._library, lambda: None):
        monkeypatch.setattr(columns, "_library", library)
        found = columns.candidate_dots(wrap(weight.reshape(-1, size)), wrap(scale), zero, rule, wrap(other))
        assert (np.abs(np.asarray(found) - wanted) <= most).all()
        found = columns.row_dots(wrap(errors), wrap(np.repeat(other[:, None], 3, 1)))
        assert (np.abs(np.asarray(found) - wanted) <= most).all()


@WRAPS
def test_the_search_finds_the_scales_that_it_finds_without_a_compiler(
    wrap: Callable[[np.ndarray], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, importance = weights(4), np.float32(np.random.default_rng(4).random(SIZE) ** 4)
    rule = spec("uint4", PerGroup(-1, 16), symmetric=False)
    found = weighted_qparams(wrap(weight), wrap(importance), rule)
    monkeypatch.setattr(columns, "_library", lambda: None)
    assert columns.part_errors(wrap(weight), wrap(importance), found.scale, None, rule, 16) is None
    expected = weighted_qparams(wrap(weight), wrap(importance), rule)
    assert (np.asarray(found.scale) == np.asarray(expected.scale)).mean() > 0.999


def test_without_a_compiler_columns_are_solved_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    columns._library.cache_clear()
    grid = grid_of(weights(), RULES[0], np.asarray)
    try:
        assert not columns.compiled_for(grid, grid.scale) and not list(tmp_path.iterdir())
    finally:
        columns._library.cache_clear()


def test_the_rule_has_the_layout_of_the_source() -> None:
    """Eight fields of four bytes, in the order of `struct Grid`."""
    source = Path(columns.__file__).with_name("columns.cpp").read_text()
    body = source[source.index("struct Grid {") : source.index("};")]
    names = [name.strip() for line in body.splitlines()[1:] for name in line.strip(" ;").split(" ", 1)[1].split(",")]
    assert names == [name for name, _ in ElementRule._fields_] and ctypes.sizeof(ElementRule) == 4 * len(names)
