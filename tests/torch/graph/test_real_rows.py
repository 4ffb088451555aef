"""A graph of one length observes real positions alone: what a graph of any length finds in the bare texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer
from tests.models.graphs import FX
from tests.models.padded import Encoder, bare, padded, texts

LENGTH, ROWS = 20, 3
DIMS = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)}


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
