"""The documented system's own outputs, reproduced bit for bit: values, scales, zero points, packed bytes.

`data/torch_numerics_cases.json` holds what amd-quark 0.13 gave for one input. The single case that is not reproduced is
`Uint8PerChannelSpec`: there, symmetric quantization to an unsigned type keeps zero point 0, so that every negative
value becomes 0. Here an unsigned type is centred on 128, which makes it int8 with its codes shifted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from quark.core.array import ONE_THREAD, Array, minmax, threads_for
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from quark.core.packing import MSB_PAIRS, decode, encode, pack_bits, pack_int4
from quark.core.quantize import compute_qparams, dequantize, fake_quantize, quantize
from quark.core.spec import ScaleRule, ScaleType, TensorSpec, spec

GOLDEN = json.loads((Path(__file__).parent / "data" / "torch_numerics_cases.json").read_text(encoding="utf-8"))
X = np.array(GOLDEN["input"], dtype=np.float32)
DEFECTS = {"Uint8PerChannelSpec(ch_axis=1,is_dynamic=False)"}
ASYMMETRIC = {
    "Uint4PerTensorSpec",
    "Uint4PerChannelSpec",
    "Uint8PerTensorSpec",
    "Int3PerChannelSpec",
    "Int8PerChannelSpec",
}
"""Classes whose documented default is asymmetric."""

LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def spec_of(case: str) -> TensorSpec:
    """The core spec of a documented constructor call."""
    match = re.fullmatch(r"(\w+?)Spec\((.*)\)", case)
    assert match
    name, options = match[1], dict(part.split("=") for part in match[2].split(",") if part)
    axis = int(options.get("ch_axis", -1))
    size = int(options.get("group_size", options.get("block_size", 32)))
    e8m0 = {"scale_type": ScaleType.float8_e8m0fnu, "granularity": PerGroup(axis, 32, pad=True)}
    if found := re.fullmatch(r"(U?int\d+|Int\d+)Per(\w+)", name):
        return spec(found[1].lower(), _split(found[2], axis, size), symmetric=name + "Spec" not in ASYMMETRIC)
    if found := re.fullmatch(r"FP(\d)(E\dM\d)Per(\w+)", name):
        return spec(f"fp{found[1]}_{found[2].lower()}", _split(found[3], axis, size))
    if found := re.fullmatch(r"OCP_MXFP(\d)(E\dM\d)?", name):
        rule = ScaleRule(options.get("scale_calculation_mode", "even"))
        return spec(f"fp{found[1]}_{(found[2] or 'E2M1').lower()}", scale_rule=rule, **e8m0)
    return {
        "AmdFP4": lambda: spec("fp4_e2m1", PerGroup(axis, size), scale_type=ScaleType.float8_e5m3),
        "OCP_MXINT8": lambda: spec("mxint8", **e8m0),
        "MX6": lambda: spec("mx6", PerGroup(axis, size)),
        "BFP16": lambda: spec("bfp16", PerGroup(axis, 8)),
        "Bfloat16": lambda: spec("bfloat16"),
    }[name]()


def _split(word: str, axis: int, size: int) -> Granularity:
    return {"Tensor": PerTensor(), "Channel": PerChannel(axis), "Group": PerGroup(axis, size)}[word]


def bits(x: Array) -> np.ndarray:
    """Patterns of float32 values; -0 counts as 0, because integer codes have one zero."""
    return (np.asarray(x, dtype=np.float32) + np.float32(0)).view(np.int32)


@LIBRARIES
@pytest.mark.parametrize("case", sorted(set(GOLDEN["cases"]) - DEFECTS))
def test_documented_values(case: str, library: object) -> None:
    expected, tensor, x = GOLDEN["cases"][case], spec_of(case), library(X)  # type: ignore[operator]
    assert np.array_equal(bits(fake_quantize(x, None, tensor)), bits(expected["out"]))
    if tensor.is_cast or "scale" not in expected:
        return
    params = compute_qparams(x, tensor)
    assert np.array_equal(bits(params.scale), bits(expected["scale"]))
    zero = np.zeros_like(expected["scale"]) if params.zero_point is None else np.asarray(params.zero_point)
    assert np.array_equal(zero, expected["zero_point"])
    assert np.array_equal(bits(dequantize(quantize(x, params, tensor), params, tensor)), bits(expected["out"]))


@LIBRARIES
@pytest.mark.parametrize("case", sorted(DEFECTS))
def test_symmetric_unsigned_is_int8_shifted_instead_of_losing_negatives(case: str, library: object) -> None:
    expected, unsigned, x = GOLDEN["cases"][case], spec_of(case), library(X)  # type: ignore[operator]
    assert not np.any(expected["zero_point"]) and not np.any(np.array(expected["out"])[X < 0])
    signed = spec("int8", unsigned.granularity)
    ours, theirs = compute_qparams(x, unsigned), compute_qparams(x, signed)
    assert np.array_equal(bits(ours.scale), bits(expected["scale"]))
    assert np.array_equal(bits(ours.scale), bits(theirs.scale)) and bool((ours.zero_point == 128).all())
    codes = np.asarray(quantize(x, ours, unsigned))
    assert np.array_equal(codes, np.asarray(quantize(x, theirs, signed)) + 128)
    y = fake_quantize(x, None, unsigned)
    assert np.array_equal(bits(y), bits(fake_quantize(x, None, signed)))
    # Where the documented system is right (positive values under 127 steps), it agrees.
    right = (X > 0) & (codes < 255)
    assert np.array_equal(bits(y)[right], bits(expected["out"])[right])


@LIBRARIES
@pytest.mark.parametrize("case", GOLDEN["pack"])
def test_documented_packing(case: str, library: object) -> None:
    expected = np.array(GOLDEN["pack"][case]["out"])
    values = np.array(GOLDEN["pack"][case]["in"], dtype=np.float32)
    if case.startswith("fp"):
        dtype = DTYPES["fp4_e2m1" if case == "fp4" else case]
        packed = pack_bits(encode(library(values), dtype), dtype.bits)  # type: ignore[operator]
    else:
        split, name, _ = case.split(",")
        # Per-group codes are stored transposed, int3 excepted.
        values = np.ascontiguousarray(values.T) if split == "per_group" and name != "int3" else values
        dtype = DTYPES[name]
        codes = encode(library(values), dtype)  # type: ignore[operator]
        pack = {"uint2": lambda: pack_bits(codes, 2, MSB_PAIRS), "int3": lambda: pack_bits(codes, 3)}
        packed = decode(codes, dtype) if name == "int2" else pack.get(name, lambda: pack_int4(codes))()
    assert np.array_equal(np.asarray(packed), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((6, 300), 1), ((300, 6), 0), ((4, 5, 7), 1), ((9, 31), 1), ((9, 64), 1)])
def test_extremes_along_an_axis_are_those_of_numpy(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.view(-1)[-1] = torch.nan
    low, high = minmax(x, (axis,))
    assert low.dtype == high.dtype == dtype
    expected = x.float().numpy()
    np.testing.assert_array_equal(low.float().numpy(), expected.min(axis, keepdims=True))
    np.testing.assert_array_equal(high.float().numpy(), expected.max(axis, keepdims=True))


@pytest.mark.parametrize(("products", "threads"), [(ONE_THREAD, 1), (ONE_THREAD + 1, 3)])
def test_short_steps_run_on_one_thread_and_the_number_of_threads_comes_back(products: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError, match="as it ends"), threads_for(torch.zeros(1), products):
            assert torch.get_num_threads() == threads
            raise ValueError("as it ends")
        assert torch.get_num_threads() == 3
        with threads_for(np.zeros(1), products):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
