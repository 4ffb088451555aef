"""Layers that a model calls by the name of their argument, `layer(input=x)`, as blocks of UNetMotionModel do."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

import quark


class Block(nn.Module):
    def __init__(self, named: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.named = named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.named:
            return x + cast(torch.Tensor, self.down(torch.relu(self.up(self.norm(x)))))
        return x + cast(torch.Tensor, self.down(input=torch.relu(self.up(input=self.norm(input=x)))))


class Blocks(nn.Module):
    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(named) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("algorithm", ["gptq", "qronos", "awq", "smooth", "autoround", "svdquant:min_layer_size=8"])
def test_they_are_solved_as_those_called_by_position(algorithm: str) -> None:
    data = list(torch.randn(4, 2, 16, 32, generator=torch.Generator().manual_seed(1)))
    outputs: list[Any] = []
    for named in (False, True):
        model = quark.quantize(Blocks(named), "int8", data=data, algorithm=algorithm)
        with torch.no_grad():
            outputs.append(model(data[0]))
    assert torch.equal(*outputs)
