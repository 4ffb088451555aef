"""What each observer decides, against brute force over the raw data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.ao.quantization import HistogramObserver

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel
from quark.core.observers import OBSERVERS
from quark.core.observers.entropy import BINS, divergences
from quark.core.observers.histograms.base import squared_error
from quark.core.observers.histograms.bit_histogram import Bins, BitHistogram, absolute, quantile, uniform
from quark.core.observers.percentile import PercentileObserver
from quark.core.spec import TensorSpec, spec
from quark.errors import ConfigError
from tests.core.oracles import divergence
from tests.models.samples import EVERY_DATA, EVERY_GRID, GRIDS, RNG, error_of_range, ranged, values

# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@EVERY_DATA
@pytest.mark.parametrize("bits", [12, 16])
def test_every_value_is_in_its_bin(kind: str, bits: int) -> None:
    x = values(kind)
    for library in (np.asarray, torch.from_numpy):
        histogram = BitHistogram(1, bits)
        histogram.update(library(x.reshape(1, -1)))
        bins = histogram.bins(0, float(x.min()), float(x.max()))
        assert bins.count.sum() == x.size and np.all(bins.count > 0)
        assert bins.left[0] == x.min() and bins.right[-1] == x.max()
        assert np.all(bins.left <= bins.right) and np.all(bins.right[:-1] <= bins.left[1:])
        width = bins.right - bins.left
        assert np.all(width <= np.maximum(abs(bins.left), abs(bins.right)) * 2.0 ** (9 - bits) + 1e-38)
        inside = [((x >= low) & (x <= high)).sum() for low, high in zip(bins.left, bins.right, strict=True)]
        # -0 and 0 lie in two bins that touch.
        assert np.array_equal(inside, bins.count) or (x == 0).any()


def test_rows_are_counted_apart() -> None:
    x = np.stack([values("bell", 999), values("heavy", 999), -abs(values("tiny", 999))])
    for library in (np.asarray, torch.from_numpy):
        together = BitHistogram(3, 12)
        together.update(library(x))
        for row in range(3):
            alone = BitHistogram(1, 12)
            alone.update(library(x[row : row + 1]))
            ours, theirs = together.bins(row, -1e9, 1e9), alone.bins(0, -1e9, 1e9)
            assert np.array_equal(ours.left, theirs.left) and np.array_equal(ours.count, theirs.count)


def test_absolute_folds_the_negative_bins() -> None:
    x = np.array([-3, -1, 1, 2, -2.5], np.float32)
    histogram = BitHistogram()
    histogram.update(x.reshape(1, -1))
    bins = absolute(histogram.bins(0, -3, 2))
    assert bins.count.tolist() == [1, 1, 1, 1, 1] and np.all(np.diff(bins.left) >= 0)
    assert np.all(bins.left <= np.sort(abs(x))) and np.all(np.sort(abs(x)) <= bins.right)
    assert quantile(bins, 1.0) == 3


def test_min_max_and_moving_average() -> None:
    batches = [np.array(b, np.float32) for b in ([-1, 2], [-5, 1], [0, 9])]
    for name, expected in {"min_max": (-5, 9), "moving_average": (-2, 4)}.items():
        observer = OBSERVERS[name](spec("int8"))
        for batch in batches:
            observer.update(batch)
        assert tuple(map(float, observer.range())) == expected
    channels = OBSERVERS["moving_average"](spec("int8", PerChannel(0)))
    for batch in batches:
        channels.update(np.stack([batch, 2 * batch]))
    assert channels.range()[0].tolist() == [-2, -4] and channels.range()[1].tolist() == [4, 8]


# --- percentile -------------------------------------------------------------------------------------------------------


@EVERY_DATA
@pytest.mark.parametrize("percentile", [60, 99, 99.9, 99.99, 99.999, 100])
def test_percentile_is_numpys_quantile(kind: str, percentile: float) -> None:
    x = values(kind)

    def near(got: float, data: np.ndarray, share: float) -> bool:
        # The order statistic, or its neighbour where share * n is whole but for its last float bit.
        order = [np.quantile(data, share + d, method="inverted_cdf") for d in (0, 1e-12, -1e-12) if 0 <= share + d <= 1]
        return any(abs(got - float(q)) <= abs(float(q)) * 2.0**-7 + 1e-38 for q in order)

    low, high = ranged("percentile", spec("int8"), x, percentile=percentile)
    assert low == -high and near(high, abs(x), percentile / 100)
    low, high = ranged("percentile", spec("uint8", symmetric=False), x, percentile=percentile)
    assert near(low, x, 1 - percentile / 100) and near(high, x, percentile / 100)
    if percentile == 100:
        assert (low, high) == (x.min(), x.max())


def test_percentile_of_a_symmetric_type_is_the_documented_range_unless_it_is_given() -> None:
    """The documented one is 99.99999999 of |x| in 4200 bins from 0 on: the lower edge of the bin that is reached."""
    for seed in range(20):
        x = np.random.default_rng(seed).laplace(size=8192).astype(np.float32)
        counts, edges = np.histogram(abs(x), 4200, (0, abs(x).max()))
        reached = int(np.argmax(np.cumsum(counts) / len(x) >= 0.9999999999))
        low, high = ranged("percentile", spec("int8"), x)
        assert low == -high and high == pytest.approx(edges[reached], rel=1e-6)


def test_percentile_of_no_symmetric_range_cuts_half_of_the_share_at_either_end() -> None:
    x = values("bell", 400_000) + 1
    low, high = ranged("percentile", spec("int8"), x, percentile=98, symmetric_range=False)
    assert [low, high] == pytest.approx(np.quantile(x, [0.01, 0.99]).tolist(), rel=2.0**-7)


def test_percentile_interpolates_as_numpy_where_data_is_dense() -> None:
    x = values("bell", 400_000)
    for percentile in (75, 99, 99.9):
        _, high = ranged("percentile", spec("int8"), x, percentile=percentile)
        assert high == pytest.approx(float(np.quantile(abs(x), percentile / 100)), rel=2.0**-7)


def test_quantile_is_linear_within_a_bin() -> None:
    """One bin holds [1, 1 + 2^-7): its quantiles are known to far more than its width."""
    x = np.linspace(1, 1 + 2.0**-7, 5000, endpoint=False, dtype=np.float32)
    histogram = BitHistogram()
    histogram.update(x.reshape(1, -1))
    bins = histogram.bins(0, float(x[0]), float(x[-1]))
    assert len(bins.count) == 1
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(bins, share) == pytest.approx(float(np.quantile(x, share)), abs=2e-6)


@pytest.mark.parametrize("bad", [50, 0, 100.1, -1])
def test_percentile_out_of_range(bad: float) -> None:
    with pytest.raises(ConfigError, match=str(bad)):
        PercentileObserver(spec("int8"), percentile=bad)


# --- least squared error ----------------------------------------------------------------------------------------------


@EVERY_DATA
@EVERY_GRID
def test_mse_is_near_the_best_shrink_factor(kind: str, tensor: TensorSpec) -> None:
    x = values(kind, 20_000)
    low, high = ranged("mse", tensor, x)
    best = min(error_of_range(x, a * x.min(), a * x.max(), tensor) for a in np.linspace(0.005, 1, 200))
    ours, plain = error_of_range(x, low, high, tensor), error_of_range(x, x.min(), x.max(), tensor)
    # Floats: their error is spread thin over all values, which a histogram knows to 0.5 %.
    assert ours <= plain * (1.005 if tensor.dtype.is_float else 1.001)
    assert ours <= best * 1.02
    assert min(x.min(), 0) <= low <= high <= max(x.max(), 0)


@EVERY_DATA
@EVERY_GRID
def test_modes_of_mse_find_the_best_of_their_ranges(kind: str, tensor: TensorSpec) -> None:
    x = values(kind, 20_000)
    histogram = BitHistogram()
    histogram.update_values(x)
    bins = histogram.bins(0, float(x.min()), float(x.max()))
    tails = [(1 - p / 100) / 2 for p in (99.9, 99.99, 99.999, 99.9999)]
    width = x.max() - x.min()
    ranges = {
        "mse_percentile": [(quantile(bins, t), quantile(bins, 1 - t)) for t in tails],
        "mse_centers": [(x.min() + c * width, x.max() - c * width) for c in np.arange(256) / 1024],
    }
    for name, tried in ranges.items():
        tried = [(min(low, 0), max(high, 0)) for low, high in tried]
        best = min(error_of_range(x, low, high, tensor) for low, high in tried)
        found = ranged(name, tensor, x)
        assert min(abs(found[0] - low) + abs(found[1] - high) for low, high in tried) < 1e-5 * width
        # A histogram knows the errors of integers to 0.1 %, those of floats to 0.5 %.
        assert error_of_range(x, *found, tensor) <= best * (1.005 if tensor.dtype.is_float else 1.001)


@EVERY_DATA
@EVERY_GRID
def test_histogram_is_near_the_best_of_both_ends(kind: str, tensor: TensorSpec) -> None:
    x = values(kind, 8_000)
    low, high = ranged("histogram", tensor, x)
    ours, plain = error_of_range(x, low, high, tensor), error_of_range(x, x.min(), x.max(), tensor)
    assert ours <= plain * 1.001
    if tensor.symmetric or tensor.dtype.is_float:
        amax = abs(x).max()
        best = min(error_of_range(x, -a * amax, a * amax, tensor) for a in np.linspace(0.005, 1, 200))
    else:
        shares = np.linspace(0.04, 1, 25)
        ends = {(a * min(x.min(), 0), b * max(x.max(), 0)) for a in shares for b in shares}
        best = min(error_of_range(x, *end, tensor) for end in ends)
    # Two free ends have local minima.
    assert ours <= best * (1.01 if tensor.symmetric else 1.04)
    assert ours <= error_of_range(x, *ranged("mse", tensor, x), tensor) * 1.01


@EVERY_GRID
def test_error_of_a_bin_is_that_of_values_spread_over_it(tensor: TensorSpec) -> None:
    edges = np.linspace(0, 1, 11)
    bins = Bins(edges[:-1], edges[1:], np.full(10, 2000.0))
    dense = ((np.arange(20_000) + 0.5) / 20_000).astype(np.float32)
    ends = np.array([0.3, 0.55, 0.8])
    got = squared_error(bins, -ends, ends, tensor)
    for end, error in zip(ends, got, strict=True):
        assert error == pytest.approx(error_of_range(dense, -end, end, tensor), rel=0.02)


@pytest.mark.parametrize("name", ["mse", "histogram"])
def test_outliers_are_worth_clipping(name: str) -> None:
    x = values("relu", 20_000)
    ours = error_of_range(x, *ranged(name, GRIDS["int4"], x), GRIDS["int4"])
    assert ours < 0.5 * error_of_range(x, x.min(), x.max(), GRIDS["int4"])


# --- entropy ----------------------------------------------------------------------------------------------------------


@EVERY_DATA
@pytest.mark.parametrize("levels", [2, 8, 128])
def test_divergence_is_that_of_the_loops(kind: str, levels: int) -> None:
    x = abs(values(kind, 5_000))
    counts = np.histogram(x, bins=BINS, range=(0, float(x.max())))[0].astype(float)
    for end in (levels, levels + 1, 333, 1000, 2047, BINS):
        found = float(divergences(counts, np.array([end]), levels)[0])
        assert found == pytest.approx(divergence(counts, end, levels), rel=1e-9, abs=1e-12)


@EVERY_DATA
@pytest.mark.parametrize("name", ["int8", "uint8", "int4"])
def test_entropy_is_near_the_least_divergence(kind: str, name: str) -> None:
    """Against the search written with loops, on numpy's own histogram of the raw |x| other than 0."""
    x, tensor = values(kind, 400_000), GRIDS[name]
    amax = float(abs(x).max())
    counts = np.histogram(abs(x[x != 0]), bins=BINS, range=(0, amax))[0].astype(float)
    levels = 1 << (tensor.dtype.bits - 1)
    low, high = ranged("entropy", tensor, x)
    assert x.min() <= low <= high <= x.max()
    end = round(max(-low, high) / amax * BINS)
    assert (end - levels) % (BINS // 512) == 0 and levels <= end <= BINS
    best = min(divergence(counts, i, levels) for i in range(levels, BINS + 1, 40))
    assert divergence(counts, end, levels) <= best * 1.1 + 2e-4


def test_entropy_does_not_clip_half_the_values_of_a_relu() -> None:
    """Zeros are exact in every type; counted, they would drown the rest and the range would collapse."""
    x = np.maximum(RNG(0).standard_normal(100_000), 0).astype(np.float32)
    _, high = ranged("entropy", GRIDS["uint8"], x)
    assert high > 0.8 * x.max()


@EVERY_DATA
def test_bins_spread_evenly_keep_the_distribution(kind: str) -> None:
    x = abs(values(kind, 400_000))
    histogram = BitHistogram()
    histogram.update(x.reshape(1, -1))
    counts = uniform(histogram.bins(0, float(x.min()), float(x.max())), 0.0, float(x.max()), BINS)
    raw = np.histogram(x, bins=BINS, range=(0, float(x.max())))[0]
    assert counts.sum() == pytest.approx(x.size) and np.all(counts >= 0)
    # Kolmogorov distance: within one bit bin, a 2^-7 of the value.
    assert abs(np.cumsum(counts) - np.cumsum(raw)).max() <= 0.002 * x.size


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8"])
def test_entropy_keeps_what_fills_its_range_evenly(name: str) -> None:
    """Data on the levels themselves lose nothing at the full range, for every width."""
    levels = 1 << (DTYPES[name].bits - 1)
    x = np.linspace(-1, 1, 2 * 64 * levels + 1, dtype=np.float32)
    assert ranged("entropy", spec(name), x) == (-1, 1)


@EVERY_DATA
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantile_search_is_that_of_torch(kind: str) -> None:
    """On one tensor, which torch's observer does not have to bin again."""
    x = values(kind, 20_000)
    tensor = spec("uint8", symmetric=False)
    oracle = HistogramObserver(bins=256, dtype=torch.quint8, qscheme=torch.per_tensor_affine)
    oracle(torch.from_numpy(x))
    expected = [float(end) for end in oracle._non_linear_param_search()]
    width = (x.max() - x.min()) / 256
    # Values at the border of a bin are counted on one side or the other.
    np.testing.assert_allclose(ranged("quantile_search", tensor, x), expected, atol=2.01 * width)
