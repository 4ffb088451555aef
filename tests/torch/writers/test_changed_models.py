"""Models that are not as their class builds them any more: adapters stay out of a folder, other changes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quark
from quark.errors import NotSupportedError
from quark.torch import export_safetensors
from tests.models.denoisers import denoiser
from tests.models.torch_zoo import tiny_llama

peft = pytest.importorskip("peft")


def lora(*names: str) -> Any:
    return peft.LoraConfig(r=2, target_modules=[*names], init_lora_weights=False)


def test_the_folder_of_a_network_with_an_adapter_holds_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network: Any = quark.quantize(denoiser("flux"), "int8_wo", output=tmp_path / "out")
    loaded = type(network).from_pretrained(tmp_path / "out")
    loaded.add_adapter(lora("to_q", "to_k"))
    names = [*loaded.state_dict()]
    loaded.save_pretrained(tmp_path / "again")
    assert "the adapter around 4 layers is not in it" in caplog.text and [*loaded.state_dict()] == names
    file = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    with pytest.raises(NotSupportedError, match=r"around 4 layers.*fuse_lora and unload_lora_weights"):
        quark.quantize(adapted := _adapted(denoiser("flux"), "to_q", "to_k"), "int8_wo", output=tmp_path / "no")
    with pytest.raises(NotSupportedError, match="was quantized with an adapter in it"):
        export_safetensors(quark.quantize(adapted, "int8_wo"), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def _adapted(model: Any, *names: str) -> Any:
    model.add_adapter(lora(*names))
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_transformers_saves_the_adapter_of_a_loaded_model_and_the_base_is_written_without(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quark.quantize(tiny_llama(), "int8_wo", output=tmp_path / "out")
    stored = (tmp_path / "out" / "model.safetensors").read_bytes()
    loaded: Any = _adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), "q_proj")
    loaded.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, loaded(tokens).logits)
    around = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), lora("q_proj"))
    for index, model in enumerate((loaded, around)):
        export_safetensors(model, tmp_path / str(index))
        assert (tmp_path / str(index) / "model.safetensors").read_bytes() == stored


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_other_layers_than_those_of_the_class_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    network: Any = quark.quantize(denoiser("flux"), "int8_wo", output=tmp_path / "out")
    block = network.transformer_blocks[0]
    block.ff = Around(block.ff)
    with pytest.raises(
        NotSupportedError, match=r"diffusers would not load .* would lack transformer_blocks\.0\.ff\.net"
    ):
        export_safetensors(network, tmp_path / "no")
    block.ff = block.ff.inner
    block.attn.to_more = torch.nn.Linear(2, 2)
    with pytest.raises(NotSupportedError, match=r"has no place for transformer_blocks\.0\.attn\.to_more\.bias"):
        export_safetensors(network, tmp_path / "no")
    assert not (tmp_path / "no").exists()
