"""A graph of one length observes real positions alone: what a graph of any length finds in the bare texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.graph.real_rows import rows_at
from tests.models.graphs import FX
from tests.models.padded import PAD, bare, padded, texts

LENGTH, ROWS = 20, 3
DIMS = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)}


class Encoder(nn.Module):
    """One block of attention; its padding is the loudest word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32)
        self.query, self.value, self.up, self.down = (nn.Linear(32, 32) for _ in range(4))
        with torch.no_grad():
            self.words.weight[PAD] = 30

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        heads = (*x.shape[:2], 4, 8)
        query, value = self.query(x).view(heads).transpose(1, 2), self.value(x).view(heads).transpose(1, 2)
        scores = query @ query.transpose(-1, -2) + (1 - attention_mask[:, None, None].float()) * -1e9
        y = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        flat = self.up(x + y).relu().flatten(0, 1)
        out: torch.Tensor = self.down(flat).view(x.shape)
        return out


def scales(data: list[Any], fixed: bool) -> dict[str, torch.Tensor]:
    example = padded(texts(), length=LENGTH, rows=ROWS)[0]
    dims = None if fixed else {"input_ids": DIMS, "attention_mask": DIMS}
    by_name = isinstance(data[0], dict)
    args, kwargs = ((), example) if by_name else (tuple(example.values()), {})
    graph = torch.export.export(Encoder().eval(), args, kwargs, dynamic_shapes=dims).module()
    config = replace(LLMTemplate.get("auto").get_config("int8", exclude_layers=[]), quant_mode=FX)
    state = ModelQuantizer(config).quantize_model(graph, data).state_dict()
    return {name: x for name, x in state.items() if name.endswith("scale")}


@pytest.mark.parametrize("by_place", [False, True], ids=["by name", "by place"])
def test_scales_are_those_of_the_bare_texts(by_place: bool) -> None:
    batches = padded(texts(), length=LENGTH, rows=ROWS)
    expected = scales(bare(texts()), fixed=False)
    data: list[Any] = [tuple(batch.values()) for batch in batches] if by_place else list(batches)
    for fixed in (True, False):
        found = scales(data, fixed)
        assert found.keys() == expected.keys()
        for name, scale in expected.items():
            torch.testing.assert_close(found[name], scale, rtol=1e-5, atol=0, msg=name)  # products of other shapes
    whole = scales([{**batch, "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)} for batch in batches], True)
    assert all(whole[name] > 2 * scale for name, scale in expected.items() if "up.input" in name)


SHAPES = [(3, 20, 8), (60, 8), (3, 4, 20, 8), (3, 8, 20), (3, 20, 4, 8), (3, 20, 20), (3, 4, 8, 20), (3, 4, 20, 20)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_layout(shape: tuple[int, ...]) -> None:
    mask = padded(texts())[0]["attention_mask"].bool()
    axis = 0 if shape[0] == 60 else shape.index(20)
    places = mask.flatten().nonzero()[:, 0]
    x = torch.randn(shape)
    rows = x if shape[0] == 60 else x.movedim(axis, 1).flatten(0, 1)
    found = rows_at(x, [mask])
    assert found.ndim == x.ndim
    assert torch.equal(found.flatten().sort()[0], rows[places].flatten().sort()[0])


def test_rows_of_heads_in_one_axis() -> None:
    mask, x = padded(texts())[0]["attention_mask"].bool(), torch.randn(3, 4, 20, 8)
    assert torch.equal(rows_at(x.flatten(0, 1), [mask]), rows_at(x, [mask]).flatten(0, 1))


@pytest.mark.parametrize("shape", [(3, 8), (8,), (4, 20, 8), (), (3, 20, 20, 8)])
def test_what_has_no_positions_counts_whole(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert rows_at(x, [padded(texts())[0]["attention_mask"].bool()]) is x
