"""A quick search of few samples measures on all, each with a file that was not calibrated with it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quark.core.metrics import Comparison
from quark.onnx.algorithms.rescaling import bias_correction
from quark.onnx.calibration import calibrate
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics, fingerprint
from quark.onnx.config.algo_configs import BiasCorrectionConfig
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.recovery.search import split
from quark.onnx.search.recovery.turns import FEW
from quark.onnx.search.settle import convert, quantize
from tests.models.onnx_zoo import mlp, outputs, vectors
from tests.onnx.search.recovery.test_recover import S8, found

COUNT = 8


def halves(feeds: list[dict[str, np.ndarray]]) -> tuple[Samples, Samples, Samples | None]:
    return split(Samples(feeds, model_inputs(load(mlp()))), quick=True)


def test_each_sample_counts_for_the_file_of_the_other_half() -> None:
    feeds = vectors(COUNT)
    result, sums = found(mlp(), feeds, quick=True), Comparison()
    first, second, last = halves(feeds)
    assert last is None and (len(first), len(second)) == (COUNT // 2, COUNT // 2)
    for fit, measured in ((first, second), (second, first)):
        model = to_proto(quantize(load(mlp()), S8, list(fit)))
        for feed in measured:
            sums.update(outputs(mlp(), feed)[0], outputs(model, feed)[0])
    assert result.score == pytest.approx(sums.sqnr, abs=0.02) and result.by_turns == COUNT
    assert result.least < result.score


def test_all_samples_calibrate_the_file_that_is_written() -> None:
    feeds = vectors(COUNT)
    result = found(mlp(), feeds, quick=True)
    expected = to_proto(quantize(load(mlp()), S8, feeds))
    assert result.fitted == COUNT
    for feed in feeds:
        np.testing.assert_array_equal(outputs(result.model, feed)[0], outputs(expected, feed)[0])


def test_no_sample_is_observed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, collect = list[int](), calibrate.collect

    def counted(prepared: Prepared, *others: Any) -> None:
        seen.append(len(prepared.data))
        collect(prepared, *others)

    monkeypatch.setattr(calibrate, "collect", counted)
    assert found(mlp(), vectors(COUNT), quick=True).fitted == COUNT
    assert seen == [COUNT // 2, COUNT // 2]


def test_means_of_the_float_model_are_those_of_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    # A correction that comes after the ranges looks at each half for them, and then knows those of all samples.
    model, looks, sliced = load(mlp()), list[int](), bias_correction.SlicedSession
    monkeypatch.setattr(bias_correction, "SlicedSession", lambda *args: looks.append(1) or sliced(*args))
    plain = prepare(model, S8)
    corrected = replace(plain, algorithms=(BiasCorrectionConfig(),))
    feeds = Samples(vectors(2 * COUNT), model_inputs(model))
    parts = [Prepared(model, feeds.part(range(i, i + COUNT)), fingerprint(model), {}) for i in (0, COUNT)]
    for part, settings in itertools.product(parts, (plain, corrected, corrected)):
        convert(part.copy(), settings)
    assert len(looks) == len(parts)
    first, second = (part.statistics or {} for part in parts)
    both = {name: Statistics.joined(first[name], second[name]) for name in first}
    joined, expected = (
        to_proto(convert(Prepared(model, feeds, fingerprint(model), known).copy(), corrected)) for known in (both, {})
    )
    assert len(looks) == len(parts)
    for feed in feeds:
        np.testing.assert_array_equal(outputs(joined, feed)[0], outputs(expected, feed)[0])


def test_many_samples_need_no_turns() -> None:
    first, second, last = halves(vectors(4 * FEW))
    assert (len(first), len(second)) == (2.5 * FEW, FEW) and last is not None
