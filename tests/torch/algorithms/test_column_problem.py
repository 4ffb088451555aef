"""What column solvers solve at once: the moments and pulls that it holds, and inputs as the layers will read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.core.granularity import PerChannel
from quark.core.quantize import fake_quantize
from quark.core.solvers import gptq
from quark.core.spec import LayerSpec, spec
from quark.errors import NonFiniteError
from quark.torch.algorithms.input_group import TILE, InputGroup
from quark.torch.algorithms.rounding import column_problem
from quark.torch.algorithms.rounding.column_problem import ColumnProblem, as_read
from quark.torch.algorithms.rounding.gptq import Qronos
from quark.torch.config.algo_configs import QronosConfig
from quark.torch.layers.replace import replace_layer

WIDTH = TILE + 40


def group_of(width: int, layer: Any, tokens: int = 18) -> InputGroup:
    """Two batches of a layer's input, of so many tokens each, and the float model's."""
    random = torch.Generator().manual_seed(0)
    x, y = ([torch.randn(2, tokens // 2, width, generator=random) for _ in range(2)] for _ in range(2))
    return InputGroup({"layer": layer}, x, y)


def test_bands_of_the_moments_are_the_rows_of_the_whole() -> None:
    group = group_of(WIDTH, nn.Linear(WIDTH, 1))
    bands = list(group.cross_bands())
    assert [which for which, _ in bands] == [slice(0, TILE), slice(TILE, WIDTH)]
    assert "cross" not in group.statistics
    assert torch.equal(torch.cat([rows for _, rows in bands]), group.cross)


def test_the_drift_stands_in_the_order_that_is_asked_for() -> None:
    group = group_of(WIDTH, nn.Linear(WIDTH, 1))
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    expected = (group.cross.T - group.gram)[order[:, None], order]
    assert torch.allclose(group.drift(order), expected, rtol=0, atol=1e-5)
    assert torch.allclose(group.drift(order, above=True).triu(), expected.triu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [18, 3000])
def test_pulls_are_those_of_the_formula_from_moments_and_from_outputs(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_problem, "ROWS", 160)
    layer: Any = nn.Linear(WIDTH, 400)
    group = group_of(WIDTH, layer, tokens // 2)
    problem = ColumnProblem(group, {"layer": layer}, torch.arange(WIDTH))
    of_outputs: list[bool] = []  # which cost less of few tokens
    monkeypatch.setattr(problem, "add_pulls_of_outputs", lambda: of_outputs.append(True))
    problem.add_pulls()
    assert bool(of_outputs) is (tokens == 18)
    if of_outputs:
        monkeypatch.undo()
        problem.add_pulls_of_outputs()
    real, ideal = (torch.cat(x).reshape(-1, WIDTH).double() for x in (group.inputs, group.float_inputs))
    expected = (real.T @ (ideal - real) / len(real)) @ layer.weight.detach().double().T
    # Sums of WIDTH products of float32, each of at most about 1 / sqrt(WIDTH) in size.
    assert torch.allclose(problem.pulls["layer"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [18, 3000])
def test_what_draws_a_weight_is_the_same_from_its_outputs_and_from_the_drift(tokens: int) -> None:
    layer: Any = nn.Linear(WIDTH, 20)
    group, order = group_of(WIDTH, layer, tokens // 2), torch.arange(WIDTH).flip(0)
    feedback, importance, _ = gptq.factor(group.gram, 0.1, order)
    problem = ColumnProblem(group, {"layer": layer}, order)
    assert problem.drift_gives_pulls is (tokens == 3000)  # of few tokens outputs cost less
    problem.add_pulls_of_outputs(0.25)
    of_outputs = problem.drawn("layer", slice(1, 9), feedback, importance)
    problem.pulls = {}
    assert problem.drawn("layer", slice(1, 9), feedback, importance) is None
    problem.drift = gptq.drift_matrix(group.drift(order), feedback, importance, 0.25, whole=True)
    of_drift = problem.drawn("layer", slice(1, 9), feedback, importance)
    assert of_outputs is not None and of_drift is not None
    assert torch.allclose(of_drift, of_outputs, rtol=0, atol=1e-4 * float(of_outputs.abs().max()))


def test_the_drift_of_outputs_of_bfloat16_is_off_by_less_than_its_noise() -> None:
    layer: Any = nn.Linear(WIDTH, 600)
    group, exact = (group_of(WIDTH, layer, 50) for _ in range(2))
    group.inputs, group.float_inputs = ([x.bfloat16() for x in side] for side in (group.inputs, group.float_inputs))
    exact.inputs, exact.float_inputs = ([x.float() for x in side] for side in (group.inputs, group.float_inputs))
    weights = {"layer": layer.weight.detach().bfloat16()}
    found, expected = (some.drift_of_outputs(weights)["layer"] for some in (group, exact))
    # Two roundings, each of a relative error of 2^-9 / sqrt(3) or so, of what is like noise.
    assert (found - expected).norm() <= 2.0**-8 * expected.norm()
    group.float_inputs[0][0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN"):
        group.drift_of_outputs(weights)


def test_inputs_that_are_rounded_still_let_the_float_model_go_on() -> None:
    dynamic = spec("int8", PerChannel(0), dynamic=True)
    layer_spec = LayerSpec(weight=spec("int8", PerChannel(0)), input=dynamic)
    layers = {"0": replace_layer(nn.Sequential(nn.Linear(24, 8)), "0", layer_spec)}
    went_on: list[int] = []
    group = group_of(24, layers["0"])
    group.go_on = lambda: went_on.append(len(group.float_inputs))
    found = as_read(group, layers)
    assert found is not group
    for x, y in zip(found.inputs, group.inputs, strict=True):
        assert not torch.equal(x, y)
        assert torch.equal(x, fake_quantize(y, None, dynamic))
    found.forget_float()
    assert went_on == [0]  # once, with the float inputs gone from the group that the batches share


def test_one_direction_of_a_few_tokens_damps_the_other_channels_by_their_median_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 32, generator=generator)
    usual, sink = rows.T @ rows, torch.zeros(32)
    sink[[3, 7]] = 1e3
    massive = usual + torch.outer(sink, sink)
    solver = Qronos(QronosConfig())
    for gram, added in (
        (usual, 1e-3 * gptq.largest_eigenvalue(usual)),
        (massive, massive.diagonal().median()),
        (torch.diag(sink), 1e-3 * sink.max()),
    ):
        torch.testing.assert_close((solver.damping(gram) * gram.diagonal().mean()).float(), added, rtol=1e-4, atol=0)
