"""The plan keeps a small layer in float that groups do not divide, and refuses a scheme that suits few weights."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch
from torch import nn

from quark.core.schemes import SCHEMES
from quark.errors import ShapeError
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.plan import make_plan

CONFIG = QConfig(global_quant_config=config_of_layer(SCHEMES["uint4_wo_32"]))


def model(odd: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, odd), nn.Linear(odd, 64)).eval()


def test_a_small_layer_that_groups_do_not_divide_stays_in_float_and_the_plan_says_so() -> None:
    from rich.console import Console

    plan = make_plan(CONFIG, model(20))
    assert [*plan.layers] == ["0", "1"] and plan.excluded == plan.to_exclude == ("2",) and plan.unfit == {"2"}
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan.table(model(20)))
    assert "float (groups do not divide it)" in console.export_text()


def test_where_they_are_many_or_named_it_is_an_error() -> None:
    # The last layer holds 5376 of 43264 weights: 12 %.
    with pytest.raises(ShapeError, match="Layer '2' .*group_size 32 does not divide axis -1 of length 84"):
        make_plan(CONFIG, model(84))
    named = replace(CONFIG, layer_quant_config={"2": CONFIG.global_quant_config})
    with pytest.raises(ShapeError, match="length 20"):
        make_plan(named, model(20))


def test_quantizing_leaves_it_as_it_was() -> None:
    quantizer = ModelQuantizer(CONFIG)
    quantized = quantizer.freeze(quantizer.quantize_model(model(20)))
    weights, expected = quantized.state_dict(), model(20).state_dict()
    assert torch.equal(weights["2.weight"], expected["2.weight"])
    assert not torch.equal(weights["1.weight"], expected["1.weight"])
