"""Scales of weights: what no scale can hold is refused by the name of the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.errors import CalibrationError
from quark.torch import LLMTemplate, ModelQuantizer

REFUSED = [
    ("int8_wo", 1e-12),
    ("uint4_wo_32", 1e-12),
    ("int8_wo", 1e-41),
    ("int4_wo_per_channel", 1e-41),
    ("fp8", 1e-41),
]


@pytest.mark.parametrize(("scheme", "largest"), REFUSED)
def test_weights_that_would_all_become_zero_are_refused(scheme: str, largest: float) -> None:
    model = nn.Sequential(nn.Linear(32, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.linspace(-1, 1, 256).reshape(8, 32) * largest)
    config = LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])
    with pytest.raises(CalibrationError, match=r"0\.weight: .*all would become zero"):
        ModelQuantizer(config).quantize_model(model, [torch.ones(2, 32)])
    assert type(model[0]) is nn.Linear


def test_zeros_and_a_channel_of_almost_nothing_are_taken() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight[0] = 1e-12
        model[1].weight.zero_()
    config = LLMTemplate.get("auto").get_config("int8_wo", exclude_layers=[])
    out = ModelQuantizer(config).quantize_model(model)(torch.ones(2, 32))
    assert torch.isfinite(out).all()
