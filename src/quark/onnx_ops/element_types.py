"""Which ONNX type holds the codes of an element type, and since which opset QuantizeLinear or DequantizeLinear has it.

Derived from the rows of core/dtypes.py, so that a new row needs nothing here:

    types that ONNX has at opset 21   themselves
    other floats                      the narrowest unsigned integer that holds their bit pattern
    integers, shared exponents        the narrowest integer that holds [min, max]
    micro-exponents (mx4, mx6, mx9)   the narrowest that holds twice that: they are stored in half steps
"""

from __future__ import annotations

from quark.core.dtypes import MICRO_EXPONENT, Dtype
from quark.errors import NotSupportedError

PER_CHANNEL_OPSET = 13
"""The first with a scale for each channel: no older Q/DQ is written."""
BLOCKED_OPSET = 21
"""The first with a scale for each block (`block_size`); no newer form is written."""

FIRST_OPSET = {
    "INT8": PER_CHANNEL_OPSET,
    "UINT8": PER_CHANNEL_OPSET,
    "INT32": PER_CHANNEL_OPSET,
    "FLOAT8E4M3FN": 19,
    "FLOAT8E5M2": 19,
    "INT4": 21,
    "UINT4": 21,
    "INT16": 21,
    "UINT16": 21,
}
"""ONNX type -> the first opset whose DequantizeLinear has it, and, INT32 apart, whose QuantizeLinear."""
_CAST_TYPES = ("FLOAT16", "BFLOAT16")
"""ONNX types of which Q/DQ is a pair of Cast."""
_INTEGER_BITS = (4, 8, 16, 32)


def code_type(dtype: Dtype, least_bits: int = 4) -> str:
    """The ONNX type that holds the codes of an element type: "INT4", "UINT8", "FLOAT8E4M3FN" ...

    Args:
        dtype: The element type.
        least_bits: The narrowest integer to use; 8 for runtimes without INT4 and UINT4.

    Raises:
        NotSupportedError: Integers of more than 32 bits.
    """
    is_known = dtype.onnx in FIRST_OPSET or dtype.onnx in _CAST_TYPES
    if is_known and (dtype.is_float or dtype.bits >= least_bits):
        return dtype.onnx
    steps = 2 if dtype.name in MICRO_EXPONENT else 1
    low, high = (0, (1 << dtype.bits) - 1) if dtype.is_float else (steps * dtype.min, steps * dtype.max)
    for bits in _INTEGER_BITS:
        largest = (1 << (bits - 1)) - 1 if low < 0 else (1 << bits) - 1
        if bits >= least_bits and high <= largest and low >= -largest - 1:
            return f"{'INT' if low < 0 else 'UINT'}{bits}"
    raise NotSupportedError(
        f"{dtype}: no integer that ONNX can dequantize holds {low:.0f}..{high:.0f}; possible: up to 32 bits."
    )
