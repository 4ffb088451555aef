"""A weight whose rows are solved in parts has the values and scales of one that is solved at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.core.blocks.block_types import BLOCK_TYPES
from quark.core.scales import QParams
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, block_spec
from quark.torch import ModelQuantizer
from quark.torch.algorithms.layer_weights import weight_quantizer
from quark.torch.algorithms.rounding import gptq
from quark.torch.config.algo_configs import AlgoConfig, GPTAQConfig, GPTQConfig, QronosConfig
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.replace import quantized_layers

COLUMNS, ROWS, PART = 256, 40, 16
SOLVERS: dict[str, AlgoConfig] = {
    "gptq": GPTQConfig(refine_passes=2),
    "on the way": GPTQConfig(desc_act=False, static_groups=False, group_aware_order=True),
    "gptaq": GPTAQConfig(),
    "qronos": QronosConfig(inside_layer_modules=[], model_decoder_layers=""),
}
SPECS = {name: SCHEMES[name] for name in SCHEMES} | {name: LayerSpec(weight=block_spec(name)) for name in BLOCK_TYPES}
ROUNDING = [
    name for name, each in SPECS.items() if each.weight and not each.weight.is_cast and each.weight.code_spec is None
]
SUMS = 1e-6
"""Relative: a product of fewer rows may add in another order, which is some units of the last place of float32."""


def solved(scheme: str, algorithm: AlgoConfig, columns: int = COLUMNS, rows: int = ROWS) -> tuple[torch.Tensor, Any]:
    """The weight and the scales of one layer."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(rows, columns, generator=random) * torch.rand(rows, 1, generator=random))
    data = [torch.randn(1, 24, columns, generator=random) for _ in range(2)]
    config = QConfig(global_quant_config=config_of_layer(SPECS[scheme]), algo_config=[algorithm])
    (layer,) = quantized_layers(ModelQuantizer(config).quantize_model(model, data)).values()
    return layer.weight.detach(), weight_quantizer(layer).params


def assert_same(found: QParams, expected: QParams) -> None:
    torch.testing.assert_close(found.scale, expected.scale, rtol=SUMS, atol=0)
    torch.testing.assert_close(found.zero_point, expected.zero_point, rtol=SUMS, atol=0)
    if expected.second is None:
        assert found.second is None
    else:
        assert found.second is not None
        assert_same(found.second, expected.second)


@pytest.mark.parametrize(
    "solver", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in SOLVERS if name != "gptq")]
)
@pytest.mark.parametrize("scheme", ROUNDING)
def test_parts_are_those_of_the_whole(scheme: str, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, at_once = solved(scheme, SOLVERS[solver])
    monkeypatch.setattr(gptq, "ELEMENTS", PART * COLUMNS)
    monkeypatch.setattr(gptq, "LEAST_ROWS", PART)
    parts, in_parts = solved(scheme, SOLVERS[solver])
    torch.testing.assert_close(parts, whole, rtol=SUMS, atol=0)
    assert_same(in_parts, at_once)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["q4_k", "q8_0", "int4_wo_128"])
def test_a_layer_of_a_real_width(scheme: str) -> None:
    """Intermediate size 2816 beside 1024: more than the 2^21 elements that are solved at once."""
    rows, columns = 2816, 1024
    assert rows * columns > gptq.ELEMENTS
    weight, params = solved(scheme, SOLVERS["gptq"], columns, rows)
    assert weight.shape == (rows, columns)
    while params is not None:
        assert len(params.scale) == rows
        params = params.second
