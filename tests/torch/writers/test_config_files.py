"""config.json says what it said, in the words that it said it in; what was changed in the model is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from tests.models.torch_zoo import tiny_llama

OLD = {
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "torch_dtype": "float32",
    "of_another_program": {"kept": [1, 2]},
}
"""Words of transformers 4."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that transformers 4 wrote, as far as config.json tells."""
    folder = tmp_path / "float"
    tiny_llama().save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "dtype"):
        del stored[name]
    (folder / "config.json").write_text(json.dumps(OLD | stored | OLD, indent=2) + "\n")
    return folder


def exported(source: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """What the config.json of the quantized folder says beside the quantization."""
    model = AutoModelForCausalLM.from_pretrained(source)
    for name, value in changes.items():
        setattr(model.config, name, value)
    quantized = ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo")).quantize_model(model)
    stored: dict[str, Any] = json.loads((export_safetensors(quantized, output) / "config.json").read_text())
    del stored["quantization_config"]
    return stored


def test_a_config_of_old_words_is_the_same_text_up_to_the_quantization(source: Path, tmp_path: Path) -> None:
    exported(source, tmp_path / "out")
    text = (source / "config.json").read_text().removesuffix("\n}\n")
    assert (tmp_path / "out" / "config.json").read_text().startswith(text)
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (
        source / "generation_config.json"
    ).read_bytes()


def test_what_was_changed_in_the_model_is_in_the_file(source: Path, tmp_path: Path) -> None:
    before = json.loads((source / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 7.0}
    stored = exported(source, tmp_path / "out", use_cache=False, rope_parameters=rope)
    assert stored["use_cache"] is False and stored["rope_theta"] == 7.0 and "rope_scaling" not in stored
    unchanged = before.keys() - {"use_cache", "rope_theta", "rope_scaling"}
    assert all(stored[name] == before[name] for name in unchanged)
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rope


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 7.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}]
)
def test_what_only_new_words_say_is_said_in_the_old_ones_too(
    source: Path, rope: dict[str, Any], tmp_path: Path
) -> None:
    AutoConfig.from_pretrained(source, rope_parameters=rope).save_pretrained(source)
    stored = exported(source, tmp_path / "out")
    assert stored["rope_theta"] == 7.0 and stored["torch_dtype"] == stored["dtype"] == "float32"
    assert stored.get("rope_scaling", {}).get("factor") == rope.get("factor")
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rope


def test_another_dtype_is_said_in_the_word_that_was_there(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantized = ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo")).quantize_model(model)
    stored = json.loads((export_safetensors(quantized, tmp_path / "out") / "config.json").read_text())
    assert stored["torch_dtype"] == "bfloat16" and "dtype" not in stored
