"""The block types of GGML: rows cut into blocks that hold their own scales, as GGUF files store them.

    one level      y = d * q           y = d * q - m                 d, m float16
    two levels     y = (d * c) * q     y = (d * c) * q - (e * k)     d, e float16 of the block; c, k integers of a group
    a table        q is one of `values` in place of an integer

ggml-common.h and ggml-quants.c (dequantize_row_*) of ggml define them. Each product and the difference are rounded to
float32, in this order, so that any reader decodes the very numbers that a model here computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from quark.core.array import Array, NumpyArray, astype, like, namespace
from quark.core.dtypes import Dtype
from quark.core.names.registry import Registry


@dataclass(frozen=True)
class BlockType(Dtype):
    """One block type. `min` and `max` are those of q; `block` counts the values that share d.

    Attributes:
        group: Values that share c and k; the whole block where there is one level.
        scales: Smallest and largest c; None where there is one level.
        minimums: Largest k; 0 where there is one level, or no minimum.
        has_minimum: Whether m is subtracted.
        values: What q may be, ascending; empty for all integers from `min` to `max`.
        narrower: The type for rows that are no whole number of these blocks; "" for blocks of 32.
        bytes: Bytes of a block.
    """

    group: int = 32
    scales: tuple[int, int] | None = None
    minimums: int = 0
    has_minimum: bool = False
    values: tuple[int, ...] = ()
    narrower: str = ""
    bytes: int = 0

    @property
    def groups(self) -> int:
        """Groups in a block."""
        return self.block // self.group


NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codes of IQ4_NL and IQ4_XS (kvalues_iq4nl of ggml-common.h): dense where weights are."""

BLOCK_TYPES: Registry[BlockType] = Registry("block type")


def _add_type(name: str, bits: int, low: int, size: int, minimum: bool = False, values: tuple[int, ...] = ()) -> None:
    high = low + (1 << bits) - 1
    low, high = (values[0], values[-1]) if values else (low, high)
    BLOCK_TYPES.register(
        name,
        BlockType(
            name, "int", bits, low, high, block=32, torch="uint8", has_minimum=minimum, values=values, bytes=size
        ),
    )


def _two(
    name: str,
    bits: int,
    low: int,
    group: int,
    scales: tuple[int, int],
    narrower: str,
    size: int,
    minimums: int = 0,
    values: tuple[int, ...] = (),
) -> None:
    high = low + (1 << bits) - 1
    low, high = (values[0], values[-1]) if values else (low, high)
    row = BlockType(
        name, "int", bits, low, high, block=256, torch="uint8", group=group, scales=scales, minimums=minimums,
        has_minimum=minimums > 0, values=values, narrower=narrower, bytes=size,
    )  # fmt: skip
    BLOCK_TYPES.register(name, row)


_add_type("q4_0", 4, -8, 18)
_add_type("q4_1", 4, 0, 20, minimum=True)
_add_type("q5_0", 5, -16, 22)
_add_type("q5_1", 5, 0, 24, minimum=True)
_add_type("q8_0", 8, -128, 34)
_add_type("iq4_nl", 4, 0, 18, values=NL_VALUES)
_two("q2_k", 2, 0, 16, (0, 15), "iq4_nl", 84, minimums=15)
_two("q3_k", 3, -4, 16, (-32, 31), "iq4_nl", 110)
_two("q4_k", 4, 0, 32, (0, 63), "q5_0", 144, minimums=63)
_two("q5_k", 5, 0, 32, (0, 63), "q5_1", 176, minimums=63)
_two("q6_k", 6, -32, 16, (-128, 127), "q8_0", 210)
_two("iq4_xs", 4, 0, 32, (-32, 31), "iq4_nl", 136, values=NL_VALUES)


def fitting_block_type(name: str, columns: int) -> str | None:
    """The block type that llama.cpp writes a tensor in: `name`, or a type for shorter rows; None if none divides them.

    Args:
        name: In `BLOCK_TYPES`.
        columns: Values in a row.
    """
    while columns % BLOCK_TYPES[name].block:
        if not BLOCK_TYPES[name].narrower:
            return None
        name = BLOCK_TYPES[name].narrower
    return name


def block_codes(x: Array, scale: Array, minimum: Array | None, dtype: BlockType) -> Array:
    """The nearest q of each value, as a float.

    Args:
        x: float32.
        scale, minimum: d * c and e * k of each value, or what broadcasts against x; a scale of 0 gives the q of 0.
        dtype: The type.
    """
    xp = namespace(x)
    if minimum is not None:
        x = x + minimum
    x = x * xp.where(scale == 0, 0.0, 1.0 / xp.where(scale == 0, 1.0, scale))
    if not dtype.values:
        return xp.clip(xp.round(x), dtype.min, dtype.max)
    # Half the sum of two codes is a multiple of 1/2: cells of that width lie on one side of it, and a look-up finds q.
    cells = xp.floor(2 * xp.clip(x, dtype.min, dtype.max)) - 2 * dtype.min
    nearest = like(_nearest(dtype.values), x)
    return nearest[astype(xp.where(cells == cells, cells, 0.0), "int64")]


@cache
def _nearest(values: tuple[int, ...]) -> NumpyArray:
    """The nearest value of each cell [i / 2, (i + 1) / 2) from the first value on; float32."""
    table = np.array(values, np.float32)
    cells = np.arange(2 * values[0], 2 * values[-1] + 1) / 2
    nearest: NumpyArray = table[np.searchsorted((table[1:] + table[:-1]) / 2, cells, side="right")]
    return nearest


def block_values(codes: Array, scale: Array, minimum: Array | None) -> Array:
    """Return the values of codes, in float32."""
    y = codes * scale
    return y if minimum is None else y - minimum
