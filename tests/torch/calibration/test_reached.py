"""Layers that calibration batches never reach: named before the first forward, where values do not decide the way."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from quark.errors import CalibrationError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.from_disk import stream
from quark.torch.layers.replace import quantized_layers
from tests.commands.program import quark as program
from tests.models.families import MOE, family

SCHEME = LLMTemplate.get("auto").get_config("int8", exclude_layers=[])


@lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length) / 8


class TwoTowers(nn.Module):
    """Reads text, and images where it gets some; `ran` holds whether what any was called with had values."""

    ran: ClassVar[list[bool]] = []

    def __init__(self, by_value: bool = False) -> None:
        super().__init__()
        self.text, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.vision = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.by_value = by_value

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        TwoTowers.ran.append(type(text) is torch.Tensor and not text.is_meta)
        x = self.text(text + positions(text.shape[-1]))
        if image is not None and not (self.by_value and float(image.sum()) < 0):
            x = x + self.vision[1](self.vision[0](image))
        return self.head(x)


TEXT, IMAGE = torch.ones(2, 8), torch.arange(16.0).reshape(2, 8)


def quantize(model: nn.Module, data: Any) -> nn.Module:
    TwoTowers.ran.clear()
    return ModelQuantizer(SCHEME).quantize_model(model, data)


def test_layers_that_no_batch_reaches_are_named_before_a_forward() -> None:
    model = TwoTowers()
    with pytest.raises(CalibrationError) as error:
        quantize(model, [{"text": TEXT}, {"text": TEXT[:1]}])
    said = "vision.0.0, vision.1.0 (2 of 4 layers) are never reached by the calibration data"
    assert said in str(error.value) and "(image)" in str(error.value) and "--exclude 'vision.*')" in str(error.value)
    # What finds out which weights are read elsewhere has run the first batch.
    assert TwoTowers.ran[0] and len(TwoTowers.ran) > 2 and not any(TwoTowers.ran[1:])
    assert type(model.head) is nn.Linear and not quantized_layers(model)


def test_one_batch_of_all_is_enough() -> None:
    layers = quantized_layers(quantize(TwoTowers(), [{"text": TEXT}] * 3 + [{"text": TEXT, "image": IMAGE}]))
    assert len(layers) == 4
    # Functions that keep their results have not kept any without values.
    assert type(positions(8)) is torch.Tensor


@pytest.mark.parametrize("factor", [1, -1])
def test_where_values_decide_the_forward_says_it(factor: int) -> None:
    data = [{"text": TEXT, "image": factor * IMAGE}]
    if factor > 0:
        assert len(quantized_layers(quantize(TwoTowers(by_value=True), data))) == 4
        return
    with pytest.raises(CalibrationError, match=r"vision\.0\.0\.input: .* never reached"):
        quantize(TwoTowers(by_value=True), data)
    assert TwoTowers.ran.count(True) > 1


def test_data_that_are_read_once_are_left_for_the_calibration() -> None:
    assert len(quantized_layers(quantize(TwoTowers(), iter([{"text": TEXT, "image": IMAGE}])))) == 4


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3_moe" else pytest.mark.slow) for n in MOE])
def test_what_tokens_are_routed_to_is_not_asked_for(name: str) -> None:
    config = LLMTemplate.get("auto").get_config("int8")
    data = [torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(0))]
    assert quantized_layers(ModelQuantizer(config).quantize_model(family(name), data))


@pytest.mark.slow
def test_a_decoder_without_what_its_encoder_gives_is_refused_on_the_plan(tmp_path: Path) -> None:
    """In the command, and streamed, before a weight is read."""
    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64, d_model=64, decoder_layers=2, decoder_ffn_dim=64, decoder_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    BartForCausalLM(config).save_pretrained(tmp_path / "float")
    tokens = np.arange(4, 20).reshape(2, 8)
    np.savez(tmp_path / "text.npz", input_ids=tokens)
    np.savez(tmp_path / "both.npz", input_ids=tokens, encoder_hidden_states=np.ones((2, 4, 64), np.float32))
    stored = tmp_path / "float" / "model.safetensors"
    stored.rename(tmp_path / "weights")
    given = (tmp_path / "float", "--scheme", "int8", "--calib")
    pattern = "'model.decoder.layers.*.encoder_attn.*'"
    assert program("plan", *given, tmp_path / "both.npz").code == 0
    done = program("plan", *given, tmp_path / "text.npz")
    assert done.code == 1 and "are never reached" in done.err and "encoder_hidden_states" in done.err, done.err
    assert pattern in done.err and program("plan", *given, tmp_path / "text.npz", "--exclude", pattern[1:-1]).code == 0
    (tmp_path / "weights").rename(stored)
    done = program("quantize", "-o", tmp_path / "out", *given, tmp_path / "text.npz")
    assert done.code == 1 and "are never reached" in done.err
    with pytest.raises(CalibrationError, match="are never reached.*encoder_attn"):
        stream(SCHEME, OpenedFolder(tmp_path / "float"), tmp_path / "out", [{"input_ids": torch.from_numpy(tokens)}])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
