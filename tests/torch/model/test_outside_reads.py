"""Layers whose weight the model reads itself are found in one forward, and stay in float."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quark.compat.torch_names.shorthand_specs import Int8PerTensorSpec
from quark.errors import NotSupportedError
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import text_config
from quark.torch.model.outside_reads import example, weights_read_elsewhere

BATCH = torch.ones(2, 4)


class Net(nn.Module):
    """Two layers, of which `second` is used as the test says."""

    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.second, self.first(x))


USES: dict[str, tuple[Callable[[nn.Linear, torch.Tensor], torch.Tensor], bool]] = {
    "called": (lambda layer, x: layer(x), False),
    "its device is asked for": (lambda layer, x: layer(x.to(layer.weight.device)), False),
    "its shape is asked for": (lambda layer, x: layer(x)[:, : layer.weight.shape[0]], False),
    "its dtype is asked for": (lambda layer, x: layer(x.to(layer.weight.dtype)), True),
    "its weight multiplied": (lambda layer, x: F.linear(x, layer.weight), True),
    "its weight by a method": (lambda layer, x: x @ layer.weight.t(), True),
    "both": (lambda layer, x: layer(x) + x @ layer.weight, True),
}


@pytest.mark.parametrize("use", USES)
def test_they_are_found_and_stay_in_float(use: str) -> None:
    function, read = USES[use]
    model = Net(function)
    assert weights_read_elsewhere(model, [BATCH]) == ({"second"} if read else set())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    config = QConfig(global_quant_config=QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec()))
    quantized = ModelQuantizer(config).quantize_model(model, [BATCH])
    assert set(quantized_layers(quantized)) == ({"first"} if read else {"first", "second"})


def test_a_tied_weight_may_be_used_by_any_module_that_holds_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embedding(ids))
            return out

    assert weights_read_elsewhere(Tied(), [torch.zeros(1, 3, dtype=torch.long)]) == set()


@pytest.mark.slow
def test_a_model_may_have_several_main_inputs() -> None:
    """OneFormer takes an image and the task to do."""
    from transformers import ViTConfig, ViTModel

    from benchmarks.architectures.tiny import tiny_config, tiny_model

    class Tasks(ViTModel):
        main_input_name = ["pixel_values", "task_inputs"]  # type: ignore[assignment]  # noqa: RUF012

    model = tiny_model(Tasks, tiny_config(ViTConfig))
    assert set(example(model)) == {"pixel_values"}
    assert weights_read_elsewhere(model) == weights_read_elsewhere(ViTModel(model.config))


@pytest.mark.slow
def test_a_model_may_have_a_part_that_reads_text_and_one_that_writes() -> None:
    """MusicGen: a T5 encoder, and a decoder of sounds; transformers calls the text part ambiguous."""
    from transformers import LlamaConfig, MusicgenConfig, MusicgenDecoderConfig, T5Config

    parts = {"text_encoder": T5Config(), "audio_encoder": {"model_type": "encodec"}}
    config = MusicgenConfig(**parts, decoder=MusicgenDecoderConfig(vocab_size=77))
    assert text_config(config).vocab_size == 77
    assert text_config(LlamaConfig(vocab_size=5)).vocab_size == 5 and text_config(None) is None


def test_a_batch_that_the_model_refuses_says_nothing_and_draws_nothing() -> None:
    model, state = Net(USES["called"][0]), torch.get_rng_state()
    assert weights_read_elsewhere(model, [torch.ones(2, 3)]) == set()
    assert weights_read_elsewhere(model) == set()
    assert torch.equal(torch.get_rng_state(), state)


class Half(nn.Module):
    """One expert, whose second layer is read for its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).to(self.second.weight.dtype))
        return out


def test_experts_that_got_no_token_are_as_the_others() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Half(), Half()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.experts[0](x)
            return out

    assert weights_read_elsewhere(Routed(), [BATCH]) == {"experts.0.second", "experts.1.second"}


def test_where_the_forward_fails_its_code_is_read_and_what_it_calls() -> None:
    class Called(Half):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.within(x)

        def within(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.first.weight.sum()

        def fuse(self) -> torch.Tensor:
            return torch.cat([self.first.weight, self.second.weight])

    wrong = [torch.ones(2, 3)]
    assert weights_read_elsewhere(Half(), wrong) == {"second"}
    assert weights_read_elsewhere(Called(), wrong) == {"first"}


CHANGED: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "mul_": lambda layer, x: layer(x * layer.weight.mul_(2).sum()),
    "copy_": lambda layer, x: layer(x + layer.weight.copy_(x[0])[0]),
}


@pytest.mark.parametrize("by", CHANGED)
def test_a_model_that_changes_weights_of_its_layers_is_refused_before_it_does(by: str) -> None:
    model = Net(CHANGED[by])
    weight = model.second.weight.clone()
    for empty in (False, True):
        with pytest.raises(NotSupportedError, match=f"changes the weight of second .{by}. while that layer is not"):
            weights_read_elsewhere(model.to("meta") if empty else model, [BATCH.to("meta") if empty else BATCH])
        assert empty or torch.equal(model.second.weight, weight)
    reading = Net(lambda layer, x: layer(x.copy_(layer.weight[0])))
    assert weights_read_elsewhere(reading, [BATCH]) == {"second"}


@pytest.mark.slow
def test_a_rwkv_that_rescales_its_layers_is_refused_and_one_that_does_not_is_not() -> None:
    from transformers import AutoModelForCausalLM, RwkvConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "context_length": 64}
    model = AutoModelForCausalLM.from_config(RwkvConfig(**sizes, rescale_every=2)).eval()
    with pytest.raises(NotSupportedError, match="div_"):
        weights_read_elsewhere(model)
    assert (
        weights_read_elsewhere(AutoModelForCausalLM.from_config(RwkvConfig(**sizes, rescale_every=0)).eval()) == set()
    )
