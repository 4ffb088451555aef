"""Rows of a table that are quantized after they are looked up, beside those of the quantized table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, TensorSpec, block_spec
from quark.torch.calibration.calibrate import calibrate_weights, has_rows_alone, scales_of_embeddings, tensor_qparams
from quark.torch.layers.embedding import QuantEmbedding

SPECS: Mapping[str, TensorSpec | None] = {
    **{name: SCHEMES[name].weight for name in ("int8_wo", "uint4_wo_32", "mxfp4", "mx6", "nvfp4")},
    **{name: block_spec(name) for name in ("q4_k", "q6_k", "q5_1", "iq4_xs")},
}
"""With a scale for each row, for each group, of shared exponents, of two levels."""


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_they_have_the_bits_of_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.Embedding(64, 256, dtype=torch.bfloat16)
    layer = QuantEmbedding.from_float(table, LayerSpec(weight=SPECS[name]))
    spec, ids = layer.spec.weight, torch.tensor([[5, 63], [0, 5]])
    assert spec is not None
    expected = fake_quantize(table.weight.detach(), tensor_qparams(table.weight.detach(), spec), spec)[ids]
    alone = has_rows_alone(layer)
    assert alone == (name != "nvfp4")
    if alone:
        with scales_of_embeddings({"table": layer}, in_file=True):
            assert torch.equal(layer(ids), expected)
    calibrate_weights({"table": layer})
    sizes: list[int] = []

    def noted(x: torch.Tensor, *given: Any) -> torch.Tensor:
        sizes.append(len(x))
        return fake_quantize(x, *given)

    monkeypatch.setattr("quark.torch.layers.embedding.fake_quantize", noted)
    assert torch.equal(layer(ids), expected) and sizes == [4]
    every = torch.arange(64)  # as many as the table has
    assert torch.equal(layer(every)[ids], expected) and sizes == [4]
