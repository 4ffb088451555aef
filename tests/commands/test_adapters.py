"""Adapters of PEFT: merged into their base, as PEFT does it, and refused where that cannot be right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file

from tests.commands.program import quark
from tests.models.foreign import encode_folder
from tests.models.torch_zoo import tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]


def make_adapter(folder: Path, base: Path) -> Any:
    """A LoRA adapter with a tokenizer's file of its own; returns the merged model."""
    peft: Any = pytest.importorskip("peft")
    tiny_llama(max_position_embeddings=32).save_pretrained(base)
    (base / "tokenizer_config.json").write_text("{}")
    (base / "special_tokens_map.json").write_text("{}")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(max_position_embeddings=32), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": "../base"}))
    return model.merge_and_unload()


def test_an_adapter_is_quantized_in_its_base(tmp_path: Path) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    make_adapter(adapter, base).save_pretrained(tmp_path / "whole")
    for name in ("whole", "adapter"):
        done = quark("quantize", tmp_path / name, "--scheme", "int8_wo", "-o", tmp_path / f"{name}-int8")
        assert done.code == 0, done.err
    assert "Merged the adapter" in done.log and str(base) in done.log
    made, wanted = (load_file(tmp_path / f"{name}-int8" / "model.safetensors") for name in ("adapter", "whole"))
    plain = load_file(base / "model.safetensors")
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], x) for name, x in wanted.items())
    assert "model.layers.0.self_attn.q_proj.weight" in plain  # and is another there
    assert f"model: {adapter}" in (tmp_path / "adapter-int8" / "quark_recipe.yaml").read_text()
    assert json.loads((tmp_path / "adapter-int8" / "tokenizer_config.json").read_text()) == {"model_max_length": 32}
    assert not (tmp_path / "adapter-int8" / "adapter_config.json").exists()
    assert metadata_load(tmp_path / "adapter-int8" / "README.md")["base_model"] == "adapter"
    cached = tmp_path / "models--org--lora" / "snapshots" / "0123abc"
    shutil.copytree(adapter, cached)
    said = json.loads((cached / "adapter_config.json").read_text())
    (cached / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": str(base)}))
    done = quark("quantize", cached, "--scheme", "int8_wo", "-o", tmp_path / "of-hub")
    assert metadata_load(tmp_path / "of-hub" / "README.md")["base_model"] == "org/lora", done.err
    plan = quark("plan", adapter, "--scheme", "int8_wo")
    assert plan.code == 0 and "q_proj" in plan.out, plan.err


def test_an_adapter_of_a_base_in_codes_is_added_to_what_they_stand_for(tmp_path: Path) -> None:
    """As QLoRA trains them: over weights of bitsandbytes."""
    adapter, base, words = tmp_path / "adapter", tmp_path / "base", ("--scheme", "int8_wo", "-o")
    make_adapter(adapter, base)
    floats = {name: x.dtype for name, x in load_file(base / "model.safetensors").items()}
    config = (base / "config.json").read_text()
    values = encode_folder("bitsandbytes nf4", base)
    done = quark("quantize", adapter, *words, tmp_path / "of_codes")
    assert done.code == 0, done.err
    kept = {name: x for name, x in load_file(base / "model.safetensors").items() if name in floats}
    save_file(kept | {name: x.to(floats[name]) for name, x in values.items()}, base / "model.safetensors")
    (base / "config.json").write_text(config)
    assert quark("quantize", adapter, *words, tmp_path / "of_floats").code == 0
    made, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("of_codes", "of_floats"))
    assert len(values) > 6 and made.keys() == wanted.keys()
    assert all(torch.equal(made[name], x) for name, x in wanted.items())


def test_an_adapter_without_its_float_base_is_refused(tmp_path: Path) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    make_adapter(adapter, base)
    words = ("quantize", adapter, "--scheme", "int8_wo", "-o", tmp_path / "out")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "which is quantized: an adapter is added to float weights" in quark(*words).err
    (base / "config.json").unlink()
    done = quark(*words)
    assert (
        done.code == 1 and "is an adapter of ../base, and no model folder is there. Possible: `hf download" in done.err
    )
    tiny_llama(max_position_embeddings=32, num_hidden_layers=1).save_pretrained(base)
    done = quark(*words)
    assert done.code == 1 and "does not fit" in done.err, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base"}
