"""The parts in which the PyTorch flow takes what is large, and how a test makes them smaller than a tiny layer.

A weight is solved some rows at a time, its columns in blocks, second moments in tiles of channels and some tokens at a
time, experts some at a time, scales some bytes at a time; files are read and written some rows at a time. No size is a
divisor of the sides of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quark.core import array, checks
from quark.core.blocks import block_search
from quark.core.kernels import runs
from quark.core.solvers import coupled, gptq, importance, smooth
from quark.core.solvers.columns import block_solvers, columns, triangles
from quark.jobs.folders.compared import measure
from quark.torch.algorithms import input_group
from quark.torch.algorithms.rotation import fold as rotation_fold
from quark.torch.algorithms.rounding import autoround, column_problem, fix_scales, learned_rounding
from quark.torch.algorithms.rounding import gptq as solvers
from quark.torch.algorithms.scaling import float64_forward, fold
from quark.torch.calibration import experts, spill, work_device
from quark.torch.formats.quark import layout
from quark.torch.model import half_products
from quark.torch.writers import by_rows
from quark.torch.writers.gguf import format as blocks_of_files
from quark.torch.writers.gguf import import_file

PARTS: Sequence[tuple[Any, str, int]] = (
    (array, "CACHE_CHUNK", 1000),
    (checks, "_FINITE", 1000),
    (block_search, "CHUNK", 20_000),
    (runs, "TILE", 24),
    (coupled, "ROWS", 24),
    (coupled, "BLOCK", 24),
    (gptq, "FACTOR_BLOCK", 24),
    (gptq, "_GRADIENT_BLOCK", 24),
    (importance, "SMALL", 1000),
    (smooth, "BLOCK", 24),
    (smooth, "ELEMENTS", 1000),
    (smooth, "LEAST_ROWS", 7),
    (block_solvers.CompiledBlocks, "most", 24),
    (columns, "_SLICE", 24),
    (triangles, "BLOCK", 24),
    (triangles, "ROWS", 24),
    (measure, "LARGEST_PIECE", 1000),
    (input_group, "TILE", 24),
    (input_group, "TOKENS", 7),
    (rotation_fold, "CHUNK_BYTES", 1000),
    (autoround, "TOGETHER", 24),
    (solvers, "ELEMENTS", 1000),
    (solvers, "LEAST_ROWS", 24),
    (column_problem, "ROWS", 24),
    (fix_scales, "PIECE", 1000),
    (fix_scales, "_SIDE_BY_SIDE", 1000),
    (learned_rounding, "TOGETHER", 1000),
    (float64_forward, "ROWS", 24),
    (fold, "ROWS", 24),
    (experts, "AT_ONCE", 1000),
    (spill, "LEAST", 100),
    (spill, "_GIVEN_BACK", 1000),
    (work_device, "MUCH", 1000),
    (layout, "PIECE", 10_000),
    (half_products, "PIECE", 1000),
    (by_rows, "PIECE", 30_000),
    (blocks_of_files, "PIECE", 30_000),
    (import_file, "PIECE", 1000),
)
"""Module or class, the field in it, and the size that it gets here."""


def make_parts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every part as small as PARTS says, until the test ends."""
    for module, name, size in PARTS:
        assert isinstance(getattr(module, name), int)
        monkeypatch.setattr(module, name, size)
