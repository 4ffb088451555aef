"""Blocks run alone get what the whole model gives them, whatever they hand to one another beside the hidden state."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError
from quark.torch import GPTQConfig, ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.model.blocks import find_blocks, record_calls
from quark.torch.model.blocks.after_blocks import CallAfterBlocks, around_hidden, without_blocks
from quark.torch.model.blocks.streams import Like, StateLayout, StreamCall, _first_streams, _Forward, stream_blocks


class Layer(nn.Module):
    """Returns what it made of the hidden state, the bias that it got or made, and a summary that only some read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if bias is None:
            bias = torch.arange(float(x.shape[0] * 4)).view(-1, 4)
        elif self.kind == "changes":
            bias = bias + 1
        y = self.second(self.first(x)) + bias
        return y, y.sum(-1) if self.kind == "computes" else bias, y.mean(0)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias, _ = layer(x, bias)
            bias = bias[:, None] if bias.ndim == 1 else bias
        return x


def inputs_of(model: nn.Module, names: list[str], batch: Any) -> dict[str, list[Any]]:
    """What a run of the whole model gives each block, but for the hidden state."""
    seen: dict[str, list[Any]] = {}

    def note(name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)][1:]

        return before

    handles = [model.get_submodule(n).register_forward_pre_hook(note(n), with_kwargs=True) for n in names]
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return seen


def same_inputs(model: nn.Module, data: list[Any]) -> None:
    """Assert that each recorded call has, beside its hidden state, what the whole model gives the block."""
    names = find_blocks(model)
    calls = record_calls(model, names, data)
    for index, batch in enumerate(data):
        for name, expected in inputs_of(model, names, batch).items():
            call = calls[name][index]
            found = [x for x in tree_leaves((call.args, dict(call.kwargs))) if isinstance(x, torch.Tensor)][1:]
            assert len(found) == len(expected)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_value_that_is_handed_on_is_that_of_its_batch() -> None:
    same_inputs(Model("hands on").eval(), [torch.randn(2, 4), torch.randn(3, 4)])


class Computes(Model):
    """Computes between its blocks what the next one reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summary = torch.zeros(4)
        for layer in self.layers:
            x, _, summary = layer(x, summary.flip(-1))
        return x + summary


class Skips(nn.Module):
    """A UNet: what goes down comes up again later, beside a middle whose lists take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.down, self.up = (
            nn.ModuleList(nn.Sequential(nn.Linear(n, 4), nn.Linear(4, 4)) for _ in "ab") for n in (4, 8)
        )
        self.mid = nn.Module()
        self.mid.first, self.mid.second = (
            nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(n)) for n in (2, 1)
        )
        self.mid.forward = lambda x: self.mid.first[1](self.mid.second[0](self.mid.first[0](x)))  # type: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], -1))
        return x


def same_outputs(model: nn.Module, batches: list[torch.Tensor], names: list[str]) -> None:
    """Assert that blocks run one after the other, and what is behind them, give what the model gives."""
    calls = record_calls(model, names, batches)
    with torch.no_grad():
        for index, batch in enumerate(batches):
            state, expected = calls[names[0]][index].hidden, model(batch)
            for name in names:
                state = calls[name][index].with_hidden(state).run(model.get_submodule(name))
            call = CallAfterBlocks(
                (state,), {}, None, batch, around_hidden(calls[names[-1]][index], model.get_submodule(names[-1]))
            )
            torch.testing.assert_close(call.run(without_blocks(model, names)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model", [Model("changes"), Model("computes"), Computes("hands on"), Skips()], ids=type)
def test_blocks_that_hand_on_several_tensors_run_alone(model: nn.Module) -> None:
    batches = [torch.randn(2, 4), torch.randn(3, 4)]
    names = find_blocks(model.eval(), batch=batches[0])
    assert len(names) == (7 if isinstance(model, Skips) else 3)
    same_outputs(model, batches, names)


class Noisy(Computes):
    """Adds noise to what its first block reads, so that a second run gives that block another input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


def test_the_first_block_reads_its_state_though_another_run_would_give_it_another_one() -> None:
    model = Noisy("hands on").eval()
    names = find_blocks(model, batch=torch.randn(2, 4))
    for call in record_calls(model, names, [torch.randn(2, 4), torch.randn(3, 4)])[names[0]]:
        assert isinstance(call, StreamCall) and call.is_computed
        state = torch.full_like(call.hidden, 2.5)
        read = [x for x in tree_leaves(call.with_hidden(state).arguments()) if isinstance(x, torch.Tensor)]
        assert [bool((x == 2.5).all()) for x in read] == [True, True]


def test_blocks_that_hand_on_several_tensors_are_solved_one_by_one() -> None:
    torch.manual_seed(0)
    model, data = Skips().eval(), [torch.randn(32, 4) for _ in range(4)]
    expected = [model(x) for x in data]
    errors = {}
    cases: dict[str, list[Any]] = {"nearest": [], "gptq": [GPTQConfig()], "fisher": [GPTQConfig(fisher=True)]}
    for name, algorithms in cases.items():
        config = QConfig(
            global_quant_config=config_of_layer(LayerSpec(weight=spec("int3", PerChannel(0)))), algo_config=algorithms
        )
        quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), data)
        with torch.no_grad():
            errors[name] = sum(float((quantized(x) - y).norm()) for x, y in zip(data, expected, strict=True))
    assert max(errors["gptq"], errors["fisher"]) < 0.8 * errors["nearest"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["t5", "bloom", "deberta-v2"])
def test_families_that_hand_on_more_than_the_hidden_state(model_type: str) -> None:
    from benchmarks.architectures.__main__ import build, families

    model, data = build(model_type, families(every=False)[model_type])
    same_inputs(model, data)


class Towers(nn.Module):
    """A large tower that runs only for images, and a small one for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)) for _ in range(2))
        self.text = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.vision if image is not None else ():
            image = block(image)
        x = x if image is None else x + image
        for block in self.text:
            x = block(x)
        return x


def test_a_tower_that_the_batches_do_not_reach_has_no_blocks() -> None:
    x = torch.randn(2, 4)
    assert find_blocks(Towers()) == find_blocks(Towers(), batch=(x, x)) == ["vision.0", "vision.1"]
    assert find_blocks(Towers(), batch=x) == ["text.0", "text.1"]
    with pytest.raises(CalibrationError, match="does not take calibration batch 0"):
        find_blocks(Towers(), batch=torch.randn(2, 5))


@pytest.mark.parametrize("once", [False, True])
def test_gptq_works_on_the_blocks_that_the_batches_reach(once: bool) -> None:
    torch.manual_seed(0)
    model, data = Towers().eval(), [torch.randn(64, 4) @ torch.randn(4, 4) for _ in range(3)]
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int4"))))
    with torch.no_grad():
        expected = torch.cat([model(x) for x in data])

        def error(algorithms: list[GPTQConfig]) -> float:
            quantizer = ModelQuantizer(replace(config, algo_config=algorithms))
            quantized = quantizer.quantize_model(copy.deepcopy(model), iter(data) if once else data)
            return float((torch.cat([quantized(x) for x in data]) - expected).norm())

        assert error([GPTQConfig()]) < error([])


def test_numbers_of_tokens_lie_in_a_state_to_the_last_digit() -> None:
    tensors = {(0, 0): torch.tensor([[2**24 + 1, 3]]), (0, 1): torch.tensor([[0.1, 0.2]])}
    layout = StateLayout(tuple(tensors), tuple(Like(tuple(x.shape), x.dtype) for x in tensors.values()))
    found = layout.unpack(layout.pack(tensors))
    assert all(torch.equal(found[stream], x) and found[stream].dtype == x.dtype for stream, x in tensors.items())


def test_what_other_blocks_read_too_is_no_stream_of_the_first() -> None:
    x, y, mask, place = torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), torch.arange(2)
    _, structure = tree_flatten(())
    first = ([place, mask, x], structure)
    assert _first_streams(_Forward([first, ([place, mask, y], structure)], [], [])) == (None, None, (-1, 2))
    assert _first_streams(_Forward([first, first], [], [])) == (None, (-1, 1), None)


class Twice(Towers):
    """Runs its first block once more at the end."""

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        return self.text[0](super().forward(x, image))


def test_a_block_that_runs_twice_is_none() -> None:
    assert stream_blocks(Twice(), torch.randn(2, 4)) == ["text.1"]
