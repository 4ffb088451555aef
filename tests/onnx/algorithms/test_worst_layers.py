"""The layers that get the time are those whose output is worst."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from quark.onnx import AdaRoundConfig
from quark.onnx.algorithms.layer_sweep import sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayers
from quark.onnx.algorithms.rounding.worst_layers import WorstLayers, damages, improve_worst
from quark.onnx.calibration.data.samples import TimeUpError
from quark.onnx.graph.model_file import constant, to_proto
from tests.models.onnx_zoo import cnn, images, mlp, vectors
from tests.onnx.algorithms.test_sliced_run import started, tapped

finetune = importlib.import_module("quark.onnx.algorithms.rounding.fast_finetune")
"""The module, whose name in the package is that of its function."""


def quantized() -> QuantizedLayers:
    """The convolutional network, one weight of which is hurt more than rounding hurts it."""
    found = started(cnn(), images(2))
    layer = found.layers[3]
    layer.weight = layer.weight * np.random.default_rng(0).normal(1, 1, layer.weight.shape)
    return found


@pytest.mark.slow
def test_damage_is_that_of_the_whole_models() -> None:
    made = quantized()
    found = damages(made)
    sums = np.zeros((len(found), 2))
    for feed in images(2):
        expected = tapped(to_proto(made.reference), [layer.counterpart.outputs[0].name for layer in found], feed)
        given = tapped(to_proto(made.decision.model), [made.output_of(layer).name for layer in found], feed)
        sums += [(np.sum(x**2), np.sum((x - y) ** 2)) for x, y in zip(expected, given, strict=True)]
    np.testing.assert_allclose(list(found.values()), 10 * np.log10(sums[:, 0] / sums[:, 1]), atol=0.3)


@pytest.mark.slow
def test_the_worst_layers_run_in_the_order_of_the_graph() -> None:
    made, runs = quantized(), []
    found = damages(made)
    for share, count in ((0.5, len(made.layers) // 2), (1.0, len(made.layers))):

        def run(narrowed: QuantizedLayers, config: Any) -> int:
            runs.append([layer.name for layer in narrowed.layers])
            assert config == "config" and narrowed.data is made.data
            for layer in narrowed.layers:
                assert np.array_equal(layer.weight, constant(layer.counterpart.inputs[layer.index]))
            return len(narrowed.layers)

        assert improve_worst(made, WorstLayers("config", run, share)) == count
        limit = sorted(found.values())[count - 1]
        assert runs[-1] == [layer.name for layer in made.layers if found[layer] <= limit]
    assert made.layers[3].name in runs[0]


def test_training_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = started(mlp(), vectors(2)), []
    assert made.data is not None

    def train(*arguments: Any) -> None:
        given.append(arguments)
        made.data.until = 0.0
        arguments[-1](0, 0.0)

    monkeypatch.setattr(finetune, "train", train)
    with pytest.raises(TimeUpError):
        finetune.tune(made, AdaRoundConfig(num_iterations=10))
    assert len(given) == 1


def test_the_time_is_looked_at_before_each_layer() -> None:
    made, seen = started(mlp(), vectors(2)), []
    assert made.data is not None
    with pytest.raises(TimeUpError):
        for visit in sweep(made, made.layers, made.data):
            seen.append(visit.layer)
            made.data.until = 0.0
    assert seen == made.layers[:1]


def test_a_share_that_is_no_layer_has_no_time() -> None:
    with pytest.raises(TimeUpError):
        improve_worst(quantized(), WorstLayers("config", lambda quantized, config: 1, 0.01))
