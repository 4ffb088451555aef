"""The observers that choose an exponent, against brute force over the raw data."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.observers import OBSERVERS
from quark.core.observers.power_of_two import PowerOfTwoMSEPercentileObserver
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import QParams
from quark.core.spec import ScaleRule, ScaleType, TensorSpec, spec
from tests.core.oracles import floor_log2
from tests.models.samples import EVERY_DATA, error_of, values


def exponent_of(params: QParams) -> np.ndarray:
    scale = np.asarray(params.scale, np.float64)
    assert np.all(np.frexp(scale)[0] == 0.5)
    return np.frexp(scale)[1] - 1


POF2_GRIDS = pytest.mark.parametrize(
    "tensor",
    [
        spec("int8"),
        spec("uint8", symmetric=False),
        spec("int4"),
        spec("int16"),
        spec("int8", PerChannel(0)),
        spec("uint8", PerChannel(-2), symmetric=False),
        spec("int4", PerGroup(-1, 64)),
        spec("int4", PerGroup(0, 3)),
        spec("fp8_e4m3"),
    ],
    ids=str,
)


def table(kind: str) -> np.ndarray:
    return values(kind, 6 * 512).reshape(6, 512) * np.geomspace(0.1, 9, 6, dtype=np.float32)[:, None]


@EVERY_DATA
@POF2_GRIDS
def test_power_of_two_min_max_rounds_the_exponent(kind: str, tensor: TensorSpec) -> None:
    x = table(kind)
    observer = OBSERVERS["pof2_min_max"](tensor)
    observer.update(x)
    free = np.asarray(compute_qparams(x, tensor).scale).reshape(-1)
    got = exponent_of(observer.qparams()).reshape(-1)
    for scale, e in zip(free.tolist(), got.tolist(), strict=True):
        below = floor_log2(scale)
        assert e == below + (Fraction(scale) ** 2 > Fraction(2) ** (2 * below + 1))


@EVERY_DATA
@POF2_GRIDS
def test_non_overflow_never_clips_and_is_minimal(kind: str, tensor: TensorSpec) -> None:
    x = table(kind)
    observer = OBSERVERS["pof2_non_overflow"](tensor)
    observer.update(x)
    params = observer.qparams()
    free = np.asarray(compute_qparams(x, tensor).scale, np.float64)
    scale = 2.0 ** exponent_of(params)
    assert np.all(free <= scale) and np.all(scale < 2 * free)
    split = tensor.split
    step = split.unblock(np.broadcast_to(split.to_blocks(scale, x.shape), split.block_shape(x.shape)), x.shape)
    if not tensor.dtype.is_float:
        assert np.all(abs(x - fake_quantize(x, params, tensor)) <= step / 2)
    else:
        assert np.all(abs(x) <= step * tensor.dtype.max)


@pytest.mark.slow
@EVERY_DATA
@POF2_GRIDS
def test_min_mse_is_the_best_power_of_two(kind: str, tensor: TensorSpec) -> None:
    """Brute force over all exponents near the min-max one, on the raw values of each part."""
    x = table(kind)
    observer = OBSERVERS["pof2_min_mse"](tensor)
    for part in (x, x * 0.5, x[:, ::-1].copy()):
        observer.update(part)
    params = observer.qparams()
    got = exponent_of(params).reshape(-1)
    seen = np.stack([x, x * 0.5, x[:, ::-1]])
    split, alone = tensor.split, TensorSpec(tensor.dtype, PerTensor(), tensor.symmetric)
    blocks = np.stack([split.blocks(batch) for batch in seen])
    kept = [i + 1 for i in range(blocks.ndim - 1) if i not in split.axes(2)]
    parts = np.moveaxis(blocks, kept, list(range(len(kept)))).reshape(len(got), -1)
    lost = least = 0.0
    for part, chosen in zip(parts, got.tolist(), strict=True):
        errors = {e: error_at(part, e, alone) for e in range(chosen - 5, chosen + 6)}
        best = min(errors.values())
        lost, least = lost + errors[chosen], least + best
        # The very best exponent for a tensor; for one of many parts with enough values, one that costs 2 % at most.
        assert errors[chosen] == best or (len(got) > 1 and (errors[chosen] <= best * 1.02 or part.size < 64))
    assert lost <= least * 1.02


def test_min_mse_looks_far_below_an_outlier() -> None:
    """One value of 60 among 20,000 of a bell curve: four powers of two less than min-max."""
    x = values("bell", 20_000)
    x[5] = 60
    params = {}
    for name in ("pof2_min_max", "pof2_min_mse"):
        observer = OBSERVERS[name](spec("int4"))
        observer.update(x)
        params[name] = int(exponent_of(observer.qparams()))
    best = min(range(-9, 9), key=lambda e: error_at(x, e, spec("int4")))
    assert params["pof2_min_mse"] == best == params["pof2_min_max"] - 4


def error_at(x: np.ndarray, e: int, tensor: TensorSpec) -> float:
    """Squared error of x at scale 2^e, written out; the zero point is the one that x's own range asks for."""
    row, scale = tensor.dtype, 2.0**e
    if row.is_float:
        return error_of(x, QParams(np.float32(scale)[...]), tensor)
    low = min(float(x.min()), 0.0)
    zero = 0 if tensor.symmetric else min(max(round(row.min - round(low / scale)), row.min), row.max)
    codes = np.clip(np.round(x.astype(np.float64) / scale) + zero, row.min, row.max)
    return float((((codes - zero) * scale - x) ** 2).sum())


@EVERY_DATA
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "mxint8"])
def test_mx_diffs_is_never_worse_than_ceil_or_floor(kind: str, name: str) -> None:
    x = values(kind, 64 * 96).reshape(64, 96)
    x[5, :32] = 0
    tensors = {
        rule: spec(name, PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu, scale_rule=rule) for rule in ScaleRule
    }
    observer = OBSERVERS["mx_diffs"](tensors[ScaleRule.even])
    observer.update(x)
    params = observer.qparams()
    exponent_of(params)

    def errors(scale: np.ndarray) -> np.ndarray:
        y = fake_quantize(x, QParams(scale), tensors[ScaleRule.even])
        return ((x.astype(np.float64) - y) ** 2).reshape(64, 3, 32).sum(axis=2)

    ours = errors(params.scale)
    ceil = compute_qparams(x, tensors[ScaleRule.ceil]).scale
    floor = compute_qparams(x, tensors[ScaleRule.floor]).scale
    assert np.all(ours <= np.minimum(errors(ceil), errors(floor)))
    assert np.all((params.scale == ceil) | (params.scale == ceil / 2))
    if name == "fp4_e2m1":
        assert ours.sum() < min(errors(ceil).sum(), errors(floor).sum())


def test_mx_diffs_stays_within_e8m0() -> None:
    """2^-128 would hold these values exactly, but no E8M0 byte stands for it."""
    tensor = spec("fp4_e2m1", PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu)
    x = np.full((1, 32), 2.0**-129, np.float32)
    x[0, 3] = 2.0**-126
    observer = OBSERVERS["mx_diffs"](tensor)
    observer.update(x)
    assert observer.qparams().scale[0, 0] == 2.0**-127
    observer = OBSERVERS["mx_diffs"](tensor)
    observer.update(x * 4)
    assert observer.qparams().scale[0, 0] == 2.0**-126


def test_modes_of_the_squared_error() -> None:
    """One tensor of outliers among ten: most tensors, or most values, do without it."""
    rng = np.random.default_rng(0)
    data = [rng.normal(0, 1, 20_000).astype(np.float32) for _ in range(10)]
    data[3] *= 30
    scales = {}
    for name in ("pof2_min_mse", "pof2_most_common", "pof2_mse_percentile"):
        observer = OBSERVERS[name](spec("int8", scale_type=ScaleType.pof2))
        for x in data:
            observer.update(x)
        scales[name] = float(observer.qparams().scale)
    alone = OBSERVERS["pof2_min_mse"](spec("int8", scale_type=ScaleType.pof2))
    alone.update(data[0])
    assert scales["pof2_most_common"] == float(alone.qparams().scale) < scales["pof2_min_mse"]
    kept = PowerOfTwoMSEPercentileObserver(spec("int8", scale_type=ScaleType.pof2), 90.0)
    for x in data:
        kept.update(x)
    within = np.concatenate(data)
    within = within[np.abs(within) <= np.percentile(np.abs(within), 90)]
    alone = OBSERVERS["pof2_min_mse"](spec("int8", scale_type=ScaleType.pof2))
    alone.update(within)
    assert float(kept.qparams().scale) == float(alone.qparams().scale) < scales["pof2_mse_percentile"]
