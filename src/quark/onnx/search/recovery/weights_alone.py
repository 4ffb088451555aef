"""Weights alone as integers, where a model of integers lost so much that its task suffers."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.settings import Settings
from quark.onnx.search.history import Trial
from quark.onnx.search.recovery.search import Recovery, recover
from quark.onnx.search.recovery.steps import WEIGHTS_STEPS

STEP = "weights alone in integers"


def or_weights_alone(
    best: tuple[Recovery, ir.Model], model: ir.Model, settings: Settings, data: Samples | None, budget: float | None
) -> tuple[Recovery, ir.Model]:
    """The better of two by the same measure on the same samples, told as one recovery with one more step.

    Args:
        best: What a quick recovery found, and its model.
        model: The float model as it was loaded; changed.
        settings: Of weights alone.
        data: The calibration data of that recovery.
        budget: Its seconds, of which half are for this; None for as long as it takes.
    """
    found, _ = best
    seconds = None if budget is None else budget / 2
    other, weights = recover(model, settings, data, found.metric, found.target, seconds, WEIGHTS_STEPS, quick=True)
    kept = found.metric.better(other.score, found.score)
    took = sum(trial.seconds for trial in other.trials)
    trial = Trial(STEP, found.score, other.score, took, "kept" if kept else "no gain")
    chosen, quantized = (other, weights) if kept else best
    return replace(chosen, plain=found.plain, trials=[*found.trials, trial]), quantized
