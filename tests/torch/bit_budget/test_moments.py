"""The form of second order against the Fisher form, summed over all labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.torch.bit_budget.moments import collecting
from quark.torch.calibration.calibrate import tensor_qparams

TOKENS, WIDTH, CLASSES = 64, 128, 16


def test_it_is_the_diagonal_of_the_fisher_form() -> None:
    """With one token, G_i X_j is g_i^2 x_j^2; the sum over labels is written out here."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, CLASSES, bias=False)
    spec = SCHEMES["int3_wo_128"]
    assert spec.weight is not None
    params = tensor_qparams(layer.weight.detach(), spec.weight)
    error = fake_quantize(layer.weight.detach(), params, spec.weight) - layer.weight.detach()
    x = torch.randn(1, WIDTH)
    p = torch.softmax(layer(x), -1)[0].detach()
    expected = 0.0
    for label in range(CLASSES):
        score = torch.eye(CLASSES)[label] - p
        expected += float(p[label] * (score[:, None] * x[0][None] * error).square().sum()) / 2
    with collecting({"layer": layer}, []) as moments:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        for label in range(CLASSES):  # each label by its probability, in place of draws
            torch.autograd.backward(p[label].sqrt() * torch.log_softmax(y, -1)[0, label], retain_graph=True)
    assert moments["layer"].divergence(layer.weight, spec, 1) == pytest.approx(expected, rel=1e-5)


def test_the_error_of_a_live_input_is_added() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, CLASSES, bias=False)
    both = SCHEMES["int8_dynamic"]
    assert both.input is not None
    input_alone = replace(both, weight=None)
    x = torch.randn(TOKENS, WIDTH)
    with collecting({"layer": layer}, [both.input]) as moments:
        layer(x.clone().requires_grad_()).sum().backward()
    error = fake_quantize(x, None, both.input) - x
    # All scores are 1, and n = T.
    expected = float(((layer.weight.detach().double() ** 2).sum(0) * (error.double() ** 2).sum(0)).sum()) / (2 * TOKENS)
    assert moments["layer"].divergence(layer.weight, input_alone, TOKENS) == pytest.approx(expected, rel=1e-5)
    weight_alone = moments["layer"].divergence(layer.weight, LayerSpec(weight=both.weight), TOKENS)
    together = moments["layer"].divergence(layer.weight, both, TOKENS)
    assert together == pytest.approx(expected + weight_alone, rel=1e-5)  # sums in float32


def test_a_layer_that_reads_nothing_loses_nothing() -> None:
    layer = torch.nn.Linear(WIDTH, CLASSES)
    with collecting({"layer": layer}, []) as moments:
        layer(torch.zeros(0, WIDTH))
    assert moments["layer"].divergence(layer.weight, SCHEMES["int8_wo"], 5) == 0.0
