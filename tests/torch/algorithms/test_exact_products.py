"""Products on bfloat16 units: those of bfloat16 values are float32's, and the process's setting is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.torch.algorithms import input_group
from quark.torch.algorithms.input_group import InputGroup, exact_in_bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_second_moments_are_those_of_float64(dtype: torch.dtype) -> None:
    x, y = (torch.randn(3, 700, 96, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    group = InputGroup({"layer": nn.Linear(96, 1)}, [x[0], x[1:]], [y[0], y[1:]])
    for found, other in ((group.gram, x), (group.cross, y)):
        expected = x.reshape(-1, 96).double().T @ other.reshape(-1, 96).double() / 2100
        # Sums of 2100 products in float32, of size 1 / 2100 each: a bfloat16 operand would be off by 1e-3 of each.
        assert torch.allclose(found.double(), expected, rtol=0, atol=2e-6)


def precision() -> str | None:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(matmul, "fp32_precision", None)


def test_the_setting_of_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_group, "_has_tiles", lambda: True)
    before = precision()
    half, single = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    with exact_in_bfloat16(half, single):
        assert precision() == before
    with pytest.raises(RuntimeError), exact_in_bfloat16(half, half):
        assert precision() in ("bf16", None)
        _ = single @ torch.zeros(3, 3)
    assert precision() == before


def test_without_tiles_products_are_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """There bfloat16 takes longer."""
    monkeypatch.setattr(input_group, "_has_tiles", lambda: False)
    half, before = torch.zeros(2, 2, dtype=torch.bfloat16), precision()
    with exact_in_bfloat16(half, half):
        assert precision() == before


def test_the_processor_says_whether_it_has_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert input_group._has_tiles()
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not input_group._has_tiles()
