"""The ways to solve a block of columns against each other, and against the formulas; what a kernel is trusted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from quark.core.array import namespace
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.kernels import trust
from quark.core.kernels.element_rule import ElementRule
from quark.core.quantize import quantize_elements
from quark.core.rounding import round_to
from quark.core.schemes import SCHEMES
from quark.core.solvers import gptq
from quark.core.solvers.columns import columns, kernels
from quark.core.solvers.columns.block_solvers import SOLVERS, CompiledBlocks, block_solver
from quark.core.solvers.columns.columns import ColumnGrid, has_rule
from quark.core.solvers.columns.kernels import Kernels, is_refined, is_solved
from quark.core.solvers.columns.plain_columns import OneByOne, PlainBlocks, float_table
from quark.core.solvers.refine import refine
from quark.core.spec import TensorSpec, spec
from tests.models import gpu_kernels
from tests.models.column_rules import RULES, grid_of, weights
from tests.models.operations import Operations

ROWS, SIZE, RUN = 20, 16, 8
"""Of the blocks; RUN columns share their scales."""
WRAPS = pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
SOME = [RULES[0], spec("uint4", PerGroup(-1, 8), symmetric=False), spec("fp4_e2m1", PerGroup(-1, 8))]


class Block:
    """A block of columns that feed back into each other, and its squares."""

    def __init__(self, rule: TensorSpec, wrap: Callable[[np.ndarray], Any], size: int = SIZE, shared: int = 1) -> None:
        random, weight = np.random.default_rng(3), weights(ROWS, size)
        self.grid = grid_of(weight, rule, wrap, shared)
        self.weight = wrap(np.ascontiguousarray(weight.T * np.float32(1.3)))
        inputs = random.normal(size=(size, 3 * size)) * 4.0 ** random.integers(-1, 2, (size, 1))
        self.hessian = wrap(np.float32(inputs @ inputs.T))
        self.feedback = wrap(np.float32(np.triu(random.normal(size=(size, size)) * 0.3, 1) + np.eye(size)))
        self.pull = wrap(np.float32(np.triu(random.normal(size=(size, size)) * 0.1, 1)))
        self.slope = wrap(np.float32(random.normal(size=(size, ROWS)) * weight.T))

    def solved(self, solver: Any, pulled: bool = False, feedback: Any = None) -> list[Any]:
        """Work, target, missed, result."""
        arrays = [self.weight * 1.0, self.weight * 1.0, self.weight * 0.0, self.weight * 0.0]
        feedback = self.feedback if feedback is None else feedback
        solver.solve(self.grid, *arrays, feedback, self.pull if pulled else None)
        return arrays

    def refined(self, solver: Any, start: Any) -> list[Any]:
        """Result, gradient, change."""
        arrays = [start * 1.0, self.slope * 1.0, start * 0.0]
        solver.refine(self.grid, *arrays, self.hessian)
        return arrays


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    """The kernels, interpreted."""
    pytest.importorskip("triton", reason="there are wheels for Linux alone")
    with gpu_kernels.interpreted(gpu_kernels.COLUMNS) as module:
        yield module


@pytest.fixture
def on_a_device(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Within: tensors count as those of a GPU, whose kernels are interpreted."""
    monkeypatch.setattr(kernels, "device_of", lambda x: "interpreter" if isinstance(x, torch.Tensor) else None)
    monkeypatch.setattr(kernels, "kernel_module", lambda name: interpreted)
    monkeypatch.setattr(columns, "_library", lambda: None)
    return interpreted


def needs_compiler() -> None:
    if columns._library() is None:
        pytest.skip("no compiler")


# The forms. ----------------------------------------------------------------------------------------------------------


class Direct:
    """The kernels without the check."""

    def __init__(self, module: ModuleType) -> None:
        self.solve, self.refine = module.solve_block, module.refine_block


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_kernels_give_the_bits_of_the_compiled_code(rule: TensorSpec, interpreted: ModuleType) -> None:
    needs_compiler()
    block, kernel, compiled = Block(rule, torch.from_numpy, RUN), Direct(interpreted), CompiledBlocks()
    mine, other = block.solved(kernel, pulled=True), block.solved(compiled, pulled=True)
    assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))
    mine, other = block.refined(kernel, mine[-1]), block.refined(compiled, other[-1])
    assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


@pytest.mark.slow
def test_kernels_solve_several_problems_and_rows_that_fill_no_program(interpreted: ModuleType) -> None:
    """Each problem as alone, and nothing beyond the rows and columns of a view is written."""
    block, kernel = Block(SOME[1], torch.from_numpy, RUN), Direct(interpreted)
    first = block.solved(kernel, pulled=True)
    grid = ColumnGrid(block.grid.spec, *(torch.stack([x] * 2) for x in (block.grid.scale, block.grid.zero)))
    whole = [torch.full((2, 12, 40), 7.0) for _ in range(4)]
    views = [x[:, 1 : 1 + RUN, 3 : 3 + ROWS] for x in whole]
    for view in views[:2]:
        view.copy_(block.weight)
    kernel.solve(grid, *views, torch.stack([block.feedback] * 2), torch.stack([block.pull] * 2))
    for view, expected, all_of_it in zip(views, first, whole, strict=True):
        assert all(torch.equal(one, expected) for one in view)
        assert int((all_of_it != 7).sum()) == int((view != 7).sum())
    start = torch.stack([first[-1]] * 2)
    again = [start * 1.0, torch.stack([block.slope] * 2), start * 0.0]
    kernel.refine(grid, *again, torch.stack([block.hessian] * 2))
    for several, one in zip(again, block.refined(kernel, first[-1]), strict=True):
        assert all(torch.equal(x, one) for x in several)


@WRAPS
@pytest.mark.parametrize("shared", [1, RUN])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_plain_codes_are_those_of_the_formulas(
    rule: TensorSpec, shared: int, wrap: Callable[[np.ndarray], Any]
) -> None:
    """Without feedback each value is rounded as it came."""
    block = Block(rule, wrap, RUN, shared)
    expected = quantize_elements(block.weight, block.grid.scale, block.grid.zero, rule)
    work, _, missed, result = block.solved(PlainBlocks(), feedback=wrap(np.eye(RUN, dtype=np.float32)))
    assert bool((result == expected).all()) and bool((missed == block.weight - expected).all())
    # In units of a scale and back, v is rounded twice more.
    assert bool((abs(work - block.weight) <= 2.0**-22 * abs(block.weight) + _smallest_zero(block)).all())


def _smallest_zero(block: Block) -> Any:
    """What a float zero point, which is added in units of the scale and taken away, rounds away of a value."""
    zero = block.grid.zero
    return 0.0 if zero is None or not block.grid.spec.float_zero_point else 2.0**-23 * abs(zero * block.grid.scale)


@WRAPS
@pytest.mark.parametrize("shared", [1, RUN])
@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_plain_columns_are_rounded_from_what_those_before_leave(
    rule: TensorSpec, pulled: bool, shared: int, wrap: Callable[[np.ndarray], Any]
) -> None:
    """Every code is that of v = w + F^T (t - q) + P^T v in float64, or of a v as near to it as float32 sums are."""
    block = Block(rule, wrap, RUN, shared)
    work, target, missed, result = (np.float64(x) for x in block.solved(PlainBlocks(), pulled))
    weight, feedback = np.float64(block.weight), np.triu(np.float64(block.feedback), 1)
    exact, size = weight + feedback.T @ missed, abs(weight) + abs(feedback.T) @ (abs(target) + abs(result))
    if pulled:
        pull = np.float64(block.pull)
        exact, size = exact + pull.T @ work, size + abs(pull.T) @ abs(work)
    assert (missed == np.float32(target) - np.float32(result)).all()
    # n products in each of three sums, and what `enter` rounds; a float zero point is one more term.
    size += 0.0 if block.grid.zero is None else abs(np.float64(block.grid.zero) * np.float64(block.grid.scale))
    assert_nearest(block, exact, result, (3 * RUN + 6) * kernels.UNIT * size)


@WRAPS
@pytest.mark.parametrize("shared", [1, RUN])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_plain_columns_are_visited_again_from_their_gradient(
    rule: TensorSpec, shared: int, wrap: Callable[[np.ndarray], Any]
) -> None:
    block = Block(rule, wrap, RUN, shared)
    start = quantize_elements(block.weight, block.grid.scale, block.grid.zero, rule)
    result, _, change = (np.float64(x) for x in block.refined(PlainBlocks(), start))
    before, slope, hessian = (np.float64(x) for x in (start, block.slope, block.hessian))
    own, sides = np.diag(hessian)[:, None], np.tril(hessian, -1)
    exact = before + (slope + sides @ change) / own
    size = abs(before) + (abs(slope) + abs(sides) @ (abs(before) + abs(result))) / own
    size += 0.0 if block.grid.zero is None else abs(np.float64(block.grid.zero) * np.float64(block.grid.scale))
    assert (change == np.float32(start) - np.float32(result)).all()
    assert_nearest(block, exact, result, (3 * RUN + 8) * kernels.UNIT * size)


def assert_nearest(block: Block, exact: np.ndarray, result: np.ndarray, by: np.ndarray) -> None:
    """Every value is the rounding of something within `by` of the exact one."""
    grid = block.grid
    scale, zero = (None if x is None else np.asarray(x) for x in (grid.scale, grid.zero))
    below, above = (quantize_elements(np.float32(exact + e), scale, zero, grid.spec) for e in (-by, by))
    assert (below <= result).all() and (result <= above).all()


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.is_float and dtype.ebits < 8])
def test_the_table_of_a_float_type_rounds_as_the_formula_does(name: str) -> None:
    """At all values and ties, the numbers beside them, and beyond; zeros but -0 keep their sign."""
    dtype = DTYPES[name]
    values, bounds = float_table(dtype)
    finite = values[:-1]
    ties = (finite[1:] + finite[:-1]) / 2
    points = np.concatenate([finite, ties, np.float32([1e-45, -1e-45, 1e38, -1e38, np.inf, -np.inf, np.nan])])
    points = np.concatenate([np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)] + [points])
    found, expected = values[np.searchsorted(bounds, points)], round_to(points, dtype)
    assert np.array_equal(found, expected, equal_nan=True)
    signed = (points != 0) & ~np.isnan(points)
    assert dtype.min == 0 or (np.signbit(found) == np.signbit(expected))[signed].all()
    assert len(bounds) == len(values) - 1


@WRAPS
@pytest.mark.parametrize("rule", SOME, ids=str)
def test_plain_experts_are_solved_at_once_as_each_alone(rule: TensorSpec, wrap: Callable[[np.ndarray], Any]) -> None:
    block = Block(rule, wrap, RUN, RUN)
    stack = namespace(block.weight).stack
    zero = None if block.grid.zero is None else stack([block.grid.zero] * 2)
    several = Block(rule, wrap, RUN, RUN)
    several.grid = ColumnGrid(rule, stack([block.grid.scale] * 2), zero, RUN)
    for name in ("weight", "feedback", "hessian", "slope"):
        setattr(several, name, stack([getattr(block, name)] * 2))
    for both, one in zip(several.solved(PlainBlocks()), block.solved(PlainBlocks()), strict=True):
        assert np.allclose(np.asarray(both[1]), np.asarray(one), rtol=1e-5, atol=0)


# Which is taken. -----------------------------------------------------------------------------------------------------


def test_what_solves_a_block_follows_from_arrays_and_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, wide = Block(SOME[0], torch.from_numpy).grid, torch.zeros(columns.WORTH_COMPILING, 4)
    if columns._library() is not None:
        assert isinstance(block_solver(grid, wide), CompiledBlocks)
    assert isinstance(block_solver(grid, wide[:8]), PlainBlocks)
    assert isinstance(block_solver(lambda index, work: work[index], wide), OneByOne)
    no_rule = ColumnGrid(spec("int32", PerGroup(-1, 8)), grid.scale, grid.zero)
    assert isinstance(block_solver(no_rule, wide), OneByOne)
    monkeypatch.setattr(kernels, "device_of", lambda x: "a device")
    monkeypatch.setattr(kernels, "kernel_module", lambda name: object())
    assert isinstance(block_solver(grid, wide[:8]), Kernels) and isinstance(block_solver(no_rule, wide), OneByOne)
    assert not isinstance(block_solver(grid, wide[:8].double()), Kernels)


def test_no_array_of_the_cpu_is_on_a_device() -> None:
    assert kernels.device_of(np.zeros(2)) is None and kernels.device_of(torch.zeros(2)) is None


# What a kernel is trusted for. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize("rule", SOME, ids=str)
def test_a_kernel_that_is_right_passes_once(rule: TensorSpec, pulled: bool, on_a_device: ModuleType) -> None:
    block, solver = Block(rule, torch.from_numpy, RUN), Kernels()
    start = block.solved(solver, pulled)[-1]
    block.refined(solver, start)
    assert len(solver.trust.passed) == 2 and not solver.trust.refused
    assert {(device, key[-1]) for device, key in solver.trust.passed} == {("interpreter", bytes(ElementRule.of(rule)))}  # type: ignore[arg-type]
    again = [start * 1.0, start * 0.0, start * 0.0]  # what has passed is not looked at again
    solver._run("refine", block.grid, "refine", again, [block.hessian], lambda _: pytest.fail("looked"))


def damaged(module: ModuleType, harm: Callable[[list[torch.Tensor]], object]) -> Any:
    """The kernels, and then what harms what they wrote."""

    def run(kernel: Callable[..., None], arrays: int) -> Callable[..., None]:
        def run_and_harm(grid: ColumnGrid, *args: Any) -> None:
            kernel(grid, *args)
            harm(list(args[:arrays]))

        return run_and_harm

    broken: Any = ModuleType("broken")
    broken.solve_block, broken.refine_block = run(module.solve_block, 4), run(module.refine_block, 3)
    return broken


def off_by_a_code(arrays: list[torch.Tensor]) -> None:
    """One value of the result is the next code, and what follows from it is right."""
    arrays[-1 if len(arrays) == 4 else 0][3, 5] *= 1.5


def off_by_a_sum(arrays: list[torch.Tensor]) -> None:
    """What was rounded is off by more than a sum in float32 may be."""
    arrays[0 if len(arrays) == 4 else 1][-1] *= 1 + 2.0**-12


def fails(arrays: list[torch.Tensor]) -> None:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("harm", [off_by_a_code, off_by_a_sum, fails])
@pytest.mark.parametrize("first", ["solve", "refine"])
def test_a_kernel_that_is_broken_is_not_used(
    harm: Any, first: str, on_a_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, solver, said = Block(SOME[1], torch.from_numpy, RUN), Kernels(), []
    monkeypatch.setattr(kernels, "kernel_module", lambda name: damaged(on_a_device, harm))
    monkeypatch.setattr(trust.logger, "warning", lambda text, *values: said.append(text % values))
    start = quantize_elements(block.weight, block.grid.scale, block.grid.zero, SOME[1])

    def run(one: Any) -> list[torch.Tensor]:
        return block.solved(one) if first == "solve" else block.refined(one, start)

    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(run(solver), run(PlainBlocks()), strict=True))
    assert len(said) == 1 and "is not used on interpreter" in said[0] and not solver.trust.passed
    assert not solver.takes(block.grid, block.weight)


def test_the_check_takes_what_the_compiled_code_finds() -> None:
    """Of a block as wide as they come, in float32 sums of its order."""
    needs_compiler()
    block, compiled = Block(SOME[1], torch.from_numpy, 128), CompiledBlocks()
    for pulled in (False, True):
        arrays = block.solved(compiled, pulled)
        pull = block.pull if pulled else None
        assert bool(is_solved(block.grid, block.weight, *arrays, block.feedback, pull))
    again = block.refined(compiled, arrays[-1])
    assert bool(is_refined(block.grid, arrays[-1], block.slope, *again, block.hessian))


# What they cost a device. --------------------------------------------------------------------------------------------


class Counted:
    """A kernel that writes something, in one launch."""

    @staticmethod
    def solve_block(grid: ColumnGrid, work: torch.Tensor, *arrays: Any) -> None:
        arrays[2].fill_(0.0)

    @staticmethod
    def refine_block(grid: ColumnGrid, result: torch.Tensor, *arrays: Any) -> None:
        result.fill_(0.0)


PER_COLUMN = [
    # A product with a vector, round and clip, and where columns share no scales two products with them: in each pass.
    (spec("uint4", PerGroup(-1, 128), symmetric=False), 128, 6, 1),
    (spec("uint4", PerGroup(-1, 128), symmetric=False), 1, 10, 1),
    (spec("int8", PerGroup(-1, 128)), 256, 6, 1),
    (spec("fp4_e2m1", PerGroup(-1, 32)), 32, 6, 1),
    (spec("fp8_e4m3", PerGroup(-1, 128)), 1, 10, 1),
]


@pytest.mark.slow  # the first operator that is counted brings some hundred modules of torch
@pytest.mark.parametrize(("rule", "shared", "most", "kernel"), PER_COLUMN, ids=str)
def test_what_a_column_launches(
    rule: TensorSpec, shared: int, most: int, kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes: so many for each column and some for each block; a kernel one for each block, and what lies between.

    Nothing of it waits for the device.
    """
    monkeypatch.setattr(columns, "_library", lambda: None)
    size = 256
    weight = weights(16, size)
    grid = grid_of(weight, rule, torch.from_numpy, shared)
    goal, feedback = torch.from_numpy(np.ascontiguousarray(weight.T)), torch.eye(size)
    gptq.solve(goal, feedback, grid)  # tables are brought once

    def count() -> Operations:
        with Operations() as found:
            refine(goal, gptq.solve(goal, feedback, grid), feedback, grid, 1)
        return found

    plain = count()
    blocks = size // (min(128, shared) if shared > 1 else 128)
    assert plain.launches <= most * size + 34 * blocks and not plain.waits
    solver = next(solver for solver in SOLVERS if isinstance(solver, Kernels))
    monkeypatch.setattr(kernels, "device_of", lambda x: "counted")
    monkeypatch.setattr(kernels, "kernel_module", lambda name: Counted)
    names = ("solve", "refine")
    passed = {("counted", (name, 128, bytes(ElementRule.of(rule)))) for name in names}  # type: ignore[arg-type]
    monkeypatch.setattr(solver.trust, "passed", passed)
    assert count().launches <= 2 * kernel * (size // 128) + 12


WEIGHTS = {
    str(layer.weight): layer.weight for layer in SCHEMES.values() if layer.weight is not None and has_rule(layer.weight)
}
"""What the schemes that are solved in columns make of a weight."""


@pytest.mark.parametrize("pulled", [False, True], ids=["gptq", "gptaq"])
@pytest.mark.parametrize(
    "rule",
    [rule if rule.dtype.name == "mx6" else pytest.param(rule, marks=pytest.mark.slow) for rule in WEIGHTS.values()],
    ids=str,
)
def test_a_column_launches_ten_kernels_at_most(rule: TensorSpec, pulled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both passes, in plain steps: in the order of importance, where each column has scales of its own, and then in
    that of the weight.
    """
    monkeypatch.setattr(columns, "_library", lambda: None)
    size, split = 256, rule.split
    run = split.size if isinstance(split, PerGroup) else size
    ordered, natural = (grid_of(weights(16, size), rule, torch.from_numpy, shared) for shared in (1, run))
    goal, square = torch.from_numpy(np.ascontiguousarray(weights(16, size).T)), torch.eye(size)
    refine(goal, gptq.solve(goal, square, ordered, drift=square if pulled else None), square, natural, 1)
    with Operations() as found:
        refine(goal, gptq.solve(goal, square, ordered, drift=square if pulled else None), square, natural, 1)
    assert found.launches <= 10 * size and not found.waits


# On a GPU that is not here. ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", gpu_kernels.TARGETS, ids=str)
def test_kernels_compile_for_gpus(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="there are wheels for Linux alone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu_kernels.check_compiles(compiled_for, target)


def compiled_for(target: Any) -> list[tuple[bytes, str]]:
    """Machine code and assembly of each kernel under some rules."""
    from quark.core.kernels.elements_triton import constants_of
    from quark.core.solvers.columns import columns_triton

    made = []
    for rule in SOME:
        constants = constants_of(ElementRule.of(rule)) | {"size": 128, "tile": columns_triton.ROWS}  # type: ignore[arg-type]
        for kernel, more in (
            (columns_triton.solve_kernel, {"pulled": False}),
            (columns_triton.solve_kernel, {"pulled": True}),
            (columns_triton.refine_kernel, {}),
        ):
            names = kernel.arg_names
            pointers = dict.fromkeys(names[: names.index("zero") + 1], "*fp32")
            made.append(gpu_kernels.compiled(kernel, pointers, constants | more, columns_triton.OPTIONS, target))
    return made
