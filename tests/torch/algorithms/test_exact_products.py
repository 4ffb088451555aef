"""Products on bfloat16 units: those of bfloat16 values are float32's, and the process's setting is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quark.core.kernels import products
from quark.core.solvers.columns.halves import add_product
from quark.torch.algorithms import input_group
from quark.torch.algorithms.input_group import InputGroup, exact_in_bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [96, 600])
def test_second_moments_are_those_of_float64(dtype: torch.dtype, width: int) -> None:
    x, y = (torch.randn(3, 700, width, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    group = InputGroup({"layer": nn.Linear(width, 1)}, [x[0], x[1:]], [y[0], y[1:]])
    for found, other in ((group.gram, x), (group.cross, y)):
        expected = x.reshape(-1, width).double().T @ other.reshape(-1, width).double() / 2100
        # Sums of 2100 products in float32, of size 1 / 2100 each: a bfloat16 operand would be off by 1e-3 of each.
        assert torch.allclose(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(301, 77, 545), (2, 530, 512)])
def test_products_of_pairs_are_those_of_float64(tokens: int, rows: int, columns: int) -> None:
    """Odd numbers of tokens, rests of tiles, and matrices that are parts of others."""
    both = torch.randn(tokens, columns + rows, generator=torch.Generator().manual_seed(0)).bfloat16()
    left, right = both[:, columns:], both[:, :columns]
    before = torch.ones(rows, columns + 8)
    if not products.fits(before[:, :columns], left, right):
        pytest.skip("this machine has no compiler, or its processor no AVX-512 BF16")
    expected = 1 + left.double().T @ right.double() / tokens
    for upper in (False, True):
        total = before.clone()
        products.add_products(total[:, :columns], left, right, 1 / tokens, upper)
        wanted = torch.ones(rows, columns).triu().bool() if upper else torch.ones(rows, columns).bool()
        assert torch.allclose(total[:, :columns].double()[wanted], expected[wanted], rtol=0, atol=2e-6)
        assert (total[:, columns:] == 1).all()
    assert not products.fits(before[:, :columns], left.float(), right)
    assert not products.fits(before[:, :511], left, right[:, :511])  # no real model: not worth a compiler


@pytest.mark.parametrize("rows_of_left", [False, True])
@pytest.mark.parametrize("rows_of_right", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float32_is_rounded_as_it_is_read(rows_of_left: bool, rows_of_right: bool, dtype: torch.dtype) -> None:
    """Matrices that lie either way, and of types that differ."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(301, 77, generator=random), torch.randn(301, 45, generator=random).to(dtype)
    left = left.T.contiguous().T if rows_of_left else left
    right = right.T.contiguous().T if rows_of_right else right
    total = torch.ones(77, 45)
    if not products.fits_rounded(total, left, right):
        pytest.skip("this machine has no compiler, or its processor no AVX-512 BF16")
    expected = 1 - left.bfloat16().double().T @ right.bfloat16().double()
    products.add_products(total, left, right, -1)
    assert torch.allclose(total.double(), expected, rtol=0, atol=5e-5)  # 301 products of size 1, summed in float32


def test_without_a_compiler_products_are_those_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    products._library.cache_clear()
    try:
        x = torch.randn(700, 600, generator=torch.Generator().manual_seed(0)).bfloat16()
        gram, total, left = torch.zeros(600, 600), torch.zeros(64, 40), torch.randn(64, 50)
        assert not products.fits(gram, x, x) and not products.serves(gram) and not list(tmp_path.iterdir())
        found = InputGroup({"layer": nn.Linear(600, 1)}, [x], []).gram
        assert torch.allclose(found.double(), x.double().T @ x.double() / 700, rtol=0, atol=2e-6)
        add_product(total, left, left.T[:, :40], -1, rounded=True)
        assert torch.equal(total, torch.zeros(64, 40).addmm_(left, left.T[:, :40], alpha=-1))
    finally:
        products._library.cache_clear()


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
