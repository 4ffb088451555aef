"""The errors of candidate ranges from counts that stay on a device: what `base.py` sums from bins, without a wait.

Which bins are occupied is not known there: all are summed, each by `SAMPLES` points, of which some weigh nothing.
"""

from __future__ import annotations

from dataclasses import replace

from quark.core.array import DEVICE_CHUNK, Array, astype, copied_once, namespace, row_chunks
from quark.core.granularity import PerChannel
from quark.core.observers.histograms.base import SAMPLES
from quark.core.observers.histograms.bit_histogram import BitHistogram, every_bin
from quark.core.quantize import dequantize, quantize
from quark.core.scales import qparams_from_range
from quark.core.spec import TensorSpec


def squared_errors(
    histogram: BitHistogram, low: Array, high: Array, trials: tuple[Array, Array], spec: TensorSpec
) -> Array:
    """Sum of the squared quantization errors of the values of each row, for candidate ranges: (candidates, rows).

    Args:
        histogram: The counts.
        low, high: Extremes of each row, (rows,).
        trials: Lower and upper ends of the candidates, (candidates, rows).
        spec: Its dtype and symmetry decide the grid.
    """
    xp, counts = namespace(low), histogram.counts
    assert counts is not None
    size = 1 << histogram.bits
    parts = [
        _of_rows(counts.reshape(-1, size)[rows], low[rows], high[rows], [side[:, rows] for side in trials], spec)
        for rows in row_chunks(histogram.rows, 64 * size, DEVICE_CHUNK)
    ]
    return parts[0] if len(parts) == 1 else xp.concatenate(parts, -1)


def _of_rows(counts: Array, low: Array, high: Array, trials: list[Array], spec: TensorSpec) -> Array:
    xp, bits = namespace(low), (counts.shape[-1] - 1).bit_length()
    edges = astype(copied_once(("bins", bits), lambda: every_bin(bits), low), "float64")
    low, high = (astype(side, "float64")[:, None] for side in (low, high))
    left, right = (xp.minimum(xp.maximum(side, low), high) for side in edges)
    step = astype(xp.maximum(-trials[0], trials[1]), "float64").amax(0)[:, None] / 2**spec.dtype.bits
    points = xp.clip(xp.ceil(SAMPLES * (right - left) / xp.clip(step, 2.0**-1022, None)), 1, SAMPLES)
    sample = xp.cumsum(xp.ones_like(left[:1, :1]).expand(SAMPLES, 1), 0)[:, :, None] - 1  # (samples, 1, 1)
    x = astype(left + (sample + 0.5) / points * (right - left), "float32")
    weight = xp.where(sample < points, counts / points, 0.0)
    x, weight = (part.swapaxes(0, 1).reshape(len(counts), -1) for part in (x, weight))
    rows, errors = replace(spec, granularity=PerChannel(0)), []
    for lower, upper in zip(trials[0], trials[1], strict=True):
        params = qparams_from_range(lower, upper, rows)
        y = dequantize(quantize(x, params, rows), params, rows)
        errors.append((weight * (astype(y, "float64") - astype(x, "float64")) ** 2).sum(-1))
    return xp.stack(errors)
