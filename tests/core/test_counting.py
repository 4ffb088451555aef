"""Counts of float patterns: compiled, numpy and a plain dictionary agree."""

from __future__ import annotations

import collections
import ctypes
from pathlib import Path

import numpy as np
import pytest

from quark.base import native
from quark.core.observers.histograms import bit_histogram
from quark.core.observers.histograms.bit_histogram import count_patterns, count_with_numpy
from quark.errors import MissingDependencyError


def values(size: int) -> np.ndarray:
    random = np.random.default_rng(size)
    x = random.uniform(-3, 3, size) * 10.0 ** random.integers(-44, 38, size)
    x[: size // 3] = 0
    x[size // 3 : size // 2] *= -1
    x = x.astype(np.float32)
    x[-6:] = [np.inf, -np.inf, np.nan, -0.0, 1e-45, -3.4e38]
    return x


def expected(x: np.ndarray) -> dict[int, int]:
    return collections.Counter(int(p) for p in (x.view(np.int32) >> 16) + 32768)


def require_compiled() -> None:
    """Skip where there is no compiler; where there is one, the counter must be compiled, not fall back to numpy."""
    try:
        native._command("the counter", "")
    except MissingDependencyError:
        pytest.skip("no compiler")
    assert bit_histogram._compiled() is not None


@pytest.mark.parametrize("size", [7, 1000, 32_768, 1_100_000])
@pytest.mark.parametrize("compiled", [True, False])
def test_counts(size: int, compiled: bool) -> None:
    x = values(size)
    bit_histogram._compiled.cache_clear()
    if compiled:
        require_compiled()
    counts = np.zeros(1 << 16, np.int64)
    low, high = (count_patterns if compiled else count_with_numpy)(x, counts)
    assert counts.sum() == size and np.isnan(low) and np.isnan(high)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == expected(x)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [1, 5, 8192, 8193, 40_000])
def test_extremes(size: int, compiled: bool) -> None:
    bit_histogram._compiled.cache_clear()
    if compiled:
        require_compiled()
    random = np.random.default_rng(size)
    for shift, scale in ((0, 1), (5, 0.1), (-5, 0.1), (0, 1e-42), (0, 1e38)):
        x = (random.normal(shift, 1, size).clip(-3 + shift, 3 + shift) * scale).astype(np.float32)
        found = (count_patterns if compiled else count_with_numpy)(x, np.zeros(1 << 16, np.int64))
        assert found == (x.min(), x.max()) and found[0].dtype == np.float32
    x[-1] = -np.inf
    assert (count_patterns if compiled else count_with_numpy)(x, np.zeros(1 << 16, np.int64))[0] == -np.inf
    zeros = np.array([-0.0, 0.0], np.float32)
    assert (count_patterns if compiled else count_with_numpy)(zeros, np.zeros(1 << 16, np.int64)) == (0, 0)


@pytest.mark.slow
def test_without_a_compiler_numpy_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    bit_histogram._compiled.cache_clear()
    x = values(1_200_000)
    counts = np.zeros(1 << 16, np.int64)
    count_patterns(x, counts)
    assert bit_histogram._compiled() is None and not list(tmp_path.iterdir())
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == expected(x)
    with pytest.raises(MissingDependencyError, match=r"no C\+\+ compiler.*no-such-compiler.*instead"):
        native.library(Path(bit_histogram.__file__).with_name("counts.cpp"), "the counter", "Do this instead.")
    bit_histogram._compiled.cache_clear()


def test_a_library_is_built_once_for_each_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    try:
        first = native.library(source, "one", "")
    except MissingDependencyError:
        pytest.skip("no compiler")
    stamp = first.stat().st_mtime_ns
    assert native.library(source, "one", "") == first and first.stat().st_mtime_ns == stamp
    source.write_text('extern "C" int one() { return 2; }')
    assert native.library(source, "one", "") != first
    source.write_text("no C++")
    with pytest.raises(native.QuarkError, match="compiler failed"):
        native.library(source, "one", "")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_library_is_built_anew_when_a_header_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A header beside the source, and one that the first includes, count as the source does; native.h is found."""
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache"))
    source, header, inner = tmp_path / "one.cpp", tmp_path / "one.h", tmp_path / "inner.h"
    source.write_text('#include "native.h"\n#include "one.h"\nEXPORT int one() { return ONE; }')
    header.write_text('#pragma once\n#include "inner.h"\n#include "one.h"\n')
    values = []
    for text in ("#define ONE 1", "#define ONE 2"):
        inner.write_text(f"#pragma once\n{text}\n")
        try:
            values.append(ctypes.CDLL(str(native.library(source, "one", ""))).one())
        except MissingDependencyError:
            pytest.skip("no compiler")
    assert values == [1, 2]
