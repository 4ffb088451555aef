"""Rows of real positions, in every layout that attention makes of them, of arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quark.core.observers.real_rows import rows_at

MASK = np.arange(20) < np.array([12, 7, 16])[:, None]
SHAPES = [(3, 20, 8), (60, 8), (3, 4, 20, 8), (3, 8, 20), (3, 20, 4, 8), (3, 20, 20), (3, 4, 8, 20)]
LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


@LIBRARIES
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_layout(shape: tuple[int, ...], library: Callable[[np.ndarray], Any]) -> None:
    x = values(*shape)
    axis = 0 if shape[0] == 60 else shape.index(20)
    rows = x if shape[0] == 60 else np.moveaxis(x, axis, 1).reshape(60, -1)
    found = np.asarray(rows_at(library(x), [MASK]))
    assert found.ndim == x.ndim
    assert np.array_equal(np.sort(found, None), np.sort(rows[MASK.ravel()], None))


@LIBRARIES
def test_scores_of_real_queries_and_keys(library: Callable[[np.ndarray], Any]) -> None:
    x = values(3, 4, 20, 20)
    found = np.asarray(rows_at(library(x), [MASK]))
    for head in range(4):
        kept = np.concatenate([x[i, head][MASK[i]][:, MASK[i]].ravel() for i in range(3)])
        assert np.array_equal(found[0, head, 0], kept)
    assert np.array_equal(rows_at(library(x.reshape(12, 20, 20)), [MASK]), found[0])


@LIBRARIES
def test_rows_of_heads_in_one_axis(library: Callable[[np.ndarray], Any]) -> None:
    x = values(3, 4, 20, 8)
    apart = np.asarray(rows_at(library(x), [MASK]))
    assert np.array_equal(rows_at(library(x.reshape(12, 20, 8)), [MASK]), apart.reshape(4, -1, 8))


@LIBRARIES
@pytest.mark.parametrize("shape", [(3, 8), (8,), (4, 20, 8), (), (3, 20, 20, 8)])
def test_what_has_no_positions_counts_whole(shape: tuple[int, ...], library: Callable[[np.ndarray], Any]) -> None:
    x = library(np.asarray(values(*shape)))
    assert rows_at(x, [MASK]) is x


def test_each_part_of_a_model_has_its_mask() -> None:
    other = np.ones((3, 5), bool)
    other[0, 2:] = False
    assert rows_at(values(3, 5, 8), [MASK, other]).shape == (1, 12, 8)
    both = rows_at(values(3, 20, 8), [MASK, ~MASK])
    assert both.shape == (1, 60, 8), "of two masks of one shape what either lets through counts"
