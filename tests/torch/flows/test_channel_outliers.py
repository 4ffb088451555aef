"""Channels of inputs that are far larger than the others: named as planted, and as large as hooks of torch see them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quark.errors import CalibrationError, ConfigError
from quark.report.figures import ChannelMaxima
from quark.torch import LLMTemplate, ModelQuantizer, channel_outliers
from quark.torch.config.algo_configs import RotationConfig
from tests.models.families import family
from tests.models.torch_zoo import every_layer, mlp, token_batches


def planted(rows: int = 64) -> torch.Tensor:
    x = torch.rand(rows, 128, generator=torch.Generator().manual_seed(0)) + 1
    x[:, 17] *= 50
    x[0, 90] = -40
    x[:, :70:10] = 0
    return x


def test_a_planted_channel_is_named_with_the_share_of_the_range_that_is_its() -> None:
    x = planted()
    found = channel_outliers(mlp(), [x[:32], x[32:]])
    first = found.layers["up"]
    assert next(iter(found.layers)) == "up" and first.outliers == [17, 90]
    assert first.values == pytest.approx(x.abs().amax(0).numpy())
    rest = np.delete(first.values, [17, 90]).max()
    assert first.outlier_share == pytest.approx(1 - rest / first.values[17]) and first.outlier_share > 0.95
    assert first.median == np.median(first.values[first.values > 0])
    assert "17 (" in str(found) and "channel 17 (" in first.caption and f"{first.outlier_share:.0%}" in first.caption


@pytest.mark.slow
def test_a_notebook_has_a_picture_of_each_layer_that_is_shown() -> None:
    found = channel_outliers(mlp(), [planted()])
    assert found._repr_html_().count("<svg") == 2
    assert replace(found, shown=1)._repr_html_().count("<svg") == 1 and "1 of 2 layers" in str(replace(found, shown=1))


def test_a_channel_is_an_outlier_above_six_times_the_median_of_those_in_use() -> None:
    values = np.array([1.0, 1.0, 1.0, 6.0, 6.1, *[0.0] * 20])
    assert ChannelMaxima("a", values).outliers == [4]
    broken = ChannelMaxima("a", np.array([1.0, np.inf, 1.0]))
    assert broken.outliers == [1] and broken.outlier_share == 1 and "inf" in broken.caption
    zeros = ChannelMaxima("a", np.zeros(3))
    assert (zeros.outliers, zeros.outlier_share, zeros.spread) == ([], 0.0, 1.0)
    assert "None is more than" in zeros.caption


def test_channels_are_those_of_each_kind_of_layer() -> None:
    model, seen = every_layer(), dict[str, list[torch.Tensor]]()
    for name in ("linear", "conv", "deconv", "head"):
        hook = model.get_submodule(name).register_forward_pre_hook
        hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0].detach()))
    found = channel_outliers(model, token_batches())
    assert found.layers.keys() == seen.keys()  # tables read no floats
    for name, inputs in seen.items():
        x = torch.cat(inputs)
        rows = x.movedim(1, -1) if "conv" in name else x
        assert found.layers[name].values == pytest.approx(rows.reshape(-1, rows.shape[-1]).abs().amax(0).numpy()), name


@pytest.mark.slow
def test_masked_positions_do_not_count_and_experts_have_rows_of_their_own() -> None:
    model = family("qwen3_moe")
    ids = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    padded = {"input_ids": torch.cat((ids, ids), 1), "attention_mask": torch.tensor([[1] * 24 + [0] * 24])}
    names = [name for name, _ in model.named_modules()]
    whole, cut = (channel_outliers(model, [batch]).layers for batch in (padded, ids))
    assert "model.layers.0.mlp.experts.0.up_proj" in whole and whole.keys() == cut.keys()
    for name, each in whole.items():
        assert each.values == pytest.approx(cut[name].values, rel=1e-5), name
    assert [name for name, _ in model.named_modules()] == names
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_a_rotation_that_runs_with_the_model_is_in_what_is_read() -> None:
    config = LLMTemplate.get("auto").get_config("int8_wo")
    config.algo_config = [RotationConfig(r4=True)]
    ids = torch.randint(3, 64, (1, 32), generator=torch.Generator().manual_seed(0))
    model = ModelQuantizer(config).quantize_model(copy.deepcopy(family("llama")), [ids])
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    seen: list[torch.Tensor] = []
    with layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        found = channel_outliers(model, [ids], ["model.layers.0.mlp.down_proj"])
    read = layer.online_rotation.apply(seen[0])
    (values,) = (each.values for each in found.layers.values())
    assert values == pytest.approx(read.flatten(0, -2).abs().amax(0).numpy())


def test_names_give_the_order_and_what_is_not_there_is_refused() -> None:
    found = channel_outliers(mlp(), [planted()], ["down", "up"])
    assert [*found.layers] == ["down", "up"]
    with pytest.raises(ConfigError, match="no layer 'upp'.*up"):
        channel_outliers(mlp(), [planted()], ["upp"])
    with pytest.raises(CalibrationError, match="no batch"):
        channel_outliers(mlp(), [])
