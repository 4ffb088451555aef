"""The plan keeps a small layer in float that groups do not divide, and refuses a scheme that suits few weights."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn

from quark.compat.torch_names.shorthand_specs import Int8PerTensorSpec
from quark.core.schemes import SCHEMES
from quark.errors import ShapeError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer, lower_layer
from quark.torch.plan import Plan, make_plan
from tests.models.torch_zoo import tiny_llama

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


def test_a_plan_prints_as_a_table_in_a_notebook_too_and_cuts_no_name() -> None:
    from rich.console import Console

    long = nn.ModuleDict({f"a_name_that_is_too_long_for_a_column_{end}": nn.Linear(64, 64) for end in ("of", "by")})
    plan = make_plan(CONFIG, model(20))
    assert "0 ... 1" in str(plan) and "(groups do" in repr(plan)
    assert "<td>0 ... 1</td><td>2</td>" in plan._repr_html_()
    console = Console(width=80, record=True, file=StringIO())
    console.print(make_plan(CONFIG, long).table(long))
    shown = console.export_text()
    assert "…" not in shown and "column_of" in "".join(line.split("│")[1].strip() for line in shown.splitlines()[4:-1])


def test_where_they_are_many_or_named_it_is_an_error() -> None:
    # The last layer holds 5376 of 43264 weights: 12 %.
    with pytest.raises(ShapeError, match="Layer '2' .*group_size 32 does not divide axis -1 of length 84"):
        make_plan(CONFIG, model(84))
    named = replace(CONFIG, layer_quant_config={"2": CONFIG.global_quant_config})
    with pytest.raises(ShapeError, match="length 20"):
        make_plan(named, model(20))


def test_convolutions_that_groups_do_not_divide_stay_in_float_beside_linear_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernels = [nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 1), nn.Flatten()]
    assert [*make_plan(CONFIG, nn.Sequential(*kernels, nn.Linear(64, 640))).layers] == ["3"]
    said = (
        "2 of 3 layers, with 12 % of the weights, stay in float, as the scheme does not fit them: 2 Conv2d. Layer '0'"
    )
    assert f"[QUARK-INFO]: {said}" in capsys.readouterr().err
    make_plan(CONFIG, nn.Sequential(*kernels, nn.Linear(64, 4)))
    assert "[QUARK-WARNING]: 2 of 3 layers, with 96 % of the weights" in capsys.readouterr().err
    with pytest.raises(ShapeError, match=r"'0' \(Conv2d"):
        make_plan(CONFIG, nn.Sequential(*kernels))
    with pytest.raises(ShapeError, match=r"'3' \(Linear"):
        make_plan(CONFIG, nn.Sequential(*kernels, nn.Linear(65, 640)))


def test_quantizing_leaves_it_as_it_was() -> None:
    quantizer = ModelQuantizer(CONFIG)
    quantized = quantizer.freeze(quantizer.quantize_model(model(20)))
    weights, expected = quantized.state_dict(), model(20).state_dict()
    assert torch.equal(weights["2.weight"], expected["2.weight"])
    assert not torch.equal(weights["1.weight"], expected["1.weight"])


def test_an_entry_for_a_head_alone_is_meant_though_a_selector_excludes_heads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheme, other = CONFIG.global_quant_config, config_of_layer(SCHEMES["int8_wo"])
    selected = replace(CONFIG, exclude=["@output_head"])

    def planned(**fields: Any) -> Plan:
        return make_plan(replace(selected, **fields), tiny_llama())

    assert planned().layers.keys().isdisjoint({"lm_head"})
    for name in ("lm_head", "*head"):
        assert planned(layer_quant_config={name: other}).layers["lm_head"] == lower_layer(other)
    assert "lm_head" not in planned(layer_quant_config={"*": other}).layers, "that is about others as well"
    assert "changes nothing" not in capsys.readouterr().err
    both = planned(exclude=["lm_head"], layer_quant_config={"lm_head": scheme})
    assert "lm_head" in both.excluded
    assert "layer_quant_config: 'lm_head' changes nothing, as `exclude` names all" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["auto", "llama"])
def test_a_template_leaves_a_head_in_float_unless_it_is_named(family: str) -> None:
    template = LLMTemplate.get(family)
    config = template.get_config("int8_wo", layer_config={"lm_head": "uint4_wo_32"})
    assert str(make_plan(config, tiny_llama()).layers["lm_head"].weight).startswith("uint4 group 32")
    assert "lm_head" in make_plan(template.get_config("int8_wo"), tiny_llama()).excluded


def test_what_has_no_quantized_form_is_said_and_in_the_table(caplog: pytest.LogCaptureFixture) -> None:
    """A GRU, an attention of torch, and a parameter of a module of one's own: none is a layer that is replaced."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.gain = nn.Parameter(torch.eye(16)), nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.matrix * self.gain

    model = nn.ModuleDict(
        {"linear": nn.Linear(16, 16), "rnn": nn.GRU(16, 16), "attention": nn.MultiheadAttention(16, 2), "own": Scaled()}
    )
    config = QConfig(global_quant_config=QLayerConfig(weight=Int8PerTensorSpec()))
    plan = make_plan(config, model)
    assert list(plan.layers) == ["linear"] and plan.unknown == ("rnn", "attention", "attention.out_proj", "own")
    rows = dict(zip(*(list(column.cells) for column in plan.table(model).columns[:3:2]), strict=True))
    assert rows["rnn"] == "1,536 values" and rows["own"] == "256 values" and rows["attention.out_proj"] == "(16, 16)"
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"GRU (rnn, {1536 / total:.0%} of the weights)" in plan.without_form(model)
    caplog.set_level("INFO", "quark")
    ModelQuantizer(config).quantize_model(model)
    assert "no quantized form" in caplog.text and plan.without_form(model) in caplog.text
    caplog.clear()
    ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    assert "no quantized form" not in caplog.text


def test_a_table_is_read_by_indices_which_have_no_scale() -> None:
    """A rule with inputs that names an Embedding quantizes its weight; its indices are not observed."""
    both = QLayerConfig(weight=Int8PerTensorSpec(), input_tensors=Int8PerTensorSpec())
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    config = QConfig(global_quant_config=both, layer_type_quant_config={nn.Embedding: both})
    plan = make_plan(config, model)
    assert plan.layers["0"].weight is not None and plan.layers["0"].input is None
    assert plan.layers["1"].input is not None
    ModelQuantizer(config).quantize_model(model, [torch.tensor([[0, 4], [1, 2]])])
    assert type(model[0]).__name__ == "QuantEmbedding"
