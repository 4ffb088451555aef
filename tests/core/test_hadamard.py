"""Hadamard matrices and rotations, against scipy, the Legendre symbol and plain matrix products."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from quark.core.solvers import hadamard as module
from quark.core.solvers.hadamard import Rotation, factors, hadamard, is_hadamard
from quark.errors import ConfigError


@pytest.mark.parametrize("n", [1, 2, 4, 64, 256])
def test_powers_of_two_are_scipys(n: int) -> None:
    np.testing.assert_array_equal(hadamard(n), scipy.linalg.hadamard(n))


# Paley I over primes and over 27 = 3^3, 343 = 7^3; Paley II over 17 and over 25 = 5^2; products with powers of two.
@pytest.mark.parametrize("n", [12, 20, 24, 28, 344, 36, 52, 76, 108, 140, 144])
def test_rows_of_signs_are_orthogonal(n: int) -> None:
    matrix = hadamard(n)
    assert set(np.unique(matrix)) == {-1.0, 1.0}
    np.testing.assert_array_equal(matrix @ matrix.T, n * np.eye(n))
    np.testing.assert_array_equal(matrix[:, 0], 1)


@pytest.mark.parametrize("p", [3, 7, 13, 19])
def test_characters_are_legendre_symbols(p: int) -> None:
    differences = (np.arange(p)[:, None] - np.arange(p)) % p
    euler = np.vectorize(lambda a: pow(int(a), (p - 1) // 2, p))(differences)
    np.testing.assert_array_equal(module._characters(p, 1), np.where(euler == p - 1, -1, euler))


@pytest.mark.parametrize("q", [(3, 2), (3, 3), (5, 2)])
def test_half_of_the_elements_of_a_field_are_squares(q: tuple[int, int]) -> None:
    row = module._characters(*q)[0]
    assert (row == 1).sum() == (row == -1).sum() == (q[0] ** q[1] - 1) // 2 and row[0] == 0


@pytest.mark.parametrize("n", [*range(1, 48), 92, 116, 172, 230])
def test_every_size_has_a_flat_orthonormal_matrix(n: int) -> None:
    matrix = Rotation(n).matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-13)
    bound = 1 if is_hadamard(n) else np.sqrt(2)
    assert np.abs(matrix).max() <= bound / np.sqrt(n) + 1e-13


def test_known_sizes_of_language_models_are_hadamard() -> None:
    for n in (768, 896, 1536, 2560, 3584, 4864, 5120, 6912, 8960, 11008, 13824, 14336, 18944, 28672):
        assert is_hadamard(n) and np.prod(factors(n)) == n


def test_a_size_without_a_matrix_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="92"):
        hadamard(92)


ROTATIONS = [Rotation(48), Rotation(48, seed=3), Rotation(48, seed=3, keep_mean=True), Rotation(6), Rotation(92)]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_apply_is_the_product_with_the_matrix_in_each_block(rotation: Rotation) -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 2 * rotation.size))
    expected = x.reshape(-1, rotation.size) @ rotation.matrix()
    np.testing.assert_allclose(rotation.apply(x), expected.reshape(x.shape), atol=1e-13)
    np.testing.assert_allclose(rotation.undo(rotation.apply(x)), x, atol=1e-13)
    on_torch = torch.from_numpy(x)
    np.testing.assert_allclose(rotation.apply(on_torch).numpy(), expected.reshape(x.shape), atol=1e-13)
    np.testing.assert_allclose(rotation.undo(rotation.apply(on_torch)).numpy(), x, atol=1e-13)


def test_a_large_rotation_is_never_a_matrix() -> None:
    x = np.zeros(1 << 20)
    x[5] = 1
    np.testing.assert_allclose(np.abs(Rotation(1 << 20).apply(x)), 2**-10, rtol=1e-12)


def test_signs_follow_from_the_seed() -> None:
    one, again, other, plain = (Rotation(16, seed).matrix() for seed in (1, 1, 2, None))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any() and (one != plain).any()
    np.testing.assert_allclose(np.abs(one), 0.25)


@pytest.mark.parametrize("size", [16, 48, 92])
def test_keeping_the_mean_commutes_with_a_layer_norm(size: int) -> None:
    rotation = Rotation(size, keep_mean=True)
    x = torch.randn(4, 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    norm = torch.nn.functional.layer_norm
    torch.testing.assert_close(norm(rotation.apply(x), [2 * size]), rotation.apply(norm(x, [2 * size])))
    plain = Rotation(size)
    assert not torch.allclose(norm(plain.apply(x), [2 * size]), plain.apply(norm(x, [2 * size])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    made = Rotation(4096).apply(x)
    assert made.dtype == dtype
    torch.testing.assert_close(made, Rotation(4096).apply(x.double()).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_a_size_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ConfigError, match="size 32 does not divide an axis of 48"):
        Rotation(32).apply(np.zeros((2, 48)))
