"""Blocks run alone get what the whole model gives them, whatever they hand to one another beside the hidden state."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, StructureError
from quark.torch import GPTQConfig, ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.model.blocks import find_blocks, record_calls


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


@pytest.mark.parametrize(("kind", "reason"), [("changes", "changes a value beside its hidden state")])
def test_blocks_that_change_it_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(StructureError, match=reason):
        record_calls(Model(kind).eval(), ["layers.0", "layers.1", "layers.2"], [torch.randn(2, 4)])


def test_a_value_that_follows_from_the_hidden_state_is_refused() -> None:
    class Computes(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            summary = torch.zeros(4)
            for layer in self.layers:
                x, _, summary = layer(x, summary)
            return x

    with pytest.raises(StructureError, match="computed from that hidden state"):
        record_calls(Computes("hands on").eval(), ["layers.0", "layers.1", "layers.2"], [torch.randn(2, 4)])


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
