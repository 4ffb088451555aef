"""The loop over blocks: what the first block gets, and what is there when a block is finished."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.spec import LayerSpec, block_spec
from quark.torch.algorithms.block_loop import LoopState, loop_over_blocks, record_inputs
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.calibration import work_device
from quark.torch.layers.replace import replace_layer
from quark.torch.model.blocks import find_blocks
from tests.pretended_gpu import PretendedGpu


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x))
        return y


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_get_quantized_embeddings_beside_float_ones() -> None:
    torch.manual_seed(0)
    model, spec = Tokens().eval(), block_spec("q4_0")
    embedding = model.embed.weight.detach().clone()
    layer = replace_layer(model, "embed", LayerSpec(weight=spec))
    ids = [torch.arange(8)[None], torch.arange(8, 16)[None]]
    calls, state = record_inputs(model, {"embed": layer}, find_blocks(model), iter(ids), BlockWeights(), True)
    expected = fake_quantize(embedding, compute_qparams(embedding, spec), spec)
    assert not torch.equal(expected, embedding)
    for index, batch in enumerate(ids):
        assert torch.equal(calls["blocks.0"][index].hidden, expected[batch])
        assert state.float_hidden is not None and torch.equal(state.float_hidden[index], embedding[batch])
    _, state = record_inputs(model, {"embed": layer}, find_blocks(model), ids, BlockWeights())
    assert state.float_hidden is None


def test_what_a_finished_block_gives_has_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that can be resumed writes it, and of several processes only the first has waited for weights by then."""
    torch.manual_seed(0)
    model = Tokens().eval().requires_grad_(False)
    x = torch.arange(8)[None]
    expected, seen = model.blocks[0](model.embed(x)), list[torch.Tensor]()

    def finish(name: str, state: LoopState) -> None:
        seen.extend(y.clone() for y in state.hidden or ())

    monkeypatch.setattr(work_device, "ON_DEVICE", 0)
    with PretendedGpu():
        model.to("cuda")
        names, weights = find_blocks(model), BlockWeights()
        calls, state = record_inputs(model, {}, names, [x.to("cuda")], weights)
        loop_over_blocks(model, names, calls, lambda block: (block.run(block.calls),), weights, (), finish, state)
    (found,) = seen
    assert found.device.type == "cpu" and torch.equal(found, expected)
