"""The compiled passes over runs against the formulas of quantize.py and packing.py: the same bits."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quark.base import native
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.kernels import runs
from quark.core.packing import AWQ_ORDER, SEQUENTIAL, encode, pack_bits
from quark.core.quantize import compute_qparams, effective, quantize, range_of
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec, spec
from quark.errors import MissingDependencyError
from quark.torch.formats.quark.layout import QuarkLayout

SPECS = {
    "mxfp4": spec("fp4_e2m1", PerGroup(-1, 32), scale_type=ScaleType.float8_e8m0fnu),
    "nvfp4": spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=spec("fp8_e4m3")),
    "fp4 in long runs": spec("fp4_e2m1", PerTensor()),
    "fp8": spec("fp8_e4m3", PerChannel(0)),
    "fp8 e5m2": spec("fp8_e5m2", PerGroup(-1, 64)),
    "int8": spec("int8", PerChannel(0)),
    "int8 of all": spec("int8", PerTensor(), symmetric=False),
    "uint8": spec("uint8", PerGroup(-1, 32), symmetric=False),
    "int4": spec("int4", PerGroup(-1, 32)),
    "uint4": spec("uint4", PerGroup(-1, 128), symmetric=False),
    "uint4 of rows": spec("uint4", PerChannel(0), symmetric=False),
    "uint4 symmetric": spec("uint4", PerGroup(-1, 64)),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where there is no compiler; where there is one, tensors are worth it however small they are."""
    try:
        native._command("codes", "")
    except MissingDependencyError:
        pytest.skip("no compiler")
    assert runs.is_compiled()
    monkeypatch.setattr(runs, "WORTH_COMPILING", 1)
    monkeypatch.setattr(runs, "WORTH_A_THREAD", 1024)


def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, halves of integers (ties of many codes), zeros and negative zeros."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-8, 3, rows)[:, None]
    x[1::3] = torch.randint(-30, 31, x[1::3].shape, generator=generator) / 2
    x[2], x[3], x[4, ::2], x[5] = 0.0, -0.0, -0.0, x[5].abs()
    return x.to(dtype)


def by_formula(x: torch.Tensor, spec: TensorSpec, order: tuple[int, ...], transposed: bool) -> torch.Tensor:
    codes = encode(quantize(x, compute_qparams(x, spec), spec), spec.dtype)
    codes = codes.t().contiguous() if transposed else codes
    return codes if spec.dtype.bits == 8 else pack_bits(codes, 4, order)


@DTYPES
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("threads", [1, 3])
def test_codes_are_those_of_the_formulas(
    name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(runs, "TILE", 16)
    for rows, columns in ((8, 128), (40, 640), (264, 256), (16, 5120)):
        x = weight(rows, columns, dtype)
        params = effective(compute_qparams(x, spec), spec)
        for order in (SEQUENTIAL, AWQ_ORDER):
            for transposed in (False, True) if spec.dtype.bits == 4 and isinstance(spec.split, PerGroup) else (False,):
                made = runs.packed_codes(x, params.scale, params.zero_point, spec, order, transposed)
                assert made is not None
                assert torch.equal(made, by_formula(x, spec, order, transposed)), (rows, columns, order, transposed)


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "fp8 e5m2", "int8", "uint4"])
def test_every_bfloat16_becomes_the_code_of_the_formula(name: str) -> None:
    finite = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = torch.where(torch.isfinite(finite), finite, 0)
    spec = replace(SPECS[name], scale_spec=None)
    for scale in (2.0**-20, 0.37, 1.0, 96.0):
        shape = spec.split.scale_shape((256, 256))
        scales, zero = torch.full(shape, scale), torch.full(shape, 3.0) if spec.dtype.name == "uint4" else None
        x = finite.reshape(256, 256)
        expected = encode(quantize(x, QParams(scales, zero), spec), spec.dtype)
        expected = expected if spec.dtype.bits == 8 else pack_bits(expected, 4)
        made = runs.packed_codes(x, scales, zero, spec, SEQUENTIAL, False)
        assert made is not None and torch.equal(made, expected)


@DTYPES
@pytest.mark.parametrize("name", SPECS)
def test_ranges_are_those_of_the_formulas(name: str, dtype: torch.dtype) -> None:
    for rows, columns in ((8, 128), (40, 640)):
        x = weight(rows, columns, dtype)
        made, expected = runs.run_ranges(x, SPECS[name]), range_of(x, SPECS[name])
        assert made is not None
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected, strict=True))
        x[3, 5], x[6, 0] = float("nan"), float("-inf")
        made, expected = runs.run_ranges(x, SPECS[name]), range_of(x, SPECS[name])
        assert made is not None
        for ours, theirs in zip(made, expected, strict=True):
            assert torch.equal(ours.isfinite(), theirs.isfinite())


@DTYPES
@pytest.mark.parametrize("name", SPECS)
def test_a_stored_weight_has_the_same_bytes_without_a_compiler(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = weight(40, 640, dtype)
    params = compute_qparams(x, SPECS[name])
    for method in ("reorder", "order"):
        layout = QuarkLayout(SPECS[name], dtype, method)
        compiled = layout.store(x, params)
        with monkeypatch.context() as without:
            without.setattr(runs, "_is_compiled", lambda x: False)
            plain = layout.store(x, params)
        assert {k: (v.dtype, v.shape) for k, v in compiled.items()} == {k: (v.dtype, v.shape) for k, v in plain.items()}
        for suffix, stored in plain.items():
            assert torch.equal(compiled[suffix].reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8))


def test_what_is_rare_is_left_to_the_formulas() -> None:
    x = weight(8, 128, torch.float32)
    one = torch.ones(8, 4)
    rare = {
        "device": (x.to("meta"), SPECS["mxfp4"]),
        "strides": (x.t(), SPECS["mxfp4"]),
        "dtype": (x.half(), SPECS["mxfp4"]),
        "axis": (x, spec("int8", PerChannel(1))),
        "bits": (x, spec("int3", PerGroup(-1, 32))),
        "blocks": (x, spec("mxint8", PerGroup(-1, 32))),
        "rounding": (x, spec("int8", PerGroup(-1, 32), rounding=RoundType.round)),
        "zero point": (x, spec("uint8", PerGroup(-1, 32), symmetric=False, float_zero_point=True)),
        "group": (x, spec("int8", PerGroup(-1, 48))),
        "words": (x[:, :124].contiguous(), spec("fp4_e2m1", PerChannel(0))),
    }
    for what, (values, rule) in rare.items():
        assert runs.packed_codes(values, one, None, rule, SEQUENTIAL, False) is None, what
    assert runs.packed_codes(x[:4], one, None, SPECS["int4"], AWQ_ORDER, True) is None


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    runs._library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        assert not runs.is_compiled() and runs.run_ranges(weight(8, 128, torch.float32), SPECS["int8"]) is None
    finally:
        monkeypatch.undo()
        runs._library.cache_clear()


def test_the_rule_has_the_fields_of_its_source() -> None:
    source = Path(runs.__file__).with_name("runs.cpp").read_text()
    struct = source[source.index("struct CodeRule {") : source.index("};")]
    names = re.findall(r"(\w+)(?:\[8\])?[,;]", re.sub(r"//.*", "", struct))
    assert names == [field[0] for field in runs.CodeRule._fields_] and ctypes.sizeof(runs.CodeRule) == 4 * (
        len(names) + 7
    )
