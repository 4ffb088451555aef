"""Block formats as ONNX functions: the bodies of MXQuantizeDequantize and BFPQuantizeDequantize.

x is viewed as (rows, block, inner), padded with zeros, and each block gets the step of core/scales.py:

    p      = 2^floor(log2 amax) = q - (1 - u) q,  q = (1/(2u) + 1) amax     (Rump's unit in the first place, u = 2^-53)
    OCP    step = max(2^-127, min(p, 2^127) 2^-emax)                        y = round_to(x / step) step
           p is that of amax + 2^-(mbits + 1) p by the rule "even", and twice as large by "ceil" where p < amax
    bfp16  step = 2^-6 p, doubled where the largest value would round to 128 steps; onnx_bfp16 clamps instead
    mx*    step = 2^(2 - bits) p, halved for a pair whose own maximum is below p

A float element is rounded to a multiple of its own step, found by the same four operations in float32 (u = 2^-24).
Powers of two are exact, and so is every product with one: the result has the bits of core/quantize.py. A NaN makes
its block NaN, as the NaN of E8M0 does; an infinity takes the largest exponent. For normal values below 2^127 whose
block reaches 2^-110 these are the values of the documented operators; of smaller ones those flush subnormals of mx* to
zero, and have scales below E8M0.

There are two views. One computes everything from the shape of x. Where the file says that blocks fill the axis, and
how many values lie after it, the view is a constant: half of the nodes, which is half of the time to load a model.

Two traps of ONNX Runtime: with a scalar, (n, 32, 1) is a hundred times slower than with a constant of rank 3; and a
product with 1 - u is optimised away, so that it is -(1 - u) here.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.core.dtypes import MICRO_EXPONENT, Dtype
from quark.core.rounding import RoundType
from quark.core.spec import ScaleRule

VIEW = """
  axis = Constant <value_int: int = @axis> ()
  size = Constant <value_int: int = @block_size> ()
  zero = Constant <value_ints: ints = [0]> ()
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
  short = Neg (length)
  missing = Mod (short, size)
  padded = Add (length, missing)
  groups = Div (padded, size)
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
_PAIR_VIEW = """
  pair = Constant <value_ints: ints = [2]> ()
  in_block = Div (block, pair)
  pair_rows = Mul (rows, in_block)
  pair_view = Concat <axis = 0> (pair_rows, pair, inner)
  block_view = Concat <axis = 0> (rows, in_block, inner)
  step_view = Concat <axis = 0> (pair_rows, one, inner)
"""
# Where nothing lies after the axis, blocks are the last axis: ONNX Runtime sums along it seventy times faster.
_ALIGNED_VIEW = """
  view = Constant <value_ints: ints = [{block}]> ()
  v = Reshape (x, view)
"""
ALIGNED_UNVIEW = """
  shape = Shape (x)
  y = Reshape <allowzero = 1> (fake, shape)
"""
_ALIGNED_PAIR_VIEW = """
  pair_view = Constant <value_ints: ints = [{pair}]> ()
  block_view = Constant <value_ints: ints = [{pairs}]> ()
  step_view = Constant <value_ints: ints = [{single}]> ()
"""
# How x becomes blocks, and pairs; how they become y; the sum of a block.
ALIGNED = (_ALIGNED_VIEW, _ALIGNED_PAIR_VIEW, ALIGNED_UNVIEW, "ReduceSum (magnitude, reduced)")
_ANY_SHAPE = (VIEW, _PAIR_VIEW, UNVIEW, "{ReduceSumSquare} (v{axes})")
# `base` is the step of the block, as a float64, before what bfp16 and pairs add to it.
BASE = """
  one = Constant <value_ints: ints = [1]> ()
  reduced = Constant <value_ints: ints = [{axis}]> ()
{view}
  magnitude = Abs (v)
  amax = {ReduceMax} (magnitude{axes})
  total = {Total}
  bad = IsNaN (total)
  amax64 = Cast <to = 11> (amax)
  capped = Min (amax64, cap)
  q = Mul (capped, ufp64)
  r = Mul (q, minus64)
  unit = Add (q, r)
{rule}
  base = Max ({unit}, least)
"""
RULES = {
    ScaleRule.floor: "",
    ScaleRule.even: """
  nudge = Mul (unit, half_ulp)
  bumped = Add (capped, nudge)
  q_up = Mul (bumped, ufp64)
  r_up = Mul (q_up, minus64)
  chosen_unit = Add (q_up, r_up)
""",
    ScaleRule.ceil: """
  power = Mul (unit, upward)
  above = Greater (capped, power)
  twice = Mul (unit, two)
  higher = Where (above, twice, unit)
  chosen_unit = Min (higher, top)
""",
}
_OCP_STEP = """
  step32 = Cast <to = 1> (base)
  step = Where (bad, total, step32)
"""
_BFP_STEP = """
  doubled = Mul (base, two)
  high = {ReduceMax} (v{axes})
  high64 = Cast <to = 11> (high)
  limit = Mul (base, tie)
  rounds = GreaterOrEqual (high64, limit)
  endless = GreaterOrEqual (base, most)
  over = Or (rounds, endless)
  chosen = Where (over, doubled, base)
  step32 = Cast <to = 1> (chosen)
  step = Where (bad, total, step32)
"""
# A pair of subnormals is not below a block of subnormals: both have the smallest exponent.
_PAIR_STEP = """
{pair_view}
  p = Mul (base, upward)
  normal = Greater (base, least)
  bound64 = Where (normal, p, none)
  bound = Cast <to = 1> (bound64)
  step32 = Cast <to = 1> (base)
  whole_step = Where (bad, total, step32)
  half_step = Mul (whole_step, halved)
  pairs = Reshape <allowzero = 1> (v, pair_view)
  pair_magnitude = Abs (pairs)
  pair_max = {ReduceMax} (pair_magnitude{axes})
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
# {p} is a prefix of names, so that a body may round twice: scales and elements.
ROUND_TO = """
  {p}clipped = Clip ({p}scaled_, {p}qmin, {p}qmax)
  {p}fq = Mul ({p}clipped, {p}ufp32)
  {p}fr = Mul ({p}fq, {p}minus32)
  {p}fs = Add ({p}fq, {p}fr)
  {p}fa = Abs ({p}fs)
  {p}spacing = Max ({p}fa, {p}smallest)
  {p}scaled = Div ({p}clipped, {p}spacing)
{round}
  {p}code = Mul ({p}rounded, {p}spacing)
"""
FLOAT = f"""
  scaled_ = Div ({{v}}, step)
{ROUND_TO.replace("{p}", "")}
  fake = Mul (code, step)
"""
ROUND = {
    RoundType.floor: "  rounded = Floor (scaled)",
    RoundType.half_even: "  rounded = Round (scaled)",
    RoundType.half_up: """
  halves = Add (scaled, scaled)
  under = Floor (halves)
  next_half = Add (under, unity_)
  nearest = Mul (next_half, half_)
  rounded = Floor (nearest)
""",
    # The number below 0.5: adding 0.5 itself would round 0.49999997 up to 1.
    RoundType.round: """
  absolute = Abs (scaled)
  nudged = Add (absolute, below_half)
  floor = Floor (nudged)
  sign = Sign (scaled)
  rounded = Mul (floor, sign)
""",
}


def block_body(
    dtype: Dtype,
    rounding: RoundType,
    opset: int,
    size: int = 0,
    inner: int | None = None,
    rule: ScaleRule = ScaleRule.floor,
) -> str:
    """The text of the function that fake-quantizes x in blocks of `dtype`.

    Args:
        dtype: An element type of a block format.
        rounding: Of the codes.
        opset: Of the model: reductions take their axes as an input from 18 on.
        size: Block length, where `inner` is given.
        inner: How many values lie after the axis, which blocks fill; None for any shape.
        rule: Of an E8M0 scale.
    """
    micro, aligned = dtype.name in MICRO_EXPONENT, inner is not None
    step = _PAIR_STEP if micro else _BFP_STEP if dtype.name == "bfp16" else _OCP_STEP
    view, pair_view, unview, total = ALIGNED if aligned else _ANY_SHAPE
    body = BASE + step + (FLOAT if dtype.is_float else INTEGER) + unview
    shape = "1, -1, {}" if inner == 1 else f"-1, {{}}, {inner}"
    reduction, axes = ("", ", reduced") if opset >= 18 else (" <axes = [{axis}]>", "")
    words = {
        "rule": RULES[rule],
        "unit": "unit" if rule is ScaleRule.floor else "chosen_unit",
        "view": view,
        "pair_view": pair_view,
        "round": ROUND[rounding],
        "v": "pairs" if micro else "v",
        "Total": total,
        "ReduceMax": f"ReduceMax{reduction}",
        "ReduceSumSquare": f"ReduceSumSquare{reduction}",
        "axes": axes,
        "axis": 2 if inner == 1 else 1,
        "block": shape.format(size),
        "pairs": shape.format(size // 2),
        "pair": shape.format(2),
        "single": shape.format(1),
    }
    for word, value in words.items():
        body = body.replace(f"{{{word}}}", str(value))
    return _constants(dtype) + body


def _constants(dtype: Dtype) -> str:
    """The numbers of the body. An OCP integer has its 2^-emax below the E8M0 scale, which alone is bounded."""
    ocp = not dtype.is_block or dtype.name.endswith("mxint8")
    down = 2.0**-dtype.emax if ocp else 2.0 ** (2 - dtype.bits)
    doubles = {
        "cap": 2.0 ** (127 if ocp else 128),
        "ufp64": (2.0**52 + 1) * down,
        "minus64": 2.0**-53 - 1,
        "least": 2.0**-127 * (1 if dtype.is_float else down),
        "two": 2.0,
        "tie": 127.5,
        "most": 2.0**128 * down,
        "upward": 1 / down,
        "top": 2.0**127 * down,
        "half_ulp": 2.0 ** -((dtype.mbits if dtype.is_float else 8) + 1) / down,
        "none": 0.0,
    }
    return constants(doubles, "double[1,1,1]") + constants({"halved": 0.5}) + element_constants(dtype)


def element_constants(dtype: Dtype, prefix: str = "") -> str:
    """The numbers of rounding to an element type."""
    numbers = {"below_half": 0.5 - 2.0**-25, "minus32": 2.0**-24 - 1, "half_": 0.5, "unity_": 1.0}
    if dtype.is_float:
        numbers |= {"ufp32": (2.0**23 + 1) * 2.0**-dtype.mbits, "smallest": 2.0 ** (dtype.emin - dtype.mbits)}
    lines = constants({prefix + name: value for name, value in numbers.items()})
    # Clip takes scalars.
    return lines + constants({f"{prefix}qmin": dtype.min, f"{prefix}qmax": dtype.max}, "float")


def constants(values: Mapping[str, float], kind: str = "float[1,1,1]") -> str:
    """Lines that make named numbers."""
    return "".join(f"  {name} = Constant <value = {kind} {{{float(value)!r}}}> ()\n" for name, value in values.items())
