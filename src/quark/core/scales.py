"""From a range to a scale and a zero point.

    integers, symmetric    scale = max(|min|, |max|) / ((qmax - qmin) / 2)     zero_point = 0 (middle if unsigned)
    integers, asymmetric   min, max widened to include 0; scale = (max - min) / (qmax - qmin)
                           zero_point = clamp(qmin - round(min / scale))
    float zero point       true min, max; zero_point = qmin - min / scale
    floats                 scale = amax / fmax
    E8M0 (OCP MX v1.0)     scale = 2^(exponent(amax) - emax), the exponent rounded even, floor or ceil
    power of two           2^round(log2 scale) of the integer rule
    int16                  the nearest M / 2^N, 1 <= M < 2^15, 0 <= N <= 16, of the integer and float rules
    mx4, mx6, mx9          E = floor(log2 amax of the block); a pair whose own exponent is below E shifts by one:
                           step = 2^(E - shift - bits + 2)
    bfp16                  step = 2^(E - 6), doubled when a code would leave [-128, 127]
    onnx_bfp16             step = 2^(E - 6): the codes are clamped

All in float32. Ranges have the shape of the stored scale. The smallest scale is the float32 epsilon, which keeps an
all-zero group finite. Steps of the block formats count in units of one code, so MXINT8 (value = code / 64) is
the E8M0 rule with emax = 6. A NaN makes the step of its block NaN: E8M0 has a NaN, most elements have none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quark.core.array import Array, astype, namespace, over, view
from quark.core.dtypes import DTYPES, MICRO_EXPONENT, Dtype
from quark.core.granularity import PerTensor
from quark.core.rounding import round_integer, round_to
from quark.core.spec import ScaleRule, ScaleType, TensorSpec

EPS = 2.0**-23
"""The smallest scale: the epsilon of float32."""
TINY = 2.0**-126
"""The smallest normal float32. What is below has lost digits, and no scale of float32 divides it."""
SQRT2_MANTISSA = 0x3504F3
"""The mantissa bits of sqrt(2) in float32: above it, log2 rounds up."""
SCALE_DTYPES = {
    ScaleType.float16: "float16",
    ScaleType.bfloat16: "bfloat16",
    ScaleType.float8_e4m3: "fp8_e4m3",
    ScaleType.float8_e5m3: "fp8_e5m3",
}
"""The element type that a scale of a narrow type is rounded to."""


@dataclass(frozen=True)
class QParams:
    """Scale and zero point, shaped `granularity.scale_shape(x.shape)`; float32 (zero points of asymmetric
    32-bit integers: float64, which holds them).

    Attributes:
        scale: The step between codes (first level). Values of the scale's own type, as float32.
        zero_point: The code of 0.0, or None where the type has none.
        second: Parameters of the second level: of the scales (`scale_spec`) or of the codes (`code_spec`).
    """

    scale: Array
    zero_point: Array | None = None
    second: QParams | None = None

    def rows(self, which: Any) -> QParams:
        """Those of some rows of a matrix, of both levels; what is of the whole matrix serves them all.

        Args:
            which: A slice, or the numbers of the rows.
        """
        zero, second = self.zero_point, self.second
        return QParams(
            self.scale[which] if self.scale.ndim else self.scale,
            zero[which] if zero is not None and zero.ndim else zero,
            None if second is None else second.rows(which),
        )


def qparams_from_range(low: Array, high: Array, spec: TensorSpec, model_dtype: str = "float32") -> QParams:
    """Scale and zero point for values in [low, high].

    Args:
        low, high: Smallest and largest value of each part, shaped like the stored scale of `spec.split`; float32.
        spec: The element type and the rules.
        model_dtype: dtype of the tensor, for `ScaleType.float`.
    """
    xp = namespace(low)
    if spec.dtype.name in MICRO_EXPONENT:
        return QParams(_micro_step(_largest(low, high), spec))
    if spec.dtype.name in ("bfp16", "onnx_bfp16"):
        amax = _largest(low, high)
        step = exp2(exponent(amax) - 6)
        if spec.dtype.name == "bfp16":
            over = (round_integer(high / step) > spec.dtype.max) | (round_integer(low / step) < spec.dtype.min)
            step = xp.where(over, step * 2, step)
        return QParams(xp.where(xp.isnan(amax), amax, step))
    if spec.scale_type is ScaleType.float8_e8m0fnu:
        amax = _largest(low, high)
        return QParams(xp.where(xp.isnan(amax), amax, _e8m0(amax, spec.dtype, spec.scale_rule)))
    if spec.dtype.is_float:
        return _float_qparams(_largest(low, high), spec, model_dtype)
    return _integer_qparams(low, high, spec, model_dtype)


def _largest(low: Array, high: Array) -> Array:
    """The largest magnitude of each range."""
    return namespace(low).maximum(abs(low), abs(high))


def _float_qparams(amax: Array, spec: TensorSpec, model_dtype: str) -> QParams:
    xp = namespace(amax)
    scale = over(amax, spec.dtype.max)
    if spec.scale_spec is not None:
        return QParams(scale)
    if spec.scale_type is ScaleType.pof2:
        scale = nearest_power_of_two(xp.clip(scale, EPS, None))
    if spec.scale_type in (ScaleType.float8_e5m3, ScaleType.float8_e4m3):
        return QParams(round_scale(scale, spec, model_dtype))
    scale = round_scale(xp.where(scale == 0, EPS, scale), spec, model_dtype)
    return QParams(xp.where(scale == 0, EPS, scale))


def _integer_qparams(low: Array, high: Array, spec: TensorSpec, model_dtype: str) -> QParams:
    xp, dtype = namespace(low), spec.dtype
    steps = dtype.max - dtype.min
    if not spec.symmetric and not spec.float_zero_point:
        low, high = xp.clip(low, None, 0.0), xp.clip(high, 0.0, None)
    scale = over(_largest(low, high), steps / 2) if spec.symmetric else over(high - low, steps)
    if spec.float_zero_point:
        scale = xp.where(scale <= EPS, 1.0, scale)
    scale = xp.clip(scale, EPS, None)
    if spec.scale_type is ScaleType.pof2:
        scale = nearest_power_of_two(scale)
    scale = round_scale(scale, spec, model_dtype)
    if spec.scale_type in (ScaleType.float8_e5m3, ScaleType.float8_e4m3):
        # A small scale may round to 0; all codes of its part are 0 then, under any scale.
        scale = xp.where(scale == 0, 1.0, scale)
    if spec.symmetric:
        # An unsigned type is centred: its codes are those of the signed type, shifted by half the range.
        return QParams(scale, xp.zeros_like(scale) + (0.0 if dtype.signed else (steps + 1) / 2))
    if spec.float_zero_point:
        return QParams(scale, dtype.min - low / scale)
    work = "float64" if dtype.bits > 16 else "float32"
    zero = dtype.min - round_integer(astype(low, work) / astype(scale, work))
    return QParams(scale, xp.clip(zero, dtype.min, dtype.max))


def round_scale(scale: Array, spec: TensorSpec, model_dtype: str) -> Array:
    """Round a float32 scale to the values of the spec's scale type."""
    if spec.scale_type is ScaleType.int16:
        return nearest_fraction(scale)
    name = narrow_scale(spec, model_dtype)
    return round_to(scale, DTYPES[name]) if name else scale


def narrow_scale(spec: TensorSpec, model_dtype: str) -> str:
    """The element type that a scale is rounded to; "" where it stays float32, or is no float."""
    if spec.scale_type is not ScaleType.float:
        return SCALE_DTYPES.get(spec.scale_type, "")
    exact = spec.dynamic or (isinstance(spec.granularity, PerTensor) and not spec.dtype.is_float)
    return "" if exact or model_dtype not in ("float16", "bfloat16") else model_dtype


def scale_of_magnitude(amax: Array, spec: TensorSpec, kind: ScaleType, zero: float) -> Array:
    """The scale under which a magnitude is the largest code.

    Args:
        amax: Largest magnitudes, float32.
        spec: The element type, and the rule of E8M0 exponents.
        kind: float32, or the 8-bit type that the scale is rounded to.
        zero: The scale where the magnitude is 0.
    """
    xp = namespace(amax)
    if kind is ScaleType.float8_e8m0fnu:
        scale = _e8m0(amax, spec.dtype, spec.scale_rule)
    else:
        scale = round_scale(over(amax, spec.dtype.max), replace(spec, scale_type=kind), "float32")
    return xp.where(amax == 0, zero, scale)


def flaw(params: QParams, spec: TensorSpec) -> str | None:
    """Return the fault of parameters that were read from a file: a few words that name one of them; None: no fault.

    A scale is a positive finite number of its type; 0 only where the rule gives it for a part that is all zero (FP8
    types, and scales that are themselves quantized). A zero point is a code; of a symmetric type, that of its middle.
    """
    found = _flaw_of_scale(params.scale, spec)
    if found is None and params.zero_point is not None and spec.has_zero_point:
        found = _flaw_of_zero_point(params.zero_point, spec)
    second = spec.scale_spec or spec.code_spec
    if found or params.second is None or second is None:
        return found
    inner = flaw(params.second, second)
    return inner and f"second-level {inner}"


def _flaw_of_scale(scale: Array, spec: TensorSpec) -> str | None:
    xp = namespace(scale)
    zero_scales = spec.scale_spec is not None or spec.scale_type in (ScaleType.float8_e4m3, ScaleType.float8_e5m3)
    if not bool(xp.isfinite(scale).all()):
        return "scale holds NaN or infinity"
    if bool((scale < 0).any()) or (not zero_scales and bool((scale == 0).any())):
        return f"scale holds {float(scale.min()):g}, and scales are positive"
    if spec.scale_type is ScaleType.pof2 and not bool((nearest_power_of_two(scale) == scale).all()):
        return "scale holds other numbers than powers of two"
    if spec.scale_type is ScaleType.int16 and not bool((nearest_fraction(scale) == scale).all()):
        return "scale holds other numbers than M / 2^N"
    return None


def _flaw_of_zero_point(zero: Array, spec: TensorSpec) -> str | None:
    xp, dtype = namespace(zero), spec.dtype
    if not bool(xp.isfinite(zero).all()):
        return "zero point holds NaN or infinity"
    if spec.float_zero_point:
        return None
    if not bool(((zero >= dtype.min) & (zero <= dtype.max)).all()):
        return f"zero point holds {float(zero.min()):g} to {float(zero.max()):g}, and {dtype} has no such code"
    middle = 0.0 if dtype.signed else (dtype.max - dtype.min + 1) / 2
    if spec.symmetric and not bool((zero == middle).all()):
        return f"zero point is not {middle:g} everywhere, the middle of a symmetric type"
    return None


def nearest_power_of_two(scale: Array) -> Array:
    """2^round(log2 scale) of positive normal numbers, exact: up from the mantissa of sqrt(2)."""
    bits = view(scale, "int32")
    up = astype((bits & 0x7FFFFF) > SQRT2_MANTISSA, "int32")
    return view(((bits >> 23) + up) << 23, "float32")


def nearest_fraction(scale: Array) -> Array:
    """The nearest M / 2^N of positive numbers, 1 <= M < 2^15 and 0 <= N <= 16; exact in float32."""
    xp = namespace(scale)
    # The finest grid that M still reaches has all coarser ones in it; 2^15 / 2^N is 2^14 / 2^(N - 1).
    power = exp2(xp.clip(14 - exponent(scale), 0, 16))
    return xp.clip(xp.clip(round_integer(scale * power), 1.0, None) / power, None, 2.0**15 - 1)


def exponent(x: Array) -> Array:
    """floor(log2 |x|) as int32; -127 for zeros and subnormals."""
    return _exponent_of_bits(view(x, "int32"))


def _exponent_of_bits(bits: Array) -> Array:
    return ((bits >> 23) & 0xFF) - 127


def exp2(e: Array) -> Array:
    """2^e for int32 e in [-149, 127], exact, subnormals included."""
    xp = namespace(e)
    normal = (xp.clip(e, -126, None) + 127) << 23
    subnormal = xp.ones_like(e) << xp.clip(e + 149, 0, 22)
    return view(xp.where(e < -126, subnormal, normal), "float32")


def _e8m0(amax: Array, dtype: Dtype, rule: ScaleRule) -> Array:
    xp = namespace(amax)
    bits = view(amax, "int32")
    if rule is ScaleRule.even:
        # An integer element has 8 bits to round amax to.
        bits = bits + (1 << (22 - (dtype.mbits if dtype.is_float else 8)))
    e = _exponent_of_bits(bits)
    if rule is ScaleRule.ceil:
        e = e + astype((bits & 0x7FFFFF) != 0, "int32")
    # Capped at 127: the largest code times the scale stays finite.
    shared = xp.clip(xp.clip(e, None, 127) - (dtype.emax if dtype.is_float else 0), -127, 127)
    scale = exp2(shared if dtype.is_float else shared - dtype.emax)
    return scale if rule is ScaleRule.even else xp.where(amax == 0, EPS, scale)


def _micro_step(amax: Array, spec: TensorSpec) -> Array:
    xp, pairs = namespace(amax), spec.pairs
    grouped = pairs.blocks(amax)
    largest = xp.amax(grouped, axis=pairs.axes(amax.ndim), keepdims=True)
    largest = pairs.unblock(largest + xp.zeros_like(grouped), tuple(amax.shape))
    block = exponent(largest)
    shift = astype(exponent(amax) < block, "int32")
    return xp.where(xp.isnan(largest), largest, exp2(block - shift - (spec.dtype.bits - 2)))
