"""SaveTensorHistFig: a figure for each calibrated tensor, of its values and the range that was chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quark.base.files import atomic_file
from quark.core.observers import Observer
from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.histograms.bit_histogram import Bins, Floats
from quark.core.observers.power_of_two import PowerOfTwoMinMSEObserver
from quark.errors import ConfigError, OutputError, require_packages

FOLDER = "tensor_hist"
"""In the working directory."""
COLUMNS = 256
LONGEST_NAME = 100


def check_figures(observers: Mapping[str, Observer]) -> None:
    """Find what would stop the figures before the data are run.

    Raises:
        ConfigError: No tensor is calibrated with a histogram.
        MissingDependencyError: matplotlib is absent.
        OutputError: The folder cannot be made.
    """
    require_packages("SaveTensorHistFig", "plot", "matplotlib")
    if observers and not any(_has_histogram(observer) for observer in observers.values()):
        raise ConfigError("SaveTensorHistFig=True: MinMax keeps no histogram. Possible: Percentile, Entropy, MinMSE.")
    if Path(FOLDER).exists() and not Path(FOLDER).is_dir():
        raise OutputError(f"SaveTensorHistFig=True writes into the folder {FOLDER}, which is a file here.")


def _has_histogram(observer: Observer) -> bool:
    """Return True where an observer counts values."""
    return isinstance(observer, (HistogramBasedObserver, PowerOfTwoMinMSEObserver))


def save_figures(observers: Mapping[str, Observer]) -> list[Path]:
    """Write a PNG for each tensor, whole or not at all.

    Args:
        observers: Tensor name -> what was seen of it.

    Returns:
        The files, in order.
    """
    from matplotlib.figure import Figure  # of an extra of its own, and slow

    files = []
    for index, (name, observer) in enumerate(observers.items()):
        if not _has_histogram(observer):
            continue
        low, high = (float(side) for side in observer.extremes())
        assert isinstance(observer, (HistogramBasedObserver, PowerOfTwoMinMSEObserver)) and observer.histogram
        edges, counts = columns(observer.histogram.bins(0, low, high), low, high)
        figure = Figure(figsize=(8, 5))
        axes = figure.add_subplot()
        axes.stairs(counts, edges, fill=True)
        for side in observer.range():
            axes.axvline(float(side), color="red", linewidth=1)
        axes.set_yscale("symlog")
        axes.set(title=name.replace("$", r"\$"), xlabel="value; the range is between the lines", ylabel="count")
        files.append(Path(FOLDER) / f"{index:04d}_{re.sub('[^A-Za-z0-9._-]+', '_', name)[-LONGEST_NAME:]}.png")
        with atomic_file(files[-1]) as temporary:
            figure.savefig(os.fspath(temporary), format="png")
    return files


def columns(bins: Bins, low: float, high: float) -> tuple[Floats, Floats]:
    """Edges and counts of equal columns from low to high; the counts of a bin lie evenly over its width."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, COLUMNS + 1)
    # Of each bin, the share below an edge; a bin without width gets one that no column shows.
    width = np.maximum(bins.right - bins.left, (high - low) * 1e-9)
    below = np.array([float((np.clip((edge - bins.left) / width, 0, 1) * bins.count).sum()) for edge in edges])
    below[-1] = float(bins.count.sum())
    below[0] = 0.0
    return edges, np.diff(below)
