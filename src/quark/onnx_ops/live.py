"""Fake quantization of live tensors as ONNX functions, for what QuantizeLinear does not do.

The range of x gives a scale (core/scales.py), and the scale gives the codes (core/quantize.py), all in float32:

    integers   scale = max(amax / (steps / 2), eps)
               asymmetric: scale = (high - low) / steps, z = clip(qmin - round(low / scale))
    floats     scale = amax / fmax, eps for 0; rounded to its own type; under a second scale s2 * round_to(scale / s2),
               where a code of 0 becomes 1
    codes      q = clip(round(x * (1 / scale)) + z) or round_to(x / scale), y = (q - z) * scale

x is viewed as blocks.py does: (rows, block, inner), the range taken along one axis. QuantizeLinear would not do even
where it has the type: it divides by the scale, and the largest value of each live row, which lies at 127.5 steps, would
be a matter of the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto

from quark.core.dtypes import DTYPES, Dtype
from quark.core.granularity import PerGroup, PerTensor, PerToken
from quark.core.rounding import RoundType
from quark.core.scales import EPS, SCALE_DTYPES, SQRT2_MANTISSA
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import NotSupportedError
from quark.onnx_ops.blocks import (
    ALIGNED_UNVIEW,
    FLOAT,
    ROUND,
    ROUND_TO,
    UNVIEW,
    VIEW,
    constants,
    element_constants,
)
from quark.onnx_ops.element_types import code_type
from quark.onnx_ops.operators import ANY, Operator, inner_size

INTEGER = """
  negative = Div (minus_one, step)
  inverse = Neg (negative)
  scaled = Mul (v, inverse)
{round}
  moved = Add (rounded, offset)
  clipped = Clip (moved, qmin, qmax)
  code = Sub (clipped, offset)
  fake = Mul (code, step)
"""
_FLOAT_ZERO_POINT = """
  negative = Div (minus_one, step)
  inverse = Neg (negative)
  units = Mul (v, inverse)
  scaled = Add (units, offset)
{round}
  clipped = Clip (rounded, qmin, qmax)
  code = Sub (clipped, offset)
  fake = Mul (code, step)
"""


def live(spec: TensorSpec, shape: Sequence[object] | None, given: bool = False) -> Operator:
    """The operator that fake-quantizes a live tensor.

    Args:
        spec: The spec of the tensor; no block format (`block` has those) and no plain cast.
        shape: Of the tensor, as far as known.
        given: The node brings scale and zero point, one for the tensor; else they come from each tensor, and the node
            brings the scale of the scales where the spec has one.

    Raises:
        NotSupportedError: A granularity that has no form here; names it.
    """
    if spec.code_spec is not None or spec.dtype.bits > 16:
        raise NotSupportedError(f"{spec} has no ONNX form for a live tensor.")
    if given and not isinstance(spec.granularity, PerTensor):
        raise NotSupportedError(f"{spec}: static scales of activations are per tensor or per channel in ONNX.")
    inputs: tuple[str, ...] = ("x",)
    if given:
        inputs = ("x", "step", "offset")
    elif spec.scale_spec:
        inputs = ("x", "scale_2")
    split = _split(spec, shape)
    name, attributes = f"{_name(spec)}_{'static' if given else 'dynamic'}", dict[str, int | str]()
    inner: int | None = 1
    if isinstance(split, PerGroup):
        inner = inner_size(split, shape)
        name += f"_{split.size}" if inner is None else f"_{split.size}x{inner}"
        attributes = {"axis": split.axis, "block_size": split.size}
    body = constants({"minus_one": -1.0}) + element_constants(spec.dtype) + _view(split, inner)
    if not given:
        body += _limits(spec) + _range(spec) + _scale(spec)
    body += _rounding_lines(spec) + (ALIGNED_UNVIEW if inner is not None else UNVIEW)
    return Operator(ANY, name, body, attributes, inputs)


def _split(spec: TensorSpec, shape: Sequence[object] | None) -> PerGroup | PerTensor:
    """The granularity, runs of whole rows as groups of their known length."""
    kind = spec.granularity
    if isinstance(kind, PerTensor):
        return kind
    if isinstance(kind, PerToken):
        kind = PerGroup(-1, -1)
    if not isinstance(kind, PerGroup):
        raise NotSupportedError(f"{spec}: dynamic scales are per tensor, token or group in ONNX.")
    length = None if shape is None else shape[kind.axis]
    if kind.size == -1 and not isinstance(length, int):
        raise NotSupportedError(f"{spec}: the length of axis {kind.axis} is not known when the model is exported.")
    return replace(kind, size=length) if kind.size == -1 and isinstance(length, int) else kind


def _name(spec: TensorSpec) -> str:
    parts = [str(spec.dtype)]
    if not spec.dtype.is_float and not spec.symmetric:
        parts.append("float_zero_point" if spec.float_zero_point else "asymmetric")
    if spec.scale_spec is not None:
        parts += ["under", str(spec.scale_spec.dtype)]
    elif spec.scale_type not in (ScaleType.float, ScaleType.float32):
        parts.append(spec.scale_type.value)
    if spec.rounding is not RoundType.half_even:
        parts.append(spec.rounding.name)
    return "_".join(parts)


def _view(split: PerGroup | PerTensor, inner: int | None) -> str:
    """Lines that make v (rows, block, inner), and the axis of the blocks."""
    size = -1 if isinstance(split, PerTensor) else split.size
    if inner is None:
        axis, view = 1, "  one = Constant <value_ints: ints = [1]> ()\n" + VIEW
    else:
        # As in blocks.py: where nothing lies after the axis, blocks are the last axis.
        axis = 2 if inner == 1 else 1
        rows = "1, 1, -1" if size == -1 else f"1, -1, {size}" if inner == 1 else f"-1, {size}, {inner}"
        view = f"  view = Constant <value_ints: ints = [{rows}]> ()\n  v = Reshape (x, view)\n"
    return f"  reduced = Constant <value_ints: ints = [{axis}]> ()\n" + view


def _range(spec: TensorSpec) -> str:
    """Lines from v to amax, or to low and high."""
    if spec.symmetric or spec.dtype.is_float:
        return "  magnitude = Abs (v)\n  amax = ReduceMax (magnitude, reduced)\n"
    ends = "  low_ = ReduceMin (v, reduced)\n  high_ = ReduceMax (v, reduced)\n"
    if spec.float_zero_point:
        return ends + "  low = Identity (low_)\n  high = Identity (high_)\n"
    return ends + "  low = Min (low_, nought)\n  high = Max (high_, nought)\n"


def _limits(spec: TensorSpec) -> str:
    """The numbers that make a scale of a range."""
    dtype = spec.dtype
    steps = dtype.max - dtype.min
    divisor = dtype.max if dtype.is_float else steps / 2 if spec.symmetric else steps
    centre = 0.0 if dtype.signed or dtype.is_float else (steps + 1) / 2
    lines = constants({"divisor": divisor, "eps": EPS, "nought": 0.0, "unity": 1.0, "least": dtype.min})
    rounded = spec.scale_spec.dtype if spec.scale_spec else _small_scale(spec)
    lines += element_constants(rounded, "s_") if rounded else ""
    lines += constants({"half_way": _SQRT2, "ufp": 2.0**23 + 1, "whole": 2.0**-24 - 1, "two": 2.0})
    return lines + (constants({"offset": centre}) if spec.symmetric else "")


_SQRT2 = float.fromhex(f"0x1.{SQRT2_MANTISSA << 1:06x}p0")


def _small_scale(spec: TensorSpec) -> Dtype | None:
    """The 8-bit type of the scales, if they have one."""
    name = SCALE_DTYPES.get(spec.scale_type, "")
    return DTYPES[name] if name.startswith("fp8") else None


def _scale(spec: TensorSpec) -> str:
    """Lines from a range to `step`, and to `offset` where it is not fixed."""
    lines = ""
    if not (spec.symmetric or spec.dtype.is_float):
        lines += "  amax = Sub (high, low)\n"
    lines += "  raw = Div (amax, divisor)\n"
    if spec.dtype.is_float:
        return lines + _float_scale(spec)
    if spec.float_zero_point:
        lines += "  flat = LessOrEqual (raw, eps)\n  raw_ = Where (flat, unity, raw)\n"
    lines += f"  enough = Max ({'raw_' if spec.float_zero_point else 'raw'}, eps)\n"
    lines += _rounded_scale(spec, "enough") + _or_else("unity")
    if spec.symmetric:
        return lines
    lines += "  lowest = Div (low, step)\n"
    if spec.float_zero_point:
        return lines + "  offset = Sub (least, lowest)\n"
    lines += "  whole_low = Round (lowest)\n  from_least = Sub (least, whole_low)\n"
    return lines + "  offset = Clip (from_least, qmin, qmax)\n"


def _float_scale(spec: TensorSpec) -> str:
    if spec.scale_spec is not None:
        rounded = ROUND_TO.replace("{p}", "s_").replace("{round}", "  s_rounded = Round (s_scaled)")
        lines = "  s_scaled_ = Div (raw, scale_2)\n" + rounded + "  none = Equal (s_code, nought)\n"
        return lines + "  s_some = Where (none, unity, s_code)\n  step = Mul (s_some, scale_2)\n"
    if _small_scale(spec) is not None:
        return _rounded_scale(spec, "raw") + _or_else("unity", "safe") + "  step = Identity (rounded_scale)\n"
    lines = "  empty = Equal (raw, nought)\n  some = Where (empty, eps, raw)\n"
    if spec.scale_type is ScaleType.pof2:
        lines = "  some = Max (raw, eps)\n"
    return lines + _rounded_scale(spec, "some") + _or_else("eps")


def _or_else(value: str, name: str = "step") -> str:
    return f"  lost = Equal (rounded_scale, nought)\n  {name} = Where (lost, {value}, rounded_scale)\n"


def _rounded_scale(spec: TensorSpec, name: str) -> str:
    """Lines that round a scale to the values of its type."""
    kind = spec.scale_type
    if kind is ScaleType.pof2:
        return f"""
  ufp_q = Mul ({name}, ufp)
  ufp_r = Mul (ufp_q, whole)
  power = Add (ufp_q, ufp_r)
  middle = Mul (power, half_way)
  beyond = Greater ({name}, middle)
  twice = Mul (power, two)
  rounded_scale = Where (beyond, twice, power)
"""
    if _small_scale(spec) is not None:
        rounded = ROUND_TO.replace("{p}", "s_").replace("{round}", "  s_rounded = Round (s_scaled)")
        return f"  s_scaled_ = Identity ({name})\n{rounded}  rounded_scale = Identity (s_code)\n"
    if kind in SCALE_DTYPES:
        to = TensorProto.DataType.Value(code_type(DTYPES[SCALE_DTYPES[kind]]))
        return f"  short = Cast <to = {to}> ({name})\n  rounded_scale = Cast <to = 1> (short)\n"
    return f"  rounded_scale = Identity ({name})\n"


def _rounding_lines(spec: TensorSpec) -> str:
    """Lines from v and its step to the fake-quantized v."""
    body = FLOAT if spec.dtype.is_float else _FLOAT_ZERO_POINT if spec.float_zero_point else INTEGER
    if spec.dtype.is_float and spec.scale_spec is None and _small_scale(spec) is not None:
        # The scale of a group of small values may be 0: they become 0, divided by anything.
        body = body.replace("({v}, step)", "({v}, safe)")
    return body.replace("{v}", "v").replace("{round}", ROUND[spec.rounding])
