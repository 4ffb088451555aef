"""Softmax and InstanceNormalization as the DPU computes them, as ONNX functions of float32 steps.

r(v) is v rounded to bfloat16. A step in float32 that is rounded once has the bits of the same step in bfloat16: 24
digits are more than twice 8 and 2.

    Softmax     u = r(x)    k = floor(r(c u))    f = r(u - r(k d))         c = r(1 / ln 2), d = r(ln 2)
                p = r(1 + f r(1 + f r(a + b f)))                           a = 0.486328125, b = 0.21875
                e = r(r(2^k) p)    y = r(e / r(sum e))                     nothing is subtracted: r(x) up to 88
    Instance    u = r(x)    m = mean u    v = mean u^2 - m^2    s = r((v + epsilon)^-1/2)
                y = r(r(scale) r(r(s u) - r(s r(m))) + r(bias))            means in float32, v of them in float64

Types are those of a model in float32.
"""

from __future__ import annotations

SOFTMAX = """
  axis = Constant <value_int: int = @axis> ()
  one = Constant <value_ints: ints = [1]> ()
  axes = Reshape (axis, one)
  c = Constant <value = float {1.4453125}> ()
  d = Constant <value = float {0.69140625}> ()
  a = Constant <value = float {0.486328125}> ()
  b = Constant <value = float {0.21875}> ()
  unit = Constant <value = float {1}> ()
  two = Constant <value = float {2}> ()
  u = r (x)
  cu = Mul (u, c)
  rcu = r (cu)
  k = Floor (rcu)
  kd = Mul (k, d)
  rkd = r (kd)
  rest = Sub (u, rkd)
  f = r (rest)
  bf = Mul (b, f)
  abf = Add (a, bf)
  p2 = r (abf)
  fp2 = Mul (f, p2)
  ofp2 = Add (unit, fp2)
  p1 = r (ofp2)
  fp1 = Mul (f, p1)
  ofp1 = Add (unit, fp1)
  p = r (ofp1)
  power = Pow (two, k)
  rpower = r (power)
  grown = Mul (rpower, p)
  e = r (grown)
  total = ReduceSum <keepdims = 1> (e, axes)
  rtotal = r (total)
  share = Div (e, rtotal)
  y = r (share)
"""

INSTANCE_NORM = """
  epsilon = Constant <value_float: float = @epsilon> ()
  one = Constant <value_ints: ints = [1]> ()
  last = Constant <value_ints: ints = [2]> ()
  view = Constant <value_ints: ints = [0, 0, -1]> ()
  column = Constant <value_ints: ints = [-1, 1]> ()
  none = Constant <value = float {0}> ()
  shape = Shape (x)
  x3 = Reshape (x, view)
  u = r (x3)
  shape3 = Shape (x3)
  three = Constant <value_ints: ints = [3]> ()
  length = Slice (shape3, last, three)
  count = Cast <to = 1> (length)
  total = ReduceSum <keepdims = 1> (u, last)
  m = Div (total, count)
  uu = Mul (u, u)
  squares = ReduceSum <keepdims = 1> (uu, last)
  mm = Div (squares, count)
  wide_m = Cast <to = 11> (m)
  wide_mm = Cast <to = 11> (mm)
  m2 = Mul (wide_m, wide_m)
  wide_v = Sub (wide_mm, m2)
  raw_v = Cast <to = 1> (wide_v)
  v = Max (raw_v, none)
  moved = Add (v, epsilon)
  root = Sqrt (moved)
  inverse = Reciprocal (root)
  s = r (inverse)
  rm = r (m)
  sm = Mul (s, rm)
  rsm = r (sm)
  su = Mul (s, u)
  rsu = r (su)
  centred = Sub (rsu, rsm)
  t = r (centred)
  weight = r (scale)
  offset = r (bias)
  weights = Reshape (weight, column)
  offsets = Reshape (offset, column)
  wt = Mul (weights, t)
  wto = Add (wt, offsets)
  y3 = r (wto)
  y = Reshape (y3, shape)
"""


def bfloat16_steps(body: str) -> str:
    """A body whose steps `y = r (x)` are casts to bfloat16 and back."""
    lines = []
    for line in body.splitlines():
        result, _, step = line.partition(" = ")
        if step.startswith("r ("):
            lines.append(f"{result}_16 = Cast <to = 16> {step.removeprefix('r ')}")
            line = f"{result} = Cast <to = 1> ({result.strip()}_16)"
        lines.append(line)
    return "\n".join(lines) + "\n"
