"""The element types: one row each.

An integer type holds the integers `min..max`. A float type ExMy (1 sign bit, x exponent bits, y mantissa bits,
bias b) holds (-1)^s * 2^(E-b) * (1 + M/2^y), and 2^(1-b) * M/2^y where E = 0 (OCP OFP8 and OCP MX v1.0 sections
5.3.1 to 5.3.4). `max` is the largest finite value: fp8_e4m3 is the "fn" variant (448), fp6 and fp4 have no
NaN and no infinity. The codes of the shared-exponent formats (mx4, mx6, mx9, bfp16, mxint8) are small integers
whose step is a power of two shared by a block: `block` is its length, and scales.py has the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.core.names.registry import Registry


@dataclass(frozen=True)
class Dtype:
    """One element type.

    Attributes:
        name: The name used in configs, schemes and files.
        kind: "int" or "float".
        bits: Width of one stored code.
        min, max: Smallest and largest finite value.
        ebits, mbits: Exponent and mantissa bits of a float type.
        bias: Exponent bias of a float type.
        block: Block length of a shared-exponent format, else 0.
        torch: torch dtype that stores one code (or packed codes).
        onnx: TensorProto name of the type, "" where ONNX has none.
    """

    name: str
    kind: str
    bits: int
    min: float
    max: float
    ebits: int = 0
    mbits: int = 0
    bias: int = 0
    block: int = 0
    torch: str = ""
    onnx: str = ""

    @property
    def is_float(self) -> bool:
        """True where values are floats (else integers)."""
        return self.kind == "float"

    @property
    def is_block(self) -> bool:
        """True where a power-of-two step shared by a block is part of the format."""
        return self.block > 0

    @property
    def signed(self) -> bool:
        """True where negative values exist."""
        return self.min < 0

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that the type holds (OCP MX: emax of the element)."""
        return (int(self.max)).bit_length() - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number of a float type."""
        return 1 - self.bias

    def __str__(self) -> str:
        return self.name


def _int(name: str, bits: int, signed: bool, torch: str, onnx: str) -> Dtype:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return Dtype(name, "int", bits, low, high, torch=torch, onnx=onnx)


def _float(name: str, ebits: int, mbits: int, maximum: float, torch: str, onnx: str, signed: bool = True) -> Dtype:
    bits = int(signed) + ebits + mbits
    low = -maximum if signed else 0.0
    bias = (1 << (ebits - 1)) - 1
    return Dtype(name, "float", bits, low, maximum, ebits, mbits, bias, torch=torch, onnx=onnx)


def _block(name: str, bits: int, low: int, high: int, block: int, torch: str) -> Dtype:
    return Dtype(name, "int", bits, low, high, block=block, torch=torch)


DTYPES: Registry[Dtype] = Registry("dtype")
for _row in [
    _int("int2", 2, True, "int32", "INT2"),
    _int("int3", 3, True, "uint8", ""),
    _int("int4", 4, True, "int32", "INT4"),
    _int("int8", 8, True, "int8", "INT8"),
    _int("int16", 16, True, "int16", "INT16"),
    _int("int32", 32, True, "int32", "INT32"),
    _int("uint2", 2, False, "uint8", "UINT2"),
    _int("uint4", 4, False, "int32", "UINT4"),
    _int("uint8", 8, False, "uint8", "UINT8"),
    _int("uint16", 16, False, "uint16", "UINT16"),
    _int("uint32", 32, False, "uint32", "UINT32"),
    _float("float16", 5, 10, 65504.0, "float16", "FLOAT16"),
    _float("bfloat16", 8, 7, float.fromhex("0x1.fep127"), "bfloat16", "BFLOAT16"),
    _float("fp8_e4m3", 4, 3, 448.0, "float8_e4m3fn", "FLOAT8E4M3FN"),
    _float("fp8_e5m2", 5, 2, 57344.0, "float8_e5m2", "FLOAT8E5M2"),
    _float("fp8_e5m3", 5, 3, 114688.0, "uint8", "", signed=False),
    _float("fp6_e3m2", 3, 2, 28.0, "uint8", ""),
    _float("fp6_e2m3", 2, 3, 7.5, "uint8", ""),
    _float("fp4_e2m1", 2, 1, 6.0, "uint8", "FLOAT4E2M1"),
    _block("mxint8", 8, -127, 127, 32, "int8"),
    _block("mx4", 3, -3, 3, 16, "uint8"),
    _block("mx6", 5, -15, 15, 16, "uint8"),
    _block("mx9", 8, -127, 127, 16, "int8"),
    _block("bfp16", 8, -128, 127, 8, "int8"),
    # As the ONNX operators have them: the one clamps where the other has a larger step, the other has one code more.
    _block("onnx_bfp16", 8, -127, 127, 8, "int8"),
    _block("onnx_mxint8", 8, -128, 127, 32, "int8"),
]:
    DTYPES.register(_row.name, _row)

MICRO_EXPONENT = frozenset({"mx4", "mx6", "mx9"})
"""Formats whose pairs carry one more exponent bit below the block's (microscaling "MX" of the 2023 paper)."""
ONNX_ONLY = frozenset({"onnx_bfp16", "onnx_mxint8"})
"""Types that no layer in PyTorch has: there `bfp16` and `mxint8` stand for them."""


def dtype(name: str | Dtype) -> Dtype:
    """Return the row named `name`. Raises ConfigError that names the nearest types."""
    return name if isinstance(name, Dtype) else DTYPES[name]
