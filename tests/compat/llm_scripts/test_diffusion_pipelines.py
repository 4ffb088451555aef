"""Calibration data of a network inside a pipeline, restated with a pipeline of a few lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.compat.llm_scripts.diffusion_pipelines import (
    get_calib_dataloader,
    qconfig_needs_activation_calibration,
    quantize_diffusion_model_in_place,
)
from quark.compat.torch_names.shorthand_specs import FP8E4M3PerTensorSpec, Int8PerTensorSpec
from quark.compat.torch_names.svdquant_modes import QUANT_MODE_TO_SCHEME, build_quant_layer_config
from quark.errors import CalibrationError, NotSupportedError, StructureError
from quark.torch import ModelQuantizer
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig, QLayerConfig


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.proj, self.conv_out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, cond: dict[str, torch.Tensor]) -> Any:
        return self.conv_out(self.proj(self.conv_in(hidden_states).relu() + cond["text"]).relu()) * timestep


class Pipeline:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.transformer = Denoiser()

    def __call__(
        self, prompt: list[str], num_inference_steps: int, generator: torch.Generator, scale: float = 1
    ) -> Any:
        x = torch.randn(1, 4, 8, generator=generator)
        for step in range(num_inference_steps):
            text = torch.full((64,), float(len(prompt[0])))
            x = self.transformer(x, timestep=torch.tensor(scale + step), cond={"text": text})
        return x


@pytest.fixture
def pipe() -> Pipeline:
    return Pipeline()


def test_batches_are_the_arguments_of_the_network_by_name(pipe: Pipeline) -> None:
    data = get_calib_dataloader(pipe, pipe.transformer, ["a cat", "two dogs"], n_steps=3, device="cpu", scale=2.0)
    batches = list(data)
    assert len(batches) == 6 and list(batches[0]) == ["hidden_states", "timestep", "cond"]
    assert [float(batch["cond"]["text"][0]) for batch in batches[::3]] == [5, 8]
    assert float(batches[0]["timestep"]) == 2 and not pipe.transformer._forward_pre_hooks
    assert torch.equal(pipe.transformer(**batches[0]), batches[1]["hidden_states"])


def test_svdquant_by_the_documented_names(pipe: Pipeline) -> None:
    data = get_calib_dataloader(pipe, pipe.transformer, ["a cat"], n_steps=4)
    excluded = ["*conv_in*", "*conv_out*"]
    config = QConfig(
        global_quant_config=build_quant_layer_config("w4a16"),
        exclude=[*excluded, "*correction*"],
        algo_config=[SVDQuantConfig(svd_rank=8, search_alpha=False, min_layer_size=32, exclude_patterns=excluded)],
    )
    (batch, *_), float_model = list(data), Denoiser()
    float_model.load_state_dict(pipe.transformer.state_dict())
    with torch.no_grad():
        wanted = float_model(**batch)
        model = ModelQuantizer(config).quantize_model(pipe.transformer, data)
        error = (model(**batch) - wanted).norm() / wanted.norm()
    assert hasattr(model.proj, "correction") and 0 < error < 0.05
    assert {mode: build_quant_layer_config(mode).weight is not None for mode in QUANT_MODE_TO_SCHEME}.keys() == {
        "w4a16", "w4a4", "mxfp4", "nvfp4"
    }  # fmt: skip


def test_weights_alone_need_no_data_and_static_inputs_do(pipe: Pipeline) -> None:
    weights = QConfig(QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec()))
    static = QConfig(QLayerConfig(input_tensors=FP8E4M3PerTensorSpec().to_quantization_spec()))
    assert not qconfig_needs_activation_calibration(weights) and qconfig_needs_activation_calibration(static)
    with pytest.raises(NotSupportedError, match="get_calib_dataloader"):
        quantize_diffusion_model_in_place(pipe.transformer, static)
    before = pipe.transformer.proj.weight.clone()
    quantize_diffusion_model_in_place(pipe.transformer, weights)
    assert len(pipe.transformer.proj.weight.unique()) <= 256 < len(before.unique())


def test_what_cannot_give_batches_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(CalibrationError, match="does not call"):
        get_calib_dataloader(pipe, Denoiser(), ["a cat"], n_steps=1)
    with pytest.raises(StructureError, match="'inputs'"):
        get_calib_dataloader(pipe, nn.DataParallel(Denoiser()), ["a cat"])
