"""Every tensor spec of every registered scheme: numpy and torch give the same bits, and the numbers make sense."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.core.array import Array, dtype_name
from quark.core.granularity import PerBlock, PerGroup
from quark.core.metrics import sqnr
from quark.core.observers import OBSERVERS
from quark.core.quantize import (
    compute_qparams,
    dequantize,
    effective,
    fake_quantize,
    quantize,
    recover_codes,
    second_level,
)
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import TensorSpec

SPECS = {
    f"{name}-{role}": tensor
    for name, layer in SCHEMES.items()
    for role in ("weight", "bias", "input", "output")
    if (tensor := getattr(layer, role)) is not None
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def shapes(spec: TensorSpec) -> list[tuple[int, ...]]:
    """1-D to 4-D, as odd as the granularity allows."""
    group = isinstance(spec.granularity, PerGroup) and not spec.granularity.pad
    n = 3 * spec.granularity.size if group else 37
    first = (130, 131) if isinstance(spec.granularity, PerBlock) else (n,)  # tiles are of matrices
    return [first, (5, n), (3, 7, n), (2, 3, 5, n), (1, n)]


def data(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bell-shaped with outliers, a zero row, and magnitudes that differ between rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    x = np.where(rng.random(shape) < 0.01, x * 30, x)
    if len(shape) > 1:
        x[tuple([-1] * (len(shape) - 1))] = 0
    return x.astype(np.float32)


def bits(x: Array) -> np.ndarray:
    return np.asarray(x.float() if isinstance(x, torch.Tensor) else x).astype(np.float32).view(np.int32)


def assert_same_params(a: QParams | None, b: QParams | None) -> None:
    assert (a is None) == (b is None)
    if a is None or b is None:
        return
    assert np.array_equal(bits(a.scale), bits(b.scale))
    assert (a.zero_point is None) == (b.zero_point is None)
    if a.zero_point is not None:
        assert np.array_equal(np.asarray(a.zero_point), np.asarray(b.zero_point))
    assert_same_params(a.second, b.second)


def params_of(x: Array, spec: TensorSpec) -> QParams | None:
    return None if spec.is_cast else compute_qparams(x, spec)


@EVERY_SPEC
def test_numpy_and_torch_agree(spec: TensorSpec) -> None:
    for shape in shapes(spec):
        x = data(shape)
        t = torch.from_numpy(x)
        ours, theirs = params_of(x, spec), params_of(t, spec)
        assert_same_params(ours, theirs)
        if ours is not None and theirs is not None:
            codes, torch_codes = quantize(x, ours, spec), quantize(t, theirs, spec)
            assert np.array_equal(bits(codes), bits(torch_codes))
            y = dequantize(codes, ours, spec)
            assert np.array_equal(bits(y), bits(dequantize(torch_codes, theirs, spec)))
            assert np.array_equal(bits(y), bits(fake_quantize(x, ours, spec)))
        assert np.array_equal(bits(fake_quantize(x, None, spec)), bits(fake_quantize(t, None, spec)))


@EVERY_SPEC
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_input_types(spec: TensorSpec, dtype: str) -> None:
    t = torch.from_numpy(np.clip(data(shapes(spec)[1]), -6e4, 6e4)).to(getattr(torch, dtype))
    x = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else t.numpy()
    y, torch_y = fake_quantize(x, None, spec), fake_quantize(t, None, spec)
    assert dtype_name(y) == dtype_name(torch_y) == dtype
    assert np.array_equal(bits(y), bits(torch_y))
    assert np.isfinite(bits(y).view(np.float32)).all()
    # The arithmetic is that of float32; only a scale in the model's dtype may differ.
    wide = t.float()
    params = params_of(t, spec)
    exact = fake_quantize(wide, params, spec)
    exact = exact.clip(-65504, 65504) if dtype == "float16" else exact
    assert np.array_equal(bits(torch_y), bits(exact.to(t.dtype)))
    assert_same_params(params, params_of(x, spec))


@EVERY_SPEC
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_layout_in_memory_changes_nothing(spec: TensorSpec, library: object) -> None:
    x = data(shapes(spec)[2])
    expected = bits(fake_quantize(x, None, spec))
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.float32)
    wide[..., ::2] = x
    for strided in (
        library(wide)[..., ::2],  # type: ignore[operator]
        library(np.ascontiguousarray(x.transpose(2, 1, 0))).swapaxes(0, 2),  # type: ignore[operator]
        library(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1),  # type: ignore[operator]
    ):
        before = np.asarray(strided).copy()
        assert np.array_equal(bits(fake_quantize(strided, None, spec)), expected)
        assert np.array_equal(np.asarray(strided), before)
    in_place = library(x.copy())  # type: ignore[operator]
    assert fake_quantize(in_place, None, spec, out=in_place) is in_place
    assert np.array_equal(bits(in_place), expected)


@EVERY_SPEC
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("rows", [(0,), (0, 3), (3, 0)], ids=str)
def test_an_empty_tensor_stays_empty(spec: TensorSpec, library: object, rows: tuple[int, ...]) -> None:
    shape = (*rows, shapes(spec)[0][0])
    x = library(np.zeros(shape, np.float32))  # type: ignore[operator]
    assert tuple(fake_quantize(x, None, spec).shape) == shape
    if not spec.is_cast:
        params = compute_qparams(x, spec)
        assert tuple(quantize(x, params, spec).shape) == shape
        assert tuple(params.scale.shape) == spec.split.scale_shape(shape)


@EVERY_SPEC
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_zeros_stay_zeros(spec: TensorSpec, library: object) -> None:
    x = library(np.zeros(shapes(spec)[1], np.float32))  # type: ignore[operator]
    assert not np.any(np.asarray(fake_quantize(x, None, spec)))


@EVERY_SPEC
def test_codes_scales_and_errors_are_in_range(spec: TensorSpec) -> None:
    for shape in shapes(spec):
        x = data(shape, seed=1)
        y = fake_quantize(x, None, spec)
        if spec.is_cast:
            kept = np.clip(x, spec.dtype.min, spec.dtype.max)
            assert np.all(abs(kept - y) <= np.maximum(abs(kept), 2.0**spec.dtype.emin) * 2.0 ** -(spec.dtype.mbits + 1))
            continue
        params = compute_qparams(x, spec)
        code_type = spec.code_spec.dtype if spec.code_spec else spec.dtype
        codes = quantize(x, params, spec)
        assert code_type.min <= codes.min() and codes.max() <= code_type.max
        if not code_type.is_float:
            assert np.array_equal(codes, np.round(codes))
        assert tuple(params.scale.shape) == spec.split.scale_shape(shape)
        one = effective(params, spec)
        assert np.all(one.scale >= 0) and np.isfinite(one.scale).all() and np.isfinite(y).all()
        if params.zero_point is not None:
            assert np.all((spec.dtype.min <= params.zero_point) & (params.zero_point <= spec.dtype.max))
            assert np.array_equal(params.zero_point, np.round(params.zero_point))
        # Quantizing again with the same parameters changes nothing.
        assert np.array_equal(fake_quantize(y, params, spec), y)


@EVERY_SPEC
def test_signal_to_noise_is_what_the_width_gives(spec: TensorSpec) -> None:
    x = np.random.default_rng(2).standard_normal((64, 384)).astype(np.float32)
    bits_of_value = spec.dtype.mbits + 2 if spec.dtype.is_float else spec.dtype.bits
    if spec.code_spec:
        bits_of_value = spec.code_spec.dtype.bits
    # 6 dB a bit; a bell curve under min-max scaling loses 8 to 12 dB against a full-scale uniform signal.
    assert sqnr(x, fake_quantize(x, None, spec)) > 6.02 * bits_of_value - 12.5


@EVERY_SPEC
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_codes_come_back_from_a_frozen_half_precision_tensor(spec: TensorSpec, dtype: str) -> None:
    if spec.is_cast:
        return
    for shape in shapes(spec)[:2]:
        t = torch.from_numpy(data(shape)).clip(-100, 100).to(getattr(torch, dtype))
        params = compute_qparams(t, spec)
        frozen = fake_quantize(t, params, spec)
        codes = recover_codes(frozen, quantize(frozen, params, spec), params, spec)
        assert torch.equal(dequantize(codes, params, spec).to(t.dtype), frozen)


@EVERY_SPEC
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_observer_gives_the_parameters_of_the_tensor(spec: TensorSpec, dtype: str) -> None:
    """What calibration finds for a tensor seen whole is what the tensor itself gives."""
    if spec.is_cast:
        return
    t = torch.from_numpy(data(shapes(spec)[1])).to(getattr(torch, dtype))
    x = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else t.numpy()
    for seen in (x, t):
        observer = OBSERVERS[spec.observer](spec)
        observer.update(seen)
        found = observer.qparams()
        if spec.code_spec is not None:
            found = second_level(found, seen, spec)
        assert_same_params(found, compute_qparams(seen, spec))
