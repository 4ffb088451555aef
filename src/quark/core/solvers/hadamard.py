"""Rotations that spread outliers (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456): orthonormal matrices of any size.

    Q = H_n / sqrt(n)            H_n has entries +-1 and H_n H_n^T = n I
    H_ab = H_a (x) H_b           the Kronecker product; H_2 = [[1, 1], [1, -1]] gives the powers of two (Sylvester)
    order q + 1, q = 3 mod 4     H = I + [[0, 1], [-1, C]]                                                (Paley I)
    order 2 (q + 1), q = 1 mod 4 H = [[0, 1], [1, C]] (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]   (Paley II)
    C_ij = chi(a_i - a_j)        chi: 1 for the squares of the field with q elements, -1 for the others, 0 for 0
    random                       Q = diag(s) H_n / sqrt(n), s random signs
    keeping the mean             Q = H_n diag(s) H_n^T / n, s_0 = 1: then x Q sums to what x sums to

The first column of every H_n is made of ones (rows are negated), so that the last line holds. A size for which none of
these gives a Hadamard matrix is 2^k m with m odd: there Q = H_(2^k) / sqrt(2^k) (x) the DCT-II of size m, whose entries
are at most sqrt(2) times as large. A product with Q is one with each of its small factors, never with n x n.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from quark.core.array import Array, astype, dtype_name, is_torch, like
from quark.errors import ConfigError

_MAX_CORE = 1024
"""Largest Paley matrix: a product with it costs that many operations for each value."""
STEP = 64
"""Powers of two are applied in factors of at most this size: two short matrix products beat twelve butterflies."""
Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rotation:
    """An orthonormal matrix Q that depends on nothing but these fields.

    Attributes:
        size: Rows of Q. An axis that is a multiple of it is rotated block by block.
        seed: Of the random signs; None: no signs.
        keep_mean: Q leaves the sum of each row vector as it is, so that it commutes with the mean of a LayerNorm.
    """

    size: int
    seed: int | None = None
    keep_mean: bool = False

    def apply(self, x: Array) -> Array:
        """Return x Q along the last axis, in the dtype of x (half precision is computed in float32)."""
        return self._turn(x, inverse=False)

    def undo(self, x: Array) -> Array:
        """Return x Q^T along the last axis: the inverse of `apply`."""
        return self._turn(x, inverse=True)

    def matrix(self) -> Matrix:
        """Q, float64, shape (size, size)."""
        out: Matrix = self.apply(np.eye(self.size))
        return out

    @property
    def is_hadamard(self) -> bool:
        """True where all entries of Q are +-1 / sqrt(size)."""
        return not self.keep_mean and is_hadamard(self.size)

    def _turn(self, x: Array, inverse: bool) -> Array:
        if x.shape[-1] % self.size:
            raise ConfigError(f"A rotation of size {self.size} does not divide an axis of {x.shape[-1]} features.")
        dtype = x.dtype
        wide = x if dtype_name(x) in ("float32", "float64") else astype(x, "float32")
        blocks = wide.reshape(-1, self.size)
        if self.keep_mean:
            out = _times(_times(blocks, self.size, False) * self._signs(wide), self.size, True)
        elif inverse:
            out = _times(blocks, self.size, True) * self._signs(wide)
        else:
            out = _times(blocks * self._signs(wide), self.size, False)
        out = out.reshape(x.shape)
        return out.to(dtype) if is_torch(x) else out.astype(dtype, copy=False)

    def _signs(self, x: Array) -> Array:
        if self.seed is None and not self.keep_mean:
            return 1.0
        return _like((self.seed or 0, self.size, self.keep_mean), partial(_signs, self), x)


def _signs(rotation: Rotation) -> Matrix:
    signs: Matrix = np.random.default_rng([rotation.seed or 0, rotation.size]).integers(0, 2, rotation.size) * 2.0 - 1
    if rotation.keep_mean:
        signs[0] = 1.0
    return signs


def hadamard(n: int) -> Matrix:
    """A Hadamard matrix of order n: entries +-1, first column of ones; float64.

    Raises ConfigError where this module constructs none; for `factors` of such an n see there.
    """
    if not is_hadamard(n):
        raise ConfigError(f"No Hadamard matrix of order {n} is constructed here.")
    out: Matrix = np.ones((1, 1))
    for order in factors(n):
        out = np.kron(out, _factor(order) * math.sqrt(order))
    rounded: Matrix = np.rint(out)
    return rounded


def is_hadamard(n: int) -> bool:
    """Return True where the matrix for size n is a Hadamard matrix: no odd factor is left for the DCT."""
    return all(order % 2 == 0 for order in factors(n))


def is_sylvester(n: int) -> bool:
    """Return True where the matrix for size n is Sylvester's, which is symmetric and which every library has."""
    return n > 0 and n & (n - 1) == 0


@cache
def factors(n: int) -> tuple[int, ...]:
    """Orders whose Kronecker product is the matrix of size n: powers of two and Paley orders, or an odd rest.

    >>> factors(4096), factors(11008), factors(92)
    ((64, 64), (32, 344), (4, 23))
    """
    if n < 1:
        raise ConfigError(f"A rotation has at least one row; got size {n}.")
    odd = n // (n & -n)
    if odd == 1:
        return tuple(_powers(n))
    power = n // odd
    for core in _cores(power, odd):
        rest = n // math.prod(core)
        return (*_powers(rest), *core)
    return (*_powers(power), odd)


def _powers(n: int) -> list[int]:
    """A power of two as factors of at most STEP."""
    powers = []
    while n > 1:
        powers.append(min(n, STEP))
        n //= powers[-1]
    return powers


def _cores(power: int, odd: int) -> list[tuple[int, ...]]:
    """One or two Paley orders whose product is `odd` times a power of two up to `power`; smallest products first."""
    one = [(order,) for order in _paley_orders(power, odd)]
    two = []
    for divisor in (d for d in range(3, math.isqrt(odd) + 1, 2) if odd % d == 0):
        for first in _paley_orders(power, divisor):
            power_left = power // (first // divisor)
            two += [(first, second) for second in _paley_orders(power_left, odd // divisor)]
    return sorted([*one, *two], key=lambda core: (math.prod(core), sum(core)))


def _paley_orders(power: int, odd: int) -> list[int]:
    """Orders of Paley matrices that are `odd` times 4, 8, ... up to `power`; ascending."""
    orders = [odd << shift for shift in range(2, power.bit_length())]
    return [order for order in orders if order <= _MAX_CORE and _paley_field(order)]


def _paley_field(order: int) -> tuple[int, int] | None:
    """(p, k) of the field that gives a Paley matrix of this order, or None."""
    field = _prime_power(order - 1) if order % 4 == 0 else None
    if field is not None:
        return field
    half = order // 2 - 1
    return _prime_power(half) if half % 4 == 1 else None


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p^k, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, math.isqrt(q) + 1) if q % d == 0), q)
    k = round(math.log(q, p))
    return (p, k) if p**k == q else None


@cache
def _factor(order: int) -> Matrix:
    """The orthonormal matrix of one factor; float64."""
    if order % 2:
        index = np.arange(order)
        cosines = np.cos(np.pi / order * np.outer(index + 0.5, index)) * math.sqrt(2 / order)
        cosines[:, 0] = math.sqrt(1 / order)
        return cosines
    if order & (order - 1) == 0:
        bits = np.arange(order)
        parity = np.array([bin(value).count("1") & 1 for value in range(order)])
        return (1.0 - 2 * parity[bits[:, None] & bits]) / math.sqrt(order)
    matrix = _paley(order)
    return matrix * matrix[:, :1] / math.sqrt(order)


def _paley(order: int) -> Matrix:
    field = _paley_field(order)
    assert field is not None
    q = field[0] ** field[1]
    border = np.zeros((q + 1, q + 1))
    border[0, 1:], border[1:, 0] = 1, -1 if q % 4 == 3 else 1
    border[1:, 1:] = _characters(*field)
    if q % 4 == 3:
        return np.eye(q + 1) + border
    return np.kron(border, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])


def _characters(p: int, k: int) -> Matrix:
    """chi(a_i - a_j) over the field with p^k elements, an element being k digits in base p."""
    place = p ** np.arange(k)
    chi = np.zeros(p**k)
    for power, element in enumerate(_powers_of_generator(p, k)):
        chi[int(np.dot(element, place))] = 1 - 2 * (power % 2)
    digits = np.arange(p**k)[:, None] // place % p
    out: Matrix = chi[((digits[:, None] - digits[None]) % p) @ place]
    return out


def _powers_of_generator(p: int, k: int) -> list[tuple[int, ...]]:
    """Powers of an x that generates the field: the root of x^k = sum c_i x^i for the first c that gives one."""
    one = (1, *[0] * (k - 1))
    for c in product(range(p), repeat=k):
        seen, element = [one], _times_x(one, c, p)
        while element != one and any(element) and len(seen) < p**k:
            seen.append(element)
            element = _times_x(element, c, p)
        if element == one and len(seen) == p**k - 1:
            return seen
    raise AssertionError(f"every finite field has a generator; none found for {p}^{k}")


def _times_x(element: tuple[int, ...], c: tuple[int, ...], p: int) -> tuple[int, ...]:
    shifted = (0, *element[:-1])
    return tuple((low + element[-1] * high) % p for low, high in zip(shifted, c, strict=True))


def _times(x: Array, n: int, transpose: bool) -> Array:
    """Return x Q or x Q^T for x of shape (rows, n): the factors of Q one after the other, each along its axis."""
    rows, after = x.shape[0], n
    for order in factors(n):
        after //= order
        matrix = _like(order, partial(_factor, order), x)
        if after == 1:
            x = x.reshape(-1, order) @ (matrix.T if transpose else matrix)
        else:
            x = (matrix if transpose else matrix.T) @ x.reshape(-1, order, after)
    return x.reshape(rows, n)


def _like(name: Any, make: Callable[[], Matrix], x: Array) -> Array:
    """A factor or signs as an array like x. Tensors are kept, so that a device gets them once, but for those that stand
    for others while a graph is traced.
    """
    if not is_torch(x):
        return make().astype(x.dtype, copy=False)
    key = (name, x.dtype, x.device)
    if key not in _TENSORS:
        matrix = like(make(), x, dtype_name(x))
        if type(matrix) is not sys.modules["torch"].Tensor:
            return matrix
        _TENSORS[key] = matrix
    return _TENSORS[key]


_TENSORS: dict[Any, Array] = {}
