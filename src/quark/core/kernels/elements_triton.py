"""How one value becomes a code, in triton's language: what all kernels share.

Codes are those of `core/quantize.py` bit for bit: division is that of IEEE 754, no product is fused with a sum
(`EXACT`), and the sum that rounds holds numbers below 2^22 alone.

Files in triton's language are imported through `kernel_module` alone, when a tensor is on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import triton
import triton.language as tl

from quark.core.array import Array, namespace
from quark.core.kernels.element_rule import ElementRule

EXACT = {"enable_fp_fusion": False}
"""Options of a launch."""


@triton.jit
def float_rounded(x, low: tl.constexpr, high: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr):
    """The nearest value of a float type."""
    x = tl.where(x < low, low, tl.where(x > high, high, x))
    bits = x.to(tl.int32, bitcast=True)
    magic = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.where(magic < smallest_power, smallest_power, magic) * (1.5 * 2.0 ** (23 - float_bits))
    rounded = (x + magic) - magic
    rounded_bits = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sign = bits & -0x80000000
    return (rounded_bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def integer_rounded(x):
    """The nearest integer, ties to even; 2^20 of what is beyond, as codes and zero points of 16 bits are below."""
    x = tl.where(x < -1048576.0, -1048576.0, tl.where(x > 1048576.0, 1048576.0, x))
    code = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: the last bit of the sum is 1, and ties go to even
    # The sum makes 0 of all that is rounded to 0, where rounding keeps a sign.
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return ((code.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def quantized(
    v, s, z,
    low: tl.constexpr, high: tl.constexpr, divide: tl.constexpr, zero_before: tl.constexpr, zero_after: tl.constexpr,
    zero_decoded: tl.constexpr, float_bits: tl.constexpr, smallest_power: tl.constexpr,
):  # fmt: skip
    """The value of the code of v under an `ElementRule`, with its scale and zero point, all of one shape."""
    if float_bits >= 0:
        x = tl.div_rn(v, tl.where(s == 0.0, 1.0, s))
        return float_rounded(x, low, high, float_bits, smallest_power) * s
    if divide:
        x = tl.div_rn(v, s)
    else:
        x = v * tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    if zero_before:
        x = x + z
    code = integer_rounded(x)
    if zero_after:
        code = code + z
    code = tl.where(code < low, low, tl.where(code > high, high, code))
    if zero_decoded:
        code = code - z
    return code * s


def constants_of(rule: ElementRule) -> dict[str, Any]:
    """The arguments of the kernels that say how values become codes."""
    return {
        "low": float(rule.min), "high": float(rule.max), "divide": bool(rule.divide),
        "zero_before": bool(rule.zero_before), "zero_after": bool(rule.zero_after),
        "zero_decoded": bool(rule.zero_decoded), "float_bits": rule.float_bits,
        "smallest_power": float(rule.smallest_power),
    }  # fmt: skip


def on_device_of(x: Array) -> AbstractContextManager[Any]:
    """Within: kernels are launched on the device of x, whichever is the current one."""
    manager: AbstractContextManager[Any] = nullcontext()
    if x.device.type == "cuda":
        manager = namespace(x).cuda.device(x.device)
    return manager
