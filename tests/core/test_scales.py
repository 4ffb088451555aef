"""From a range to scale and zero point: each rule against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import compute_qparams
from quark.core.scales import (
    EPS,
    SCALE_DTYPES,
    QParams,
    exp2,
    exponent,
    flaw,
    nearest_fraction,
    nearest_power_of_two,
    qparams_from_range,
)
from quark.core.spec import ScaleRule, ScaleType, TensorSpec, spec
from tests.core.oracles import e8m0_exponent, floor_log2, magnitudes, nearest

INTEGERS = [name for name, row in DTYPES.items() if not row.is_float and not row.is_block]
ELEMENTS = [name for name, row in DTYPES.items() if row.is_float and row.signed and row.bits <= 8] + ["mxint8"]
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=2.0**-149, max_value=float(np.finfo(np.float32).max), width=32)


def params_for(low: float, high: float, tensor: TensorSpec, model: str = "float32") -> QParams:
    """Parameters of one range, from numpy; torch must give the same bits."""
    ours = qparams_from_range(np.array([low], np.float32), np.array([high], np.float32), tensor, model)
    theirs = qparams_from_range(torch.tensor([low]), torch.tensor([high]), tensor, model)
    assert np.array_equal(ours.scale, theirs.scale.numpy())
    assert (ours.zero_point is None) == (theirs.zero_point is None)
    if ours.zero_point is not None:
        assert np.array_equal(ours.zero_point, theirs.zero_point.numpy())
    return ours


@pytest.mark.parametrize("name", INTEGERS)
@given(low=FLOAT32, high=FLOAT32)
def test_integer_rules(name: str, low: float, high: float) -> None:
    low, high = sorted(float(np.float32(v / 1e3)) for v in (low, high))
    row, amax = DTYPES[name], np.float32(max(abs(low), abs(high)))
    steps = np.float32(row.max - row.min)
    symmetric = params_for(low, high, spec(name))
    assert symmetric.scale[0] == max(amax / np.float32(steps / 2), np.float32(EPS))
    assert symmetric.zero_point[0] == (0 if row.signed else (row.max + 1) // 2)
    asymmetric = params_for(low, high, spec(name, symmetric=False))
    low, high = min(low, 0.0), max(high, 0.0)
    expected = max((np.float32(high) - np.float32(low)) / steps, np.float32(EPS))
    assert asymmetric.scale[0] == expected and expected >= EPS
    zero = float(asymmetric.zero_point[0])
    assert row.min <= zero <= row.max and zero.is_integer()
    exact = row.min - Fraction(low) / Fraction(float(expected))
    slack = Fraction(1, 2) + abs(exact - int(row.min)) / 2**22
    assert abs(min(max(exact, int(row.min)), int(row.max)) - int(zero)) <= slack


def test_float_zero_point_keeps_the_true_range() -> None:
    """The documented example: 0.1 .. 1.6 as uint4."""
    widened = params_for(0.1, 1.6, spec("uint4", symmetric=False))
    assert widened.scale[0] == pytest.approx(1.6 / 15) and widened.zero_point[0] == 0
    true = params_for(0.1, 1.6, spec("uint4", symmetric=False, float_zero_point=True))
    assert true.scale[0] == pytest.approx(0.1) and true.zero_point[0] == pytest.approx(-1.0)
    flat = params_for(3.0, 3.0, spec("int8", symmetric=False, float_zero_point=True))
    assert flat.scale[0] == 1.0 and flat.zero_point[0] == -131.0


@pytest.mark.parametrize("name", [name for name, row in DTYPES.items() if row.is_float])
def test_float_rule(name: str) -> None:
    row = DTYPES[name]
    for low, high in [(-3.0, 2.0), (0.0, 7.0), (-1e-3, 0.0)]:
        assert params_for(low, high, spec(name)).scale[0] == np.float32(max(-low, high)) / np.float32(row.max)
    assert params_for(0.0, 0.0, spec(name)).scale[0] == np.float32(EPS)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", ScaleRule)
@given(amax=POSITIVE)
def test_e8m0_rules(name: str, rule: ScaleRule, amax: float) -> None:
    row = DTYPES[name]
    mbits, emax = (row.mbits, row.emax) if row.is_float else (8, 0)
    unit = 0 if row.is_float else row.emax
    if amax < 2.0**-126 and rule is ScaleRule.ceil:
        return  # Subnormal magnitudes count as up to 2^-126.
    scale = params_for(-amax, 0.0, spec(name, PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule))
    assert scale.zero_point is None
    assert scale.scale[0] == 2.0 ** (e8m0_exponent(amax, mbits, emax, rule.value) - unit)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", ScaleRule)
def test_e8m0_rules_around_every_change(name: str, rule: ScaleRule) -> None:
    """All magnitudes at which a rule can change its mind: powers of two and rounding ties, and their neighbours."""
    row = DTYPES[name]
    mbits, emax = (row.mbits, row.emax) if row.is_float else (8, 0)
    points = [np.float32(2.0**e * m) for e in range(-126, 128) for m in (1, 1.5, 2 - 2.0 ** -(mbits + 1))]
    points += [np.nextafter(p, side) for p in points for side in (np.float32(0), np.float32(np.inf))]
    amax = np.array([p for p in points if 2.0**-126 <= p < np.inf], np.float32)
    tensor = spec(name, PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule)
    unit = 0 if row.is_float else row.emax
    expected = [2.0 ** (e8m0_exponent(float(a), mbits, emax, rule.value) - unit) for a in amax]
    assert np.array_equal(qparams_from_range(-amax, amax, tensor).scale, np.array(expected, np.float32))


def test_e8m0_landmarks() -> None:
    """The table of the reference for FP4."""
    tables = {
        "even": {1.74: 0.25, 1.75: 0.5, 3.49: 0.5, 3.5: 1, 6: 1, 7: 2, 0: 2.0**-127},
        "floor": {7: 1, 4: 1, 3.99: 0.5, 0: EPS},
        "ceil": {3: 1, 6: 2, 4: 1, 0: EPS},
    }
    for rule, table in tables.items():
        tensor = spec("fp4_e2m1", PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, scale_rule=ScaleRule(rule))
        assert {amax: params_for(0.0, amax, tensor).scale[0] for amax in table} == table


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("name", ELEMENTS)
def test_the_largest_block_stays_finite(name: str, rule: ScaleRule) -> None:
    top = float(np.finfo(np.float32).max)
    tensor = spec(name, PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule)
    scale = params_for(-top, top, tensor).scale[0]
    assert np.isfinite(np.float32(DTYPES[name].max) * scale) and np.isfinite(scale)


@pytest.mark.parametrize("name", [name for name, row in DTYPES.items() if row.bits <= 16])
@given(amax=st.floats(min_value=2.0**-16, max_value=2.0**100, width=32))
def test_power_of_two_scales(name: str, amax: float) -> None:
    granularity = PerGroup(-1, 16) if DTYPES[name].is_block else PerTensor()
    scale = float(params_for(-amax, amax, spec(name, granularity, scale_type=ScaleType.pof2)).scale[0])
    assert math.frexp(scale)[0] == 0.5
    if not DTYPES[name].is_block and not DTYPES[name].is_float:
        free = float(params_for(-amax, amax, spec(name)).scale[0])
        assert abs(math.log2(scale) - math.log2(free)) <= 0.5 + 1e-9


@given(scale=st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_nearest_power_of_two_is_exact(scale: float) -> None:
    e = floor_log2(scale)
    # round(log2 scale) > e exactly where scale^2 > 2^(2 e + 1); sqrt(2) is no float, so there is no tie.
    up = Fraction(scale) ** 2 > Fraction(2) ** (2 * e + 1)
    assert float(nearest_power_of_two(np.array([scale], np.float32))[0]) == 2.0 ** (e + up)


def test_nearest_power_of_two_at_the_root_of_two() -> None:
    root = np.float32(math.sqrt(2))
    around = np.array([np.nextafter(root, np.float32(0)), root, np.nextafter(root, np.float32(2))])
    assert nearest_power_of_two(around).tolist() == [1, 1, 2]


def test_exponent_and_exp2_over_all_exponents() -> None:
    e = np.arange(-149, 128, dtype=np.int32)
    powers = np.array([2.0 ** int(i) for i in e], np.float32)
    assert np.array_equal(exp2(e), powers)
    assert np.array_equal(exp2(torch.from_numpy(e)).numpy(), powers)
    assert np.array_equal(exponent(powers), np.maximum(e, -127))
    assert exponent(np.array([-3.0, 0.0, 1.9999999], np.float32)).tolist() == [1, -127, 0]


@pytest.mark.parametrize("kind", SCALE_DTYPES)
@pytest.mark.parametrize("name", ["int4", "uint8", "fp4_e2m1", "fp8_e4m3"])
@given(amax=st.floats(min_value=2.0**-20, max_value=2.0**20, width=32))
def test_scales_are_rounded_to_their_type(kind: ScaleType, name: str, amax: float) -> None:
    row = DTYPES[SCALE_DTYPES[kind]]
    free = params_for(-amax, amax, spec(name)).scale
    rounded = nearest(free, magnitudes(row.ebits, row.mbits, row.max))[0]
    scale = params_for(-amax, amax, spec(name, scale_type=kind)).scale[0]
    if rounded > 0:
        assert scale == rounded
    else:
        # FP8 scales of a two-level format may be 0; an integer scale never is.
        assert scale == (1.0 if not DTYPES[name].is_float else 0.0 if "float8" in kind.value else EPS)


@pytest.mark.parametrize(
    ("tensor", "rounded"),
    [
        (spec("int8", scale_type=ScaleType.float), False),
        (spec("int8", PerChannel(0), scale_type=ScaleType.float), True),
        (spec("int4", PerGroup(-1, 4), scale_type=ScaleType.float), True),
        (spec("int8", PerChannel(0), scale_type=ScaleType.float, dynamic=True), False),
        (spec("fp8_e4m3", scale_type=ScaleType.float), True),
        (spec("fp8_e4m3", scale_type=ScaleType.float, dynamic=True), False),
        (spec("int8", PerChannel(0)), False),
    ],
    ids=str,
)
def test_float_scales_have_the_models_dtype(tensor: TensorSpec, rounded: bool) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    free = compute_qparams(x.bfloat16().float(), tensor).scale
    scale = compute_qparams(x.bfloat16(), tensor).scale
    assert torch.equal(scale, free.bfloat16().float() if rounded else free)
    assert not torch.equal(free.bfloat16().float(), free)


@pytest.mark.parametrize("name", DTYPES)
def test_a_group_of_zeros_stays_zero(name: str) -> None:
    row = DTYPES[name]
    for kind in ScaleType:
        granularity = PerGroup(-1, 16) if row.is_block else PerChannel(0)
        tensor = spec(name, granularity, scale_type=kind)
        scale = params_for(0.0, 0.0, tensor).scale
        assert np.isfinite(scale).all() and (scale[0] > 0 or (row.is_float and "float8_e" in kind.value))


SOUND = [
    (spec("int8"), [1.0], [0.0]),
    (spec("uint8", symmetric=False), [1.0], [255.0]),
    (spec("uint4"), [0.5], [8.0]),
    (spec("uint8", symmetric=False, float_zero_point=True), [1.0], [-300.5]),
    (spec("fp8_e4m3", scale_type=ScaleType.float8_e4m3), [0.0], None),
    (spec("int8", scale_type=ScaleType.pof2), [0.25], [0.0]),
]
FLAWED = [
    (spec("int8"), [np.nan], [0.0], "scale holds NaN"),
    (spec("int8"), [np.inf], [0.0], "scale holds NaN or infinity"),
    (spec("int8"), [-2.0], [0.0], "scale holds -2, and scales are positive"),
    (spec("fp8_e4m3"), [0.0], None, "scale holds 0"),
    (spec("int8", scale_type=ScaleType.pof2), [0.3], [0.0], "powers of two"),
    (spec("int8"), [1.0], [3.0], "zero point is not 0 everywhere"),
    (spec("uint4"), [1.0], [0.0], "zero point is not 8 everywhere"),
    (spec("int4", symmetric=False), [1.0], [9.0], "zero point holds 9 to 9, and int4 has no such code"),
    (spec("uint8", symmetric=False, float_zero_point=True), [1.0], [np.nan], "zero point holds NaN"),
]


def stored(scale: list[float], zero: list[float] | None) -> QParams:
    return QParams(np.float32(scale), None if zero is None else np.float32(zero))


@pytest.mark.parametrize(("tensor", "scale", "zero"), SOUND)
def test_stored_parameters_that_can_be(tensor: TensorSpec, scale: list[float], zero: list[float] | None) -> None:
    assert flaw(stored(scale, zero), tensor) is None


@pytest.mark.parametrize(("tensor", "scale", "zero", "words"), FLAWED)
def test_stored_parameters_that_cannot_be(
    tensor: TensorSpec, scale: list[float], zero: list[float] | None, words: str
) -> None:
    assert words in str(flaw(stored(scale, zero), tensor))


def test_the_second_level_is_looked_at() -> None:
    tensor = spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=spec("fp8_e4m3"))
    assert flaw(QParams(np.float32([0.0]), None, QParams(np.float32(1.0))), tensor) is None
    assert "second-level scale" in str(flaw(QParams(np.float32([1.0]), None, QParams(np.float32(-1.0))), tensor))


def test_scales_of_the_form_m_over_2_to_the_n_are_the_nearest() -> None:
    """Of all M / 2^N, tried one by one; the smallest is 2^-16, the largest 32767."""
    x = np.concatenate(
        [np.exp(np.random.default_rng(0).uniform(-14, 11, 300)), [0.6, 1.0, 32767.6, 1e6, 32767.99 / 65536]]
    )
    x = x.astype(np.float32)
    every = np.unique(np.concatenate([np.arange(1, 1 << 15) / 2.0**n for n in range(17)]))
    found = nearest_fraction(x)
    assert np.isin(found, every).all()
    best = np.abs(every[None] - x[:, None].astype(np.float64)).min(1)
    np.testing.assert_array_equal(np.abs(found.astype(np.float64) - x.astype(np.float64)), best)
    assert torch.equal(nearest_fraction(torch.from_numpy(x)), torch.from_numpy(found))
    # What amd-quark 0.13 writes with Int16Scale for these float scales.
    given = np.float32([0.05233069881796837, 0.007337803486734629, 0.06491487473249435, 0.007874015718698502])
    assert nearest_fraction(given).tolist() == [
        0.052337646484375,
        0.0073394775390625,
        0.064910888671875,
        0.00787353515625,
    ]
