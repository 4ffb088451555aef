"""Which FP8 products a device computes: it is asked, by a small product of each kind, once in a process.

    codes                     scales
    e4m3fn, else e4m3fnuz     of each row and column, within the product
                              or none: the sums, float32, are multiplied by them afterwards

Neither the capability of a device nor the name of its architecture tells: the libraries that torch was built with
decide as well. The same bits are half the value in e4m3fnuz, whose exponent has the bias 8 (not 7); it has no negative
zero, and its only NaN lies there. So a code c becomes c / 2, which e4m3fnuz holds exactly, up to 240 >= 448 / 2, and
what is multiplied by such values of both factors needs a scale four times as large.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, partial

import torch

from quark.base.log import logger
from quark.errors import LONGEST, one_line
from quark.torch.kernels.kernel import AGREEMENT, attempted

FACTORS = {torch.float8_e4m3fn: 1.0, torch.float8_e4m3fnuz: 2.0}
"""dtype -> what its values are multiplied by to be codes of e4m3fn."""

ARCHITECTURES: dict[str, torch.dtype | None] = {
    "gfx908": None, "gfx90a": None,
    "gfx940": torch.float8_e4m3fnuz, "gfx941": torch.float8_e4m3fnuz, "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn, "gfx1200": torch.float8_e4m3fn, "gfx1201": torch.float8_e4m3fn,
}  # fmt: skip
"""An architecture of AMD's (MI100, MI200; MI300; MI350, RDNA 4) -> the FP8 codes that it should multiply; None: it has
no FP8 units. For what users are told; it decides nothing."""

FIRST_CAPABILITY = (8, 9)
"""The first compute capability of NVIDIA's with FP8 units: for what users are told, as above."""


@dataclass(frozen=True)
class Fp8Product:
    """A kind of product.

    Attributes:
        dtype: Of both factors.
        by_rows: Whether scales of rows and columns are within the product.
    """

    dtype: torch.dtype
    by_rows: bool

    def __call__(self, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The product, bfloat16 (m, n).

        Args:
            a, b: Of `dtype`, (m, k) and (n, k).
            rows, columns: Scales, float32 (m, 1) and (1, n).
        """
        if self.by_rows:
            return torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16)
        one = torch.ones((), dtype=torch.float32, device=a.device)
        sums: torch.Tensor = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)
        return sums.mul_(rows).mul_(columns).bfloat16()


KINDS = tuple(Fp8Product(dtype, by_rows) for dtype in FACTORS for by_rows in (True, False))
"""In the order in which a device is asked."""


def stored(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of e4m3fn as a device multiplies them: c, or c / 2 where e4m3fnuz is that, with a positive zero."""
    factor = FACTORS[dtype]
    return (codes if factor == 1 else codes / factor).to(dtype)


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """The codes, float32, that `stored` was given; 0 for a negative zero of e4m3fnuz."""
    return values.float() * FACTORS[values.dtype]


def fp8_product(device: torch.device) -> Fp8Product | None:
    """The first kind of product that a GPU computes; None: none. Full memory is raised, and asked again next time."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        has_units = (properties.major, properties.minor) >= FIRST_CAPABILITY
        return _asked(device, properties.name, torch.float8_e4m3fn if has_units else None)
    arch = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return _asked(device, f"{properties.name}, {arch}", ARCHITECTURES.get(arch))


@cache
def _asked(device: torch.device, name: str, expected: torch.dtype | None) -> Fp8Product | None:
    """The first kind that a device computes, and a line of what was found.

    Args:
        device: Asked.
        name: Of the card: another one may have its place, where one is simulated.
        expected: The dtype that its maker says it multiplies.
    """
    found, why = None, ""
    for kind in KINDS:
        answer = attempted(partial(_is_right, kind, device))
        if answer is True:
            found = kind
            break
        if not why:
            failed = isinstance(answer, Exception)
            why = f"{type(answer).__name__}: {one_line(answer)}" if failed else "What it computes is wrong."
    if found is not None:
        logger.info("%s (%s) multiplies FP8 codes as %s.", device, name, str(found.dtype).removeprefix("torch."))
        return found
    should = "" if expected is None else f", though it should ({str(expected).removeprefix('torch.')})"
    logger.log(
        logging.INFO if expected is None else logging.WARNING,
        "%s (%s) multiplies no FP8 codes with this PyTorch%s; layers of such codes decode their weights. %s",
        device, name, should, why[:LONGEST],
    )  # fmt: skip
    return None


def _is_right(kind: Fp8Product, device: torch.device) -> bool:
    """Return True where a device gives every code its value, in either factor, and sums products of them.

    With C the matrix of all codes, in which zeros stand for NaN, and I the identity:

        [C; I] [C^T; I]^T = [C C^T, C; C^T, I],    each row and column under a scale of its own
    """
    bits = torch.arange(256, dtype=torch.uint8)
    codes, one = bits.view(torch.float8_e4m3fn).double().nan_to_num(0.0).view(16, 16), torch.eye(16).double()
    a, b = torch.cat([codes, one]), torch.cat([codes.T, one])
    rows = torch.tensor([1.0, 2.0, 4.0, 0.5] * 8).view(-1, 1)
    columns = torch.tensor([0.25, 1.0] * 16).view(1, -1)
    given = [stored(a, kind.dtype), stored(b, kind.dtype), rows.float(), columns.float() * FACTORS[kind.dtype] ** 2]
    y = kind(*(x.to(device) for x in given)).double().cpu()
    expected, most = ((rows * (x @ z.T) * columns) for x, z in ((a, b), (a.abs(), b.abs())))
    return bool(((y - expected).abs() <= AGREEMENT * most).all())
