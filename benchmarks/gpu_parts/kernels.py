"""The kernels of Triton beside the plain form: those that solve blocks of columns, and those that fake-quantize groups.

A kernel that is taken has passed the check of `core/solvers/columns/kernels.py`: every code is that of the formula,
every sum is one in float32. Codes that differ from those of the plain form are then ties that another order of a sum
decides, and what follows from them; both sides are as good. So the share of equal codes is told, and has no bound.

Fake quantization sums nothing: a kernel must give the bits that the CPU gives, under the spec of every named scheme.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.rows import Found, Report, one_line
from quark.core.kernels.groups import TRUST
from quark.core.kernels.trust import kernel_module
from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.solvers.columns.kernels import MODULE, Kernels
from quark.core.solvers.columns.plain_columns import PlainBlocks
from quark.core.spec import TensorSpec
from quark.torch.calibration.calibrate import tensor_qparams
from tests.models.column_rules import RULES, grid_of, weights

UNTIL = 0.65
"""Share of the time after which none is begun."""
ROWS, COLUMNS = 512, 128
SMALL_ROWS, SMALL_COLUMNS = 20, 8


class Block:
    """Columns that feed back into each other, on a device; shape (columns, rows)."""

    def __init__(self, rule: TensorSpec, device: torch.device, rows: int, columns: int) -> None:
        random, weight = np.random.default_rng(3), weights(rows, columns)

        def wrap(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(np.float32(x))).to(device)

        self.grid = grid_of(weight, rule, wrap)
        self.weight = wrap(weight.T * np.float32(1.3))
        inputs = random.normal(size=(columns, 3 * columns)) * 4.0 ** random.integers(-1, 2, (columns, 1))
        self.hessian = wrap(inputs @ inputs.T)
        # What a column feeds to later ones shrinks with their number, so that no column grows without end.
        strength = 0.3 * (8 / columns) ** 0.5
        self.feedback = wrap(np.triu(random.normal(size=(columns, columns)) * strength, 1) + np.eye(columns))
        self.pull = wrap(np.triu(random.normal(size=(columns, columns)) * strength / 3, 1))
        self.slope = wrap(random.normal(size=(columns, rows)) * weight.T)

    def solved(self, solver: Any, pulled: bool) -> torch.Tensor:
        """The values that the columns get."""
        arrays = [self.weight * 1.0, self.weight * 1.0, self.weight * 0.0, self.weight * 0.0]
        solver.solve(self.grid, *arrays, self.feedback, self.pull if pulled else None)
        return arrays[-1]

    def refined(self, solver: Any, start: torch.Tensor) -> torch.Tensor:
        """The values that the columns get when they are visited again."""
        arrays = [start * 1.0, self.slope * 1.0, start * 0.0]
        solver.refine(self.grid, *arrays, self.hessian)
        return arrays[0]


def compared(rule: TensorSpec, report: Report) -> Found:
    """Three kernels under one rule: which are taken, and the share of codes that are those of the plain form."""
    rows, columns = (SMALL_ROWS, SMALL_COLUMNS) if report.small else (ROWS, COLUMNS)
    block, kernel, plain = Block(rule, report.device, rows, columns), Kernels(), PlainBlocks()
    shares = []
    for pulled in (False, True):
        start = block.solved(plain, pulled)
        shares.append(float((block.solved(kernel, pulled) == start).float().mean()))
    shares.append(float((block.refined(kernel, start) == block.refined(plain, start)).float().mean()))
    value = f"equal codes: {min(shares):.4%} of {rows} x {columns}"
    if kernel.trust.refused:
        return Found(f"{value}; {why_not(block)}", "", "plain form taken")
    return Found(value, "", f"{len(kernel.trust.passed)} of 3 kernels taken")


def why_not(block: Block) -> str:
    """What a kernel does that is refused: its own error, or that it computes something else."""
    solver, module = Unchecked(), kernel_module(MODULE)
    if module is None:
        return "triton is not there"
    solver.solve, solver.refine = module.solve_block, module.refine_block
    try:
        block.refined(solver, block.solved(solver, pulled=True))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a compiler or a driver fails in ways of its own
        return one_line(error)
    return "what it computes is not what the formulas say"


class Unchecked:
    """The kernels without the check."""

    solve: Any
    refine: Any


def fake_quantized(spec: TensorSpec, report: Report) -> Found:
    """Values under one spec, with given scales or with their own: on the device, beside those of the CPU."""
    rows, columns = (SMALL_ROWS, ROWS) if report.small else (ROWS, 4 * ROWS)
    x = torch.from_numpy(weights(rows, columns)).float()
    params = None if spec.dynamic or spec.is_cast else tensor_qparams(x, spec)
    before = len(TRUST.passed)
    found = fake_quantize(x.to(report.device), None if params is None else on_device(params, report.device), spec)
    wrong = int((found.cpu() != fake_quantize(x, params, spec)).sum())
    how = "by its kernel" if len(TRUST.passed) > before else "in plain steps"
    return Found(f"{wrong} of {x.numel()} values differ, {how}", "0", "BEYOND" if wrong else "equal")


def on_device(params: QParams, device: torch.device) -> QParams:
    """Scales and zero points on a device."""
    zero, second = params.zero_point, params.second
    return QParams(
        params.scale.to(device),
        None if zero is None else zero.to(device),
        None if second is None else on_device(second, device),
    )


def run(report: Report) -> None:
    """One row for each element rule, and for each spec of a weight or an input of the named schemes."""
    for rule in RULES:
        name = f"{rule}, float zero points" if rule.float_zero_point else str(rule)
        report.run("kernels", name, partial(compared, rule, report), UNTIL)
    specs = dict.fromkeys(spec for layer in SCHEMES.values() for spec in (layer.weight, layer.input) if spec)
    for spec in specs:
        live = "live " if spec.dynamic else ""
        report.run("kernels", f"fake-quantize {live}{spec}", partial(fake_quantized, spec, report), UNTIL)
