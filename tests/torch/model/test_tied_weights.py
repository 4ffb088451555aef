"""Which tensors share memory, beside a count of the bytes that each one touches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.torch.model.tied_weights import overlapping


def _elements(tensor: torch.Tensor) -> list[int]:
    places = np.indices(tensor.shape).reshape(tensor.ndim, -1)
    return [*(np.array(tensor.stride()) @ places + tensor.storage_offset())]


_views = st.tuples(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3),
)


@given(st.lists(_views, min_size=2, max_size=5))
def test_views_share_memory_where_they_share_an_element(drawn: list[tuple[int, list[tuple[int, int]]]]) -> None:
    storage = torch.zeros(200, dtype=torch.bfloat16)
    views = [torch.as_strided(storage, [n for n, _ in d], [s for _, s in d], offset) for offset, d in drawn]
    touched = [set(_elements(view)) for view in views]
    expected = {
        id(view) for i, view in enumerate(views) if any(touched[i] & other for j, other in enumerate(touched) if i != j)
    }
    assert overlapping(views) == expected


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_of_one_tensor_share_nothing(transposed: bool) -> None:
    fused = torch.zeros(3, 8, 16)
    views = [half.t() if transposed else half for expert in fused for half in expert.chunk(2, -1 if transposed else 0)]
    assert overlapping(views) == set()
    whole = fused[1]
    assert overlapping([*views, whole]) == {id(x) for x in (*views[2:4], whole)}


def test_expanded_and_tied_tensors_and_those_without_memory() -> None:
    expanded, meta, twice = torch.zeros(1, 4).expand(3, 4), torch.empty(4, 4, device="meta"), torch.zeros(4)
    part = meta[1:]
    assert overlapping([expanded, meta, part, twice, twice]) == {id(expanded), id(twice)}
