"""Model cards: front matter as huggingface's own reader reads it, lines that load the model, no README lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.writers.model_card import add_figures, base_model
from tests.models.torch_zoo import tiny_llama

SOURCE = "---\nlicense: apache-2.0\nlanguage: en\nbase_model: someone/else\ntags: [theirs]\n---\n# Theirs\n"


def exported(source: Path, out: Path, readme: str | None = None, custom_mode: str = "quark") -> Path:
    model = tiny_llama()
    model.save_pretrained(source)
    if readme is not None:
        (source / "README.md").write_text(readme)
    model.config._name_or_path = str(source)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32"))
    return export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), out, custom_mode)


@pytest.mark.slow
def test_hubs_read_what_the_model_is(tmp_path: Path) -> None:
    out = exported(tmp_path / "tiny-llama", tmp_path / "out", SOURCE)
    card = ModelCard.load(out / "README.md")
    found = card.data.to_dict()
    assert found == {
        "license": "apache-2.0", "language": "en", "library_name": "transformers", "base_model": "tiny-llama",
        "base_model_relation": "quantized", "tags": ["quark", "quantized", "llama"],
    }  # fmt: skip
    weights = (out / "model.safetensors").stat().st_size
    assert f"{weights / 1e6:.2f} MB" in card.text and "int4 group 32" in card.text
    assert (out / "README_base.md").read_text() == SOURCE and (
        tmp_path / "tiny-llama" / "README.md"
    ).read_text() == SOURCE


@pytest.mark.slow
def test_the_lines_that_load_the_model_load_it(tmp_path: Path) -> None:
    out = exported(tmp_path / "tiny-llama", tmp_path / "out")
    text = (out / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, object] = {}
    exec(code[0].replace("FOLDER", str(out)), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module) and "README_base.md" not in text
    assert "vllm serve" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme",
    [
        "---\n{[\n---\n",
        "---\n- a\n---\n",
        "no front matter",
        "",
        "---\nlicense: [1\n",
        "---\nlicense: &a [x, *a]\n---\n",
    ],
)
def test_a_damaged_readme_costs_no_model(readme: str, tmp_path: Path) -> None:
    out = exported(tmp_path / "source", tmp_path / "out", readme, "awq")
    found = metadata_load(out / "README.md")
    assert found is not None and "license" not in found and found["tags"] == ["quark", "quantized", "awq", "llama"]
    assert (out / "README_base.md").read_text() == readme


def test_the_base_model_is_called_as_the_hub_calls_it(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--tiny.llama-1b" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    hostile = tmp_path / "a: [b]\n---"
    hostile.mkdir()
    assert base_model(cached) == "org/tiny.llama-1b"
    assert base_model(tmp_path / "llama") == "llama"
    assert base_model(hostile) is None and base_model(None) is None


def test_figures_replace_those_that_are_there(tmp_path: Path) -> None:
    add_figures(tmp_path, {"KL": "1"})
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("# Card\n")
    for value in ("1 nat", "2 nats"):
        add_figures(tmp_path, {"KL": value})
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Card\n") and "| KL | 2 nats |" in text and "1 nat" not in text
