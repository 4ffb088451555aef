"""The config.json of an export holds what that of the model held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from tests.models.torch_zoo import tiny_llama, token_batches


@pytest.mark.parametrize("field", ["output_attentions", "output_hidden_states", "return_dict"])
def test_fields_that_transformers_reads_and_does_not_save_are_kept(field: str, tmp_path: Path) -> None:
    value = field != "return_dict"
    tiny_llama().save_pretrained(tmp_path / "float")
    path = tmp_path / "float" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    model = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo")).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[field] is value
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded.config.return_dict = model.config.return_dict = True  # without, Llama runs in no form
    assert torch.equal(loaded(token_batches()[0]).logits, model(token_batches()[0]).logits)
