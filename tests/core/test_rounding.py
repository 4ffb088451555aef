"""AdaRound and AdaQuant against autograd of the published formulas, and against all roundings of a tiny layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import compute_qparams, dequantize, fake_quantize, quantize
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.solvers.adaround import AdaQuant, AdaRound
from quark.core.solvers.reconstruct import Activation, OutputGrid, Rows, Training, Unit, train
from quark.core.spec import TensorSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError

torch = pytest.importorskip("torch")

INT4, FLOOR = spec("int4", PerChannel(0)), RoundType.floor
RELU = Activation(low=0.0)


def problem(outputs: int = 6, columns: int = 24, rows: int = 64, samples: int = 8, seed: int = 0) -> tuple[Any, Rows]:
    """A weight, and rows with the targets of its Relu; columns are correlated, as those of real layers."""
    torch.manual_seed(seed)
    weight = torch.randn(outputs, columns) * 0.2
    inputs = torch.relu(torch.randn(rows, columns // 4) @ torch.randn(columns // 4, columns)) + 0.1
    starts = range(0, rows + 1, rows // samples)
    return weight, Rows(inputs, torch.relu(inputs @ weight.T) + torch.randn(rows, outputs) * 0.01, list(starts))


def dense(after: tuple[Any, ...] = (RELU,), bias: Any = None) -> Unit:
    return Unit(lambda w: w[None], lambda m: m[0], bias=bias, after=after)


@pytest.mark.parametrize(
    "kind",
    [INT4, spec("uint4", PerTensor(), symmetric=False), spec("int8", PerGroup(-1, 8), symmetric=False)],
    ids=str,
)
def test_adaround_follows_autograd_of_the_papers_formula(kind: TensorSpec) -> None:
    weight, rows = problem()
    params = compute_qparams(weight, kind)
    params = QParams(params.scale * 1.03, params.zero_point)  # so that no weight is on its grid, where h has a kink
    learner = AdaRound(weight, params, kind, reg=0.01)
    codes = quantize(weight, params, replace(kind, rounding=FLOOR))
    free = codes < kind.dtype.max
    low = dequantize(codes, params, kind)
    step = (dequantize(codes - 1, params, kind) - low).abs()
    high = low + step * free
    alpha = -torch.log(1.2 / (((weight - low) / step).clip(0, 1) + 0.1) - 1)
    alpha.requires_grad_()
    optimizer = torch.optim.Adam([alpha], lr=0.05)
    for beta in (None, None, 20.0, 8.5, 3.0, 2.0):
        h = torch.clamp(torch.sigmoid(alpha) * 1.2 - 0.1, 0, 1)
        soft = low + (high - low) * h
        torch.testing.assert_close(learner.value[free], soft.detach()[free], rtol=1e-4, atol=1e-5)
        error = torch.relu(rows.inputs @ soft.T) - rows.targets
        loss = (torch.norm(error, dim=1) ** 2).mean()
        if beta is not None:
            penalty = 0.01 * (1 - (2 * h - 1).abs() ** beta)[free].sum()
            assert learner.penalty(beta) == pytest.approx(float(penalty.detach()), rel=1e-3)
            loss = loss + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer = dense()
        out, slope = layer.forward(rows.inputs, learner.value[None])
        learner.step(layer.pull(rows.inputs, (out - rows.targets) * slope * 2 / 64, (1, 6, 24))[0], 0.05, beta)
    torch.testing.assert_close(learner.alpha.view(6, 24)[free], alpha.detach()[free], rtol=1e-3, atol=1e-3)
    rounded = torch.where(alpha.detach() >= 0, high, low)
    torch.testing.assert_close(learner.rounded()[free], rounded[free])


def test_adaquant_follows_autograd_through_the_rounding() -> None:
    weight, rows = problem()
    params = compute_qparams(weight, INT4)
    params = QParams(params.scale * 0.6, params.zero_point)  # some weights lie beyond the range, and stay
    learner = AdaQuant(weight, params, INT4)
    shadow = weight.clone().requires_grad_()
    optimizer = torch.optim.Adam([shadow], lr=0.01)
    scale, limit = params.scale[:, None], INT4.dtype.max
    for _ in range(8):
        inside = torch.clamp(shadow / scale, INT4.dtype.min - 0.5, limit + 0.5)
        codes = torch.clamp(inside + (inside.round() - inside).detach(), INT4.dtype.min - 0.5, limit + 0.5)
        codes = codes + (codes.clamp(INT4.dtype.min, limit) - codes).detach()
        torch.testing.assert_close(learner.value, (codes * scale).detach(), rtol=1e-5, atol=1e-6)
        loss = ((torch.relu(rows.inputs @ (codes * scale).T) - rows.targets) ** 2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer = dense()
        out, slope = layer.forward(rows.inputs, learner.value[None])
        learner.step(layer.pull(rows.inputs, (out - rows.targets) * slope * 2 / 64, (1, 6, 24))[0], 0.01)
    torch.testing.assert_close(learner.weight, shadow.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(learner.rounded(), learner.nearest)


@pytest.mark.slow
def test_adaround_finds_nearly_the_best_of_all_roundings() -> None:
    weight, rows = problem(outputs=1, columns=8, rows=256, samples=16)
    kind = spec("int3", PerTensor())
    params = compute_qparams(weight, kind)
    learner, layer = AdaRound(weight, params, kind), dense()
    outcome = train(layer, rows, learner, Training(iterations=500, rate=0.1, samples=4))
    low = dequantize(quantize(weight, params, replace(kind, rounding=FLOOR)), params, kind)
    every = [low + params.scale * torch.tensor([bits], dtype=torch.float32) for bits in product((0, 1), repeat=8)]
    losses = sorted(layer.loss(rows, fake_quantize(w, params, kind)) for w in every)
    assert outcome.learned == pytest.approx(layer.loss(rows, outcome.weight))
    assert outcome.learned <= losses[7] * 1.0001, "among the best eight of 256"
    assert outcome.nearest > 1.5 * losses[0]
    codes = outcome.weight / params.scale
    torch.testing.assert_close(codes, codes.round())


@pytest.mark.parametrize(("groups", "outputs", "columns"), [(1, 5, 7), (3, 4, 6), (5, 1, 9)])
@pytest.mark.parametrize("flipped", [False, True])
def test_products_and_their_gradients_are_those_of_autograd(
    groups: int, outputs: int, columns: int, flipped: bool
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(11, groups * columns), torch.randn(groups, outputs, columns, requires_grad=True)
    bias = torch.randn(groups * outputs)
    layer = Unit(lambda w: w, lambda m: m, flipped=flipped, bias=bias)
    wanted = torch.einsum("rgk,gok->rgo", x.view(11, groups, columns), weight).reshape(11, -1) + bias
    torch.testing.assert_close(layer.product(x, weight.detach()), wanted.detach())
    error = torch.randn_like(wanted)
    wanted.backward(error)
    torch.testing.assert_close(layer.pull(x, error, weight.shape), weight.grad)


@pytest.mark.parametrize(
    "step",
    [RELU, Activation(0.0, 6.0), Activation(slope=0.1), Activation(slope=torch.tensor([0.1, 0.5, 2.0])),
     OutputGrid(QParams(torch.tensor(0.05)), spec("int4"))],
)  # fmt: skip
def test_what_follows_a_layer_has_the_derivative_of_autograd(step: Any) -> None:
    z = (torch.randn(200, 3) * 4).requires_grad_()
    slope = getattr(step, "slope", 1.0)
    if isinstance(step, OutputGrid):
        y = z + (torch.clamp(torch.round(z / 0.05), -8, 7) * 0.05 - z).detach()
        gradient = ((z >= -0.4) & (z <= 0.35)).float()
    else:
        y = torch.clamp(torch.where(z < 0, z * slope, z), step.low, step.high)
        (gradient,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(step(z.detach()), y.detach())
    torch.testing.assert_close(step.derivative(z.detach()) * 1.0, gradient)


def trained(training: Training, kind: type[Any] = AdaRound, **more: Any) -> tuple[float, float, int]:
    """(loss of nearest, loss learned, iterations)."""
    weight, rows = problem(outputs=16, columns=32, rows=512, samples=16)
    learner = kind(weight, compute_qparams(weight, INT4), INT4, **more)
    outcome = train(dense(), rows, learner, training)
    return outcome.nearest, outcome.learned, outcome.iterations


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rate"), [(AdaRound, 0.1), (AdaQuant, 3e-4)])
def test_both_beat_the_nearest_rounding_on_few_rows(kind: type[Any], rate: float) -> None:
    nearest, learned, _ = trained(Training(iterations=400, rate=rate, samples=2, rows=16), kind)
    assert learned < 0.6 * nearest


def test_the_seed_decides_everything() -> None:
    short = Training(iterations=60, rate=0.1, samples=2, rows=16)
    assert trained(short) == trained(short)
    assert trained(short) != trained(replace(short, seed=1))


@pytest.mark.parametrize("change", [{"rows": 64}, {"samples": 4}, {"batches": 3}, {"warm_start": 0.6}, {"rate": 0.02},
                                    {"beta": (8.0, 4.0)}])  # fmt: skip
def test_every_number_of_the_training_has_an_effect(change: dict[str, Any]) -> None:
    short = Training(iterations=60, rate=0.1, samples=2, rows=16)
    assert trained(replace(short, **change)) != trained(short)


def test_the_rate_falls_where_that_is_asked_for() -> None:
    rates: list[float] = []

    class Spy(AdaQuant):
        def step(self, gradient: Any, rate: float, beta: float | None = None) -> None:
            rates.append(rate)
            super().step(gradient, rate, beta)

    trained(Training(iterations=4, rate=0.01, samples=2), Spy)
    trained(Training(iterations=4, rate=0.01, samples=2, decay=True), Spy)
    assert rates == pytest.approx([0.01] * 4 + [0.01, 0.0075, 0.005, 0.0025])


def test_batches_are_averaged() -> None:
    _, rows = problem(samples=16)
    picked = rows.pick(Training(1, 0.1, samples=3, batches=2, rows=6), np.random.default_rng(0))
    assert len(picked) == 6
    assert all(part.stop - part.start == 2 for part in picked)
    assert len({part.start // 4 for part in picked[:3]}) == 3


def test_a_share_of_the_inputs_comes_from_the_float_model() -> None:
    weight, rows = problem()
    half = replace(rows, floats=rows.inputs + 100.0)
    random = np.random.default_rng(0)
    from quark.core.solvers.reconstruct import _batch

    x, _ = _batch(half, Training(1, 0.1, samples=8, rows=64, drop_ratio=0.7), random, weight)
    assert float((x < 50).float().mean()) == pytest.approx(0.7, abs=0.05)


@pytest.mark.slow
def test_training_ends_where_nothing_is_undecided_and_on_request() -> None:
    settled = Training(iterations=1000, rate=0.1, samples=4, rows=64)
    assert trained(settled, reg=1.0)[2] < trained(settled, reg=0.0)[2] == 1000
    fast = Training(iterations=100, rate=3e-2, samples=2, warm_start=0.0)
    assert trained(fast, AdaQuant)[2] == 100
    assert trained(replace(fast, early_stop=True), AdaQuant)[2] < 100


def test_bad_data_and_bad_steps_are_errors() -> None:
    weight, rows = problem(samples=4)
    params = compute_qparams(weight, INT4)
    with pytest.raises(CalibrationError, match="batch_size=5 needs as many samples; there are 4"):
        train(dense(), rows, AdaRound(weight, params, INT4), Training(10, 0.1, samples=5))
    with pytest.raises(NonFiniteError, match="loss is nan"):
        bad = replace(rows, inputs=rows.inputs * float("nan"))
        train(dense(), bad, AdaRound(weight, params, INT4), Training(10, 0.1))
    with pytest.raises(CalibrationError, match="diverges"):
        train(dense(), rows, AdaQuant(weight, params, INT4), Training(50, 10.0))
    with pytest.raises(ConfigError, match="bfloat16. Possible: AdaQuant"):
        AdaRound(weight, params, spec("bfloat16"))


@pytest.mark.slow
def test_a_bias_is_learned_beside_the_weight() -> None:
    weight, rows = problem()
    params = compute_qparams(weight, INT4)
    rows = replace(rows, targets=torch.relu(rows.inputs @ weight.T + 0.5))
    zero = torch.zeros(6)
    outcome = train(dense(bias=zero), rows, AdaQuant(weight, params, INT4), Training(400, 5e-3, samples=4), True)
    assert outcome.bias is not None and bool((outcome.bias > 0.2).all())
    assert not zero.any(), "what was given stays as it was"
    assert train(dense(bias=zero), rows, AdaQuant(weight, params, INT4), Training(40, 5e-3)).bias is not outcome.bias
