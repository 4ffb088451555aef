"""What a task prints: size, time and the figure of the task, of the float and of the quantized ONNX model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

Feeds = list[dict[str, np.ndarray[Any, Any]]]
ROUNDS = 7
"""Runs of each sample, of which the fastest counts."""


def session(model: Path | str) -> onnxruntime.InferenceSession:
    """The model on one thread, so that times mean something on a machine that does other things too."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def outputs(model: Path | str, feeds: Feeds) -> list[np.ndarray[Any, Any]]:
    """The first output for each sample."""
    runner = session(model)
    return [runner.run(None, feed)[0] for feed in feeds]


def milliseconds(models: list[Path | str], feed: dict[str, np.ndarray[Any, Any]]) -> list[float]:
    """The fastest of the runs of each model, which run by turns."""
    runners, best = [session(model) for model in models], [float("inf")] * len(models)
    for _ in range(ROUNDS):
        for number, runner in enumerate(runners):
            start = time.perf_counter()
            runner.run(None, feed)
            best[number] = min(best[number], 1000 * (time.perf_counter() - start))
    return best


def report(source: Path | str, quantized: Path | str, feed: dict[str, Any], task: str, figure: float) -> float:
    """Print one line for each model and the figure of the task; returns the figure."""
    for name, model, took in zip(
        ("float", "quantized"), (source, quantized), milliseconds([source, quantized], feed), strict=True
    ):
        sys.stdout.write(f"{name:10} {Path(model).stat().st_size / 1e6:8.2f} MB {took:8.2f} ms\n")
    sys.stdout.write(f"{task}: {figure:.3f}\n")
    return figure
