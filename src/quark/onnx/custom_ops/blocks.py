"""Block formats as ONNX functions: the bodies of MXQuantizeDequantize and BFPQuantizeDequantize.

x is viewed as (rows, block, inner), padded with zeros, and each block gets the step of core/scales.py:

    p      = 2^floor(log2 amax) = q - (1 - u) q,  q = (1/(2u) + 1) amax     (Rump's unit in the first place, u = 2^-53)
    OCP    step = max(2^-127, min(p, 2^127) 2^-emax)                        y = round_to(x / step) step
    bfp16  step = 2^-6 p, doubled where the largest value would round to 128 steps
    mx*    step = 2^(2 - bits) p, halved for a pair whose own maximum is below p

A float element is rounded to a multiple of its own step, found by the same four operations in float32 (u = 2^-24).
Powers of two are exact, and so is every product with one: the result has the bits of core/quantize.py. A NaN makes
its block NaN, as the NaN of E8M0 does; an infinity takes the largest exponent.

Two traps of ONNX Runtime: with a scalar, (n, 32, 1) is a hundred times slower than with a constant of rank 3; and a
product with 1 - u is optimised away, so that it is -(1 - u) here.
"""

from __future__ import annotations

from quark.core.dtypes import MICRO_EXPONENT, Dtype
from quark.core.rounding import RoundType

VIEW = """
  axis = Constant <value_int: int = @axis> ()
  size = Constant <value_int: int = @block_size> ()
  zero = Constant <value_ints: ints = [0]> ()
  one = Constant <value_ints: ints = [1]> ()
  shape = Shape (x)
  dims = Shape (shape)
  rank = Max (dims, one)
  at = Mod (axis, rank)
  next = Add (at, one)
  before = Slice (shape, zero, at)
  length = Slice (shape, at, next)
  after = Slice (shape, next, rank)
  before1 = Concat <axis = 0> (one, before)
  after1 = Concat <axis = 0> (one, after)
  outer = ReduceProd (before1)
  inner = ReduceProd (after1)
  up = Add (length, size)
  last = Sub (up, one)
  groups = Div (last, size)
  padded = Mul (groups, size)
  missing = Sub (padded, length)
  rows = Mul (outer, groups)
  block = Reshape (size, one)
  flat = Concat <axis = 0> (outer, length, inner)
  gap = Concat <axis = 0> (outer, missing, inner)
  view = Concat <axis = 0> (rows, block, inner)
  x3 = Reshape <allowzero = 1> (x, flat)
  tail = ConstantOfShape (gap)
  whole = Concat <axis = 1> (x3, tail)
  v = Reshape <allowzero = 1> (whole, view)
"""
UNVIEW = """
  wide = Concat <axis = 0> (outer, padded, inner)
  y3 = Reshape <allowzero = 1> (fake, wide)
  cut = Slice (y3, zero, length, one)
  y = Reshape <allowzero = 1> (cut, shape)
"""
EXPONENT = """
  high = {ReduceMax} (v{axes})
  low = {ReduceMin} (v{axes})
  total = {ReduceL1} (v{axes})
  bad = IsNaN (total)
  down = Neg (low)
  amax = Max (high, down)
  amax64 = Cast <to = 11> (amax)
  finite = Min (amax64, infinite)
  q = Mul (finite, ufp64)
  r = Mul (q, minus64)
  ufp = Add (q, r)
  p = Max (ufp, tiny)
"""
OCP_STEP = """
  top = Min (p, largest)
  shared = Mul (top, emax)
  step64 = Max (shared, least)
"""
BFP_STEP = """
  step6 = Mul (p, unit)
  step5 = Mul (step6, two)
  high64 = Cast <to = 11> (high)
  limit = Mul (step6, tie)
  rounds = GreaterOrEqual (high64, limit)
  endless = GreaterOrEqual (p, infinite)
  over = Or (rounds, endless)
  step64 = Where (over, step5, step6)
"""
TO_FLOAT = """
  step32 = Cast <to = 1> (step64)
  step = Where (bad, total, step32)
"""
# Pairs: where p is the smallest exponent a pair of subnormals is not below it.
PAIRS = """
  half = Constant <value_int: int = 2> ()
  pairs_in = Div (block, half)
  two_ = Reshape (half, one)
  pair_rows = Mul (rows, pairs_in)
  pair_view = Concat <axis = 0> (pair_rows, two_, inner)
  block_view = Concat <axis = 0> (rows, pairs_in, inner)
  step_view = Concat <axis = 0> (pair_rows, one, inner)
  step64 = Mul (p, unit)
  normal = Greater (p, tiny)
  bound64 = Where (normal, p, none)
  bound = Cast <to = 1> (bound64)
  step32 = Cast <to = 1> (step64)
  whole_step = Where (bad, total, step32)
  half_step = Mul (whole_step, halved)
  pairs = Reshape <allowzero = 1> (v, pair_view)
  magnitude = Abs (pairs)
  pair_max = {ReduceMax} (magnitude{axes})
  own = Reshape <allowzero = 1> (pair_max, block_view)
  shifts = Less (own, bound)
  chosen = Where (shifts, half_step, whole_step)
  step = Reshape <allowzero = 1> (chosen, step_view)
"""
INTEGER = """
  scaled = Div ({v}, step)
{round}
  code = Clip (rounded, qmin, qmax)
  fake = Mul (code, step)
"""
FLOAT = """
  scaled_ = Div ({v}, step)
  held = Clip (scaled_, qmin, qmax)
  fq = Mul (held, ufp32)
  fr = Mul (fq, minus32)
  fs = Add (fq, fr)
  fa = Abs (fs)
  spacing = Max (fa, smallest)
  scaled = Div (held, spacing)
{round}
  code = Mul (rounded, spacing)
  fake = Mul (code, step)
"""
ROUND = {
    RoundType.half_even: "  rounded = Round (scaled)",
    # The number below 0.5: adding 0.5 itself would round 0.49999997 up to 1.
    RoundType.round: """
  absolute = Abs (scaled)
  nudged = Add (absolute, below_half)
  floor = Floor (nudged)
  sign = Sign (scaled)
  rounded = Mul (floor, sign)
""",
}


def block_body(dtype: Dtype, rounding: RoundType, opset: int) -> str:
    """The text of the function that fake-quantizes x in blocks of `dtype`."""
    micro = dtype.name in MICRO_EXPONENT
    step = PAIRS if micro else (BFP_STEP if dtype.name == "bfp16" else OCP_STEP) + TO_FLOAT
    elements = (FLOAT if dtype.is_float else INTEGER).replace("{v}", "pairs" if micro else "v")
    body = VIEW + _constants(dtype) + EXPONENT + step + elements.replace("{round}", ROUND[rounding]) + UNVIEW
    # Reductions take their axes as an input from opset 18 on.
    names = ("ReduceMax", "ReduceMin", "ReduceL1")
    for name in names:
        body = body.replace(f"{{{name}}}", name if opset >= 18 else f"{name} <axes = [1]>")
    return body.replace("{axes}", ", one" if opset >= 18 else "")


def _constants(dtype: Dtype) -> str:
    emax = 2.0**-dtype.emax
    doubles = {
        "infinite": 2.0**128,
        "ufp64": 2.0**52 + 1,
        "minus64": 2.0**-53 - 1,
        "tiny": 2.0**-127,
        "largest": 2.0**127,
        "emax": emax,
        # An integer element has its 2^-emax below the E8M0 scale, which alone is bounded.
        "least": 2.0**-127 * (1 if dtype.is_float else emax),
        "unit": 2.0 ** (2 - dtype.bits),
        "two": 2.0,
        "tie": 127.5,
        "none": 0.0,
    }
    floats = {
        "halved": 0.5,
        "below_half": 0.5 - 2.0**-25,
        "ufp32": (2.0**23 + 1) * 2.0**-dtype.mbits,
        "minus32": 2.0**-24 - 1,
        "smallest": 2.0 ** (dtype.emin - dtype.mbits) if dtype.is_float else 0.0,
    }
    # Clip takes scalars.
    limits = {"qmin": dtype.min, "qmax": dtype.max}
    lines = [f"  {name} = Constant <value = double[1,1,1] {{{value!r}}}> ()" for name, value in doubles.items()]
    lines += [f"  {name} = Constant <value = float[1,1,1] {{{value!r}}}> ()" for name, value in floats.items()]
    lines += [f"  {name} = Constant <value = float {{{float(value)!r}}}> ()" for name, value in limits.items()]
    return "\n".join(lines) + "\n"
