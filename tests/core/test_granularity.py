"""Granularities: the block view and back, the shape of the scale, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.errors import ShapeError

LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
CASES = [
    (PerTensor(), (8, 64), (8, 64), ()),
    (PerChannel(0), (8, 64), (8, 64), (8,)),
    (PerChannel(-1), (8, 64), (8, 64), (64,)),
    (PerChannel(1), (2, 3, 5), (2, 3, 5), (3,)),
    (PerToken(), (2, 3, 5), (2, 3, 5), (2, 3)),
    (PerGroup(-1, 32), (8, 64), (8, 2, 32), (8, 2)),
    (PerGroup(0, 4), (8, 64), (2, 4, 64), (2, 64)),
    (PerGroup(-1, -1), (8, 60), (8, 1, 60), (8, 1)),
    (PerGroup(1, 32, pad=True), (3, 33, 2), (3, 2, 32, 2), (3, 2, 2)),
    (PerBlock((4, 32)), (8, 64), (2, 4, 2, 32), (2, 2)),
    (PerBlock((2, 3)), (5, 4, 9), (5, 2, 2, 3, 3), (5, 2, 3)),
    (PerBlock((4, 3), pad=True), (2, 5, 7), (2, 2, 4, 3, 3), (2, 2, 3)),
]


@LIBRARIES
@pytest.mark.parametrize(("split", "shape", "view", "scale"), CASES, ids=str)
def test_views_and_scales(
    split: Granularity, shape: tuple[int, ...], view: tuple[int, ...], scale: tuple[int, ...], library: object
) -> None:
    x = library(np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape))  # type: ignore[operator]
    blocks = split.blocks(x)
    assert tuple(blocks.shape) == view == split.block_shape(shape)
    assert split.scale_shape(shape) == scale
    assert tuple(n for axis, n in enumerate(view) if axis not in split.axes(len(shape))) == scale
    assert np.array_equal(np.asarray(split.unblock(blocks, shape)), np.asarray(x))
    # A scale that counts its own parts reaches exactly the values of its part.
    numbers = library(np.arange(np.prod(scale), dtype=np.float32).reshape(scale))  # type: ignore[operator]
    spread = split.to_blocks(numbers, shape) + blocks * 0
    lows = np.asarray(spread).min(axis=split.axes(len(shape)))
    assert np.array_equal(lows, np.asarray(spread).max(axis=split.axes(len(shape))))
    assert np.array_equal(lows.reshape(-1), np.arange(np.prod(scale)))


def test_groups_are_runs_and_the_tail_is_zeros() -> None:
    x = np.arange(1, 8, dtype=np.float32)
    assert PerGroup(0, 3, pad=True).blocks(x).tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert PerBlock((1, 2)).blocks(np.arange(8.0).reshape(2, 4)).swapaxes(1, 2)[1, 1].tolist() == [[6, 7]]


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    data=st.data(),
    size=st.integers(1, 9),
)
def test_padding_round_trips(shape: list[int], data: st.DataObject, size: int) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    split = PerGroup(axis, size, pad=True)
    for library in (np.asarray, torch.from_numpy):
        blocks = split.blocks(library(x))
        assert blocks.shape[split.axes(x.ndim)[0]] == size
        assert np.array_equal(np.asarray(split.unblock(blocks, x.shape)), x)
        assert float(abs(blocks).sum()) == pytest.approx(float(abs(x).sum()), rel=1e-5)


def test_the_whole_of_an_empty_axis() -> None:
    split = PerGroup(-1, -1)
    assert split.blocks(np.zeros((4, 0), np.float32)).shape == (4, 0, 1) and split.scale_shape((4, 0)) == (4, 0)


def test_a_group_size_that_does_not_divide_says_what_does() -> None:
    with pytest.raises(ShapeError) as error:
        PerGroup(1, 100).blocks(np.zeros((2, 192), np.float32))
    message = str(error.value)
    assert "100" in message and "192" in message and "axis 1" in message
    assert "16, 32, 64, -1" in message and "128" not in message


@pytest.mark.parametrize(
    ("split", "shape", "parts"),
    [
        (PerGroup(-1, 0), (4,), ["group_size 0", "4"]),
        (PerGroup(-1, 0, pad=True), (4,), ["group_size 0"]),
        (PerGroup(-1, -4), (4,), ["group_size -4"]),
        (PerBlock((4, 3)), (8, 64), ["(4, 3)", "(8, 64)"]),
        (PerBlock((4, 4)), (8,), ["(8,)"]),
        (PerChannel(2), (8, 64), ["axis 2", "2 dimensions"]),
        (PerGroup(-3, 2), (8, 64), ["axis -3"]),
    ],
    ids=str,
)
def test_splits_that_do_not_fit(split: Granularity, shape: tuple[int, ...], parts: list[str]) -> None:
    with pytest.raises(ShapeError) as error:
        split.axes(len(shape))
        split.blocks(np.zeros(shape, np.float32))
    assert all(part in str(error.value) for part in parts)


def test_a_scale_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(3,\).*\(8, 64\).*\(8,\) is needed"):
        PerChannel(0).to_blocks(np.ones(3, np.float32), (8, 64))
