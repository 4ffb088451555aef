"""What AutoRound learns from: the loss of a block, its gradient, and what it is called for by name."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import quark
from quark.core.granularity import PerGroup
from quark.core.quantize import fake_quantize
from quark.core.scales import qparams_from_range
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.errors import StructureError
from quark.torch.algorithms.rounding.autoround import AutoRound, BlockLoss
from quark.torch.algorithms.rounding.learned_rounding import LearnedRounding, Readers
from quark.torch.config.algo_configs import AutoRoundConfig
from quark.torch.config.named_algorithms import algo_config_by_name
from quark.torch.layers.replace import replace_layer
from quark.torch.model.blocks import Call, JoinedCalls, joined_call, takes_joined
from tests.models.torch_zoo import tiny_llama, token_batches

INT3 = spec("int3", PerGroup(-1, 8), symmetric=False)
SYMMETRIC = spec("int4", PerGroup(-1, 8), symmetric=True)


def calls(count: int, rows: int = 2) -> list[Call]:
    generator = torch.Generator().manual_seed(0)
    return [Call((torch.randn(rows, 5, 16, generator=generator),), {}) for _ in range(count)]


def loss_of(module: nn.Module, moments: torch.Tensor | None = None) -> BlockLoss:
    made = calls(3)
    return BlockLoss(module, made, [call.hidden.tanh() for call in made], moments)


def test_the_loss_is_the_quadratic_form_of_the_error_in_the_mean_moment() -> None:
    torch.manual_seed(0)
    module, root = nn.Linear(16, 16), torch.randn(16, 16)
    moments = root @ root.T
    loss = loss_of(module, moments)
    error = (module(loss.calls[1].hidden) - loss.targets[1]).detach().flatten(0, 1)
    expected = torch.einsum("ti,ij,tj->t", error, moments / moments.diagonal().mean(), error).mean() / 16
    assert loss.mean([1]) == pytest.approx(float(expected), rel=1e-5)
    assert loss_of(module).mean([1]) == pytest.approx(float(error.square().mean()), rel=1e-5)
    assert loss_of(module, torch.zeros(16, 16)).mean([1]) == loss_of(module).mean([1])  # outputs that nothing reads


def test_batches_in_one_call_have_the_gradient_of_one_after_the_other() -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    learned = [module.weight]
    together, apart = loss_of(module), loss_of(module)
    assert together.joined
    apart.joined = None
    values = [float(loss.learn([0, 2], learned)) for loss in (together, apart)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    sums = []
    for loss in (together, apart):
        module.weight.grad = None
        loss.learn([0, 2], learned)
        sums.append(module.weight.grad)
    torch.testing.assert_close(*sums)
    assert module.bias.grad is None


def test_batches_of_many_tokens_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    module = nn.Linear(16, 16)
    module.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    loss = loss_of(module)
    for tokens, expected in ((30, [6]), (20, [4, 2]), (10, [2, 2, 2]), (1, [2, 2, 2])):
        monkeypatch.setattr("quark.torch.algorithms.rounding.autoround.TOGETHER", tokens)
        rows.clear()
        loss.learn([0, 1, 2], [module.weight])
        assert rows == expected


class Centred(nn.Module):
    """Takes the mean over the rows of a batch: no module to which batches may be given together."""

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def test_calls_are_joined_where_every_argument_allows_it() -> None:
    first, second = calls(2)
    mask, positions = torch.ones(2, 1, 5, 5), torch.arange(5)
    one, other = (replace(call, kwargs={"mask": mask * i, "at": positions, "cache": None}) for i, call in
                  enumerate((first, second)))  # fmt: skip
    joined = joined_call([one, other])
    assert joined is not None and joined.kwargs["mask"].shape == (4, 1, 5, 5)
    assert torch.equal(joined.hidden, torch.cat([one.hidden, other.hidden]))
    assert torch.equal(joined.kwargs["at"], positions) and joined.kwargs["cache"] is None
    for wrong in ({"at": positions + 1}, {"cache": object()}, {"mask": mask[:, :, :4]}, {"more": 1}):
        assert joined_call([one, replace(other, kwargs={**other.kwargs, **wrong})]) is None
    assert takes_joined(nn.Linear(16, 16), JoinedCalls([first, second]))
    assert not takes_joined(Centred(), JoinedCalls([first, second]))
    assert not takes_joined(nn.Linear(16, 16), JoinedCalls([first]))


def test_calls_are_compared_once_and_what_is_the_same_in_all_is_joined_once() -> None:
    first, _, third = calls(3)
    mask, table = torch.ones(2, 1, 5, 5), torch.arange(2.0)[:, None]
    made = [replace(call, kwargs={"mask": mask * i, "table": table.clone()}) for i, call in enumerate(calls(3))]
    joined = JoinedCalls(made)
    both, others = joined.of([2, 0]), joined.of([0, 1])
    assert both is not None and others is not None
    assert torch.equal(both.hidden, torch.cat([third.hidden, first.hidden]))
    assert torch.equal(both.kwargs["mask"], torch.cat([mask * 2, mask * 0]))
    assert torch.equal(both.kwargs["table"], torch.cat([table] * 2)) and both.kwargs["table"] is others.kwargs["table"]
    longer = replace(made[1], args=(torch.randn(2, 7, 16),))
    apart = JoinedCalls([made[0], longer, replace(made[2], kwargs={**made[2].kwargs, "mask": torch.zeros(1)}), made[1]])
    assert [apart.of(pair) is None for pair in ([0, 1], [0, 2], [0, 3], [1])] == [True, True, False, False]


@pytest.mark.parametrize("form", [INT3, SYMMETRIC], ids=["asymmetric", "symmetric"])
def test_ranges_move_against_the_gradient_of_their_own_rounding(form: TensorSpec) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6, bias=False))
    layer = replace_layer(model, "0", LayerSpec(weight=form))
    readers = Readers({"0": layer})
    learned = LearnedRounding([readers])
    x, y = torch.randn(40, 16), torch.randn(40, 6)

    def loss(low_share: torch.Tensor, high_share: torch.Tensor) -> torch.Tensor:
        """In float64, round() fixed at the codes of now: what autograd differentiates."""
        low, high = (learned.ends.double() * torch.stack([low_share, high_share])).unbind()
        steps = form.dtype.max - form.dtype.min
        scale = (torch.maximum(-low, high) / (steps / 2) if form.symmetric else (high - low) / steps)[..., None]
        weight = learned.weight.double()
        inside = weight + scale * (learned.values.double() - weight).detach() / scale.detach()
        ends = torch.where(weight > high[..., None], high[..., None], torch.where(weight < low[..., None],
                           low[..., None], inside))  # fmt: skip
        return ((x.double() @ ends.reshape(6, 16).T - y.double()) ** 2).mean()

    learned.attach()
    learned.share.copy_(torch.tensor([[[0.8]], [[0.7]]]))
    learned.show()
    at = [share.double().requires_grad_() for share in learned.share]
    slopes = torch.autograd.grad(loss(*at), at)
    ((x @ readers.weight.T - y) ** 2).mean().backward()
    before = learned.share.clone()
    learned.step(0.0, 0.01)
    moved = before - learned.share
    if form.symmetric:  # one range, whose ends move together
        assert torch.equal(*map(torch.sign, moved))
    else:
        for slope, change in zip(slopes, moved, strict=True):
            assert torch.equal(change.sign(), slope.sign().float())
    learned.detach()
    params = qparams_from_range(*(learned.ends * learned.share).unbind(), form)
    learned.freeze()
    torch.testing.assert_close(layer.weight.detach(), fake_quantize(readers.parameters[0].detach(), params, form))


def test_by_name_it_is_the_form_that_loses_less_in_less_time() -> None:
    named = algo_config_by_name("autoround")
    assert (named.fisher, named.keep_better, named.lr * named.iters) == ("auto", True, 1.0)
    assert (AutoRoundConfig().iters, AutoRoundConfig().batch_size, AutoRoundConfig().fisher) == (200, 8, False)


def test_scores_are_taken_of_as_many_tokens_as_moments_need() -> None:
    model, batches = tiny_llama(hidden_size=16, intermediate_size=32), token_batches(40)
    tokens, scored = batches[0].numel(), AutoRound(AutoRoundConfig(fisher=True)).scored
    assert len(scored(model, batches)) == -(-16 * 16 // tokens)
    assert len(scored(model, batches[:1])) == 1
    assert len(scored(nn.Linear(4, 4), batches)) == 40  # of no known width: all


class TwoStreams(nn.Module):
    """A block whose layers run on so many tokens, then on the next ones."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.up, self.down, self.tokens = nn.Linear(64, 64), nn.Linear(64, 64), tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([self.down(self.up(part).tanh()) for part in x.split(self.tokens, 1)], 1)


class TwoStreamModel(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoStreams(tokens), TwoStreams(tokens)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 64])
def test_layers_that_run_twice_in_a_block_are_learned_and_by_others_refused(tokens: int) -> None:
    """Those that run twice on a long sequence, and once on a short one, too."""
    torch.manual_seed(0)
    model, data = TwoStreamModel(tokens), [torch.randn(2, 2 * tokens - 1, 64) for _ in range(3)]
    expected = [model(x).detach() for x in data]
    errors = {}
    for name, taken in ((None, None), ("autoround", data)):
        made = quark.quantize(copy.deepcopy(model), "uint4_wo_64", algorithm=name, data=taken)
        errors[name] = sum(float((made(x).detach() - y).square().sum()) for x, y in zip(data, expected, strict=True))
    assert errors["autoround"] < 0.8 * errors[None]
    with pytest.raises(StructureError, match=r"blocks.0.down, blocks.0.up: these layers run more than once.*AutoRound"):
        quark.quantize(copy.deepcopy(model), "uint4_wo_64", algorithm="gptq", data=data)
