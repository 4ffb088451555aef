"""What an adapter says of itself is looked at before its base is loaded, so that a plan finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quark.core.metrics import sqnr
from quark.errors import FormatError
from quark.torch.flows.adapters import CONFIG, WEIGHTS, base_of, merged
from tests.models.families import family


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of one tensor; its base has a config."""
    for name in ("adapter", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter" / CONFIG).write_text('{"peft_type": "LORA", "base_model_name_or_path": "../base"}')
    save_file({"x": torch.ones(1)}, tmp_path / "adapter" / WEIGHTS)
    return tmp_path / "adapter"


def test_the_base_is_found_from_the_adapter(adapter: Path) -> None:
    assert base_of(adapter).path == adapter.parent / "base"


@pytest.mark.parametrize("name", ["owner/name", "../adapter", "a\0b", "https://example.com/x", "", 3])
def test_a_base_is_a_folder_of_a_model(adapter: Path, name: object) -> None:
    (adapter / CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": name}))
    with pytest.raises(FormatError, match="no model folder is there|names no base model"):
        base_of(adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_its_files_are_whole_and_its_own(adapter: Path, name: str) -> None:
    kept = (adapter / name).rename(adapter.parent / "elsewhere")
    (adapter / name).symlink_to(kept)
    with pytest.raises(FormatError, match="out of its folder"):
        base_of(adapter)
    (adapter / name).unlink()
    with pytest.raises(FormatError, match=r"cannot be read|not JSON"):
        base_of(adapter)
    (adapter / name).write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"truncated|not JSON"):
        base_of(adapter)


def test_integers_are_no_values_of_an_adapter(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    name = "base_model.model.q_proj.lora_A.weight"
    save_file({name: torch.ones(2, 2, dtype=torch.int32)}, adapter / WEIGHTS)
    with pytest.raises(FormatError, match=f"{name} has the type int32"), merged(adapter, tmp_path / "out"):
        pass


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"]}, True),
    ],
)
def test_an_adapter_on_a_weight_that_two_layers_share_changes_one_of_them(
    options: dict[str, object], tied: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    family("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        family("llama", tie_word_embeddings=True), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    )
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text()) | {"base_model_name_or_path": "../base"}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(said))
    ids = torch.arange(2, 40)[None]
    with merged(tmp_path / "adapter", tmp_path / "out") as folder, torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder)
        assert whole.config.tie_word_embeddings is tied
        assert sqnr(model.eval()(ids).logits, whole(ids).logits) > 100  # that of a sum in another order
