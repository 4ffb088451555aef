"""Scalar formats as ONNX functions: the bodies of ExtendedQuantizeLinear and ExtendedDequantizeLinear.

    16-bit floats   q = cast(x / scale)                                              y = q scale
    integers        q = clip(round_half_even(x (1 / scale)) + zero), NaN -> zero     y = (q - zero) scale

Casts follow IEEE 754: what passes the largest value becomes infinite; the zero point of a float names its type only.
Integers compute as core/quantize.py does, in float32 up to 16 bits and in float64 beyond (ONNX Runtime's own Clip of
int64 is wrong past 2^31). The reciprocal is written -(-1 / scale): ONNX Runtime turns x (1 / scale) into x / scale.

Three bodies for each type: "cast" where the scale is 1 (floats), which is one Cast and nothing else; "tensor" with one
scale; and "axis" with one for each index of an axis.
"""

from __future__ import annotations

from onnx import TensorProto

from quark.core.dtypes import Dtype
from quark.onnx_ops.element_types import code_type

_AXIS = """
  axis = Constant <value_int: int = @axis> ()
  one = Constant <value_ints: ints = [1]> ()
  rest = Constant <value_ints: ints = [-1]> ()
  shape = Shape (x)
  dims = Shape (shape)
  rank = Max (dims, one)
  at = Mod (axis, rank)
  left = Sub (rank, at)
  after = Sub (left, one)
  ones = ConstantOfShape <value = int64[1] {1}> (after)
  column = Concat <axis = 0> (rest, ones)
  s = Reshape (scale, column)
  z = Reshape (flat_zero, column)
"""
_QUANTIZE_FLOAT = """
  scaled = Div (x, s)
  y = Cast <to = {to}> (scaled)
"""
_DEQUANTIZE_FLOAT = """
  code = Cast <to = 1> (x)
  y = Mul (code, s)
"""
_QUANTIZE_INTEGER = """
  minus = Constant <value = {type} {-1}> ()
  low = Constant <value = {type} {{min}}> ()
  high = Constant <value = {type} {{max}}> ()
  opposite = Div (minus, s)
  inverse = Neg (opposite)
  scaled = Mul ({x}, inverse)
  rounded = Round (scaled)
  moved = Add (rounded, z)
  bad = IsNaN (x)
  known = Where (bad, z, moved)
  code = Clip (known, low, high)
  y = Cast <to = {to}> (code)
"""
_DEQUANTIZE_INTEGER = """
  code = Cast <to = {work}> (x)
  moved = Sub (code, z)
  {y} = Mul (moved, s)
"""


def linear_body(dtype: Dtype, kind: str, quantizes: bool) -> str:
    """The text of the function that quantizes to, or dequantizes from, `dtype`."""
    to, wide = TensorProto.DataType.Value(code_type(dtype)), dtype.bits > 16
    if kind == "cast":
        return f"  y = Cast <to = {to if quantizes else 1}> (x)\n"
    body = (_QUANTIZE_FLOAT, _DEQUANTIZE_FLOAT) if dtype.is_float else (_QUANTIZE_INTEGER, _DEQUANTIZE_INTEGER)
    text = _operands(kind, wide) + body[0 if quantizes else 1]
    # ONNX Runtime trips over a Cast from float to float, so that there is none.
    if wide:
        text = "  wide_x = Cast <to = 11> (x)\n" + text + "  y = Cast <to = 1> (wide_y)\n" * (not quantizes)
    words: dict[str, object] = {
        "x": "wide_x" if wide else "x",
        "y": "wide_y" if wide else "y",
        "work": 11 if wide else 1,
    }
    words |= {"to": to, "type": "double" if wide else "float", "min": float(dtype.min), "max": float(dtype.max)}
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", str(value))
    return text


def _operands(kind: str, wide: bool) -> str:
    """Scale s and zero point z, in the type of the arithmetic and shaped to broadcast."""
    if kind == "tensor":
        scale = "  s = Cast <to = 11> (scale)\n" if wide else "  s = Identity (scale)\n"
        return scale + "  z = Cast <to = {work}> (zero_point)\n"
    zero = "  flat_zero = Cast <to = {work}> (zero_point)\n"
    if not wide:
        return zero + _AXIS
    return zero + "  wide_scale = Cast <to = 11> (scale)\n" + _AXIS.replace("(scale,", "(wide_scale,")
