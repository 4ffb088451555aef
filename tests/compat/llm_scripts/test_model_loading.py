"""Loading by folder as scripts do it, and the small helpers around it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from quark.compat.llm_scripts import model_loading
from quark.errors import ConfigError, FormatError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.utils import llm
from quark.torch.utils.llm import (
    check_compatibility_before_quantization,
    create_model_skeleton,
    get_model,
    get_tokenizer,
    maybe_save_preprocessors,
    move_model_to_device_if_it_fits,
    prepare_for_moe_quant,
    preprocess_for_quantization,
    revert_model_patching,
    save_model,
    set_seed,
)
from tests.models.families import family

MODEL = Path(__file__).parents[3] / "examples" / "models" / "language_model"
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def model() -> Any:
    return get_model(MODEL, "float32", device="cpu")[0]


@pytest.mark.slow
def test_a_folder_is_loaded_as_asked(model: Any) -> None:
    again, dtype = get_model(str(MODEL), device="cpu", attn_implementation="sdpa")
    assert dtype == again.dtype == torch.float16 and not again.training
    assert again.config._attn_implementation == "sdpa" and model.config._attn_implementation == "eager"
    assert model.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, again.lm_head.weight.float())


@pytest.mark.parametrize(
    ("given", "device_map"),
    [({"multi_gpu": True}, "auto"), ({"multi_gpu": "balanced"}, "balanced"), ({"multi_device": True}, "auto")],
)
def test_a_model_is_spread_by_transformers(
    model: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], device_map: str
) -> None:
    asked: dict[str, Any] = {}

    def load(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
        asked.update(options, dtype=dtype)
        return model

    monkeypatch.setattr(model_loading, "load_float_model", load)
    assert get_model(MODEL, "float32", device="no device", **given)[0] is model
    assert (asked["device_map"], asked["dtype"]) == (device_map, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "custom_mode"), [("fp8", "quark"), ("uint4_wo_32", "awq")])
def test_a_quantized_folder_is_loaded_as_it_computes(tmp_path: Path, scheme: str, custom_mode: str) -> None:
    made, _ = get_model(MODEL, device="cpu")
    config = LLMTemplate.get("llama").get_config(scheme)
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_model(made, [IDS]))
    export_safetensors(made, tmp_path / "out", custom_mode=custom_mode)
    loaded, _ = get_model(tmp_path / "out", device="cpu")
    assert torch.equal(loaded(IDS).logits, made(IDS).logits)
    for attention in ("eager", "sdpa"):
        skeleton = create_model_skeleton(MODEL, attn_implementation=attention)
        assert skeleton.lm_head.weight.is_meta and skeleton.config._attn_implementation == attention
        filled = import_model_from_safetensors(skeleton, tmp_path / "out")
        # sdpa sums in another order.
        assert torch.equal(filled(IDS).logits, made(IDS).logits) or attention == "sdpa"
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(made.config, attn_implementation="eager")
    filled = import_model_from_safetensors(bare, tmp_path / "out")
    assert torch.equal(filled(IDS).logits, loaded(IDS).logits), "as printed in the guide of the export"


@pytest.mark.slow
def test_a_tokenizer_pads_on_the_left_by_its_own_token() -> None:
    tokenizer = get_tokenizer(MODEL, max_seq_len=99)
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<pad>")
    assert tokenizer.model_max_length == 512, "the files say so"


@pytest.mark.slow
def test_what_a_tokenizer_lacks_is_given(tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("pad_token", "model_max_length"):
        settings.pop(name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = get_tokenizer(folder, max_seq_len=99)
    assert (tokenizer.pad_token, tokenizer.model_max_length) == ("</s>", 99)
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="tokenizer of llama has no padding token"):
        get_tokenizer(folder, model_type="llama")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        get_model(MODEL, "bfloat", device="cpu")
    with pytest.raises(ConfigError, match="'gpu' cannot be used"):
        get_model(MODEL, device="gpu")
    with pytest.raises(ConfigError, match="multi_gpu is 'all'"):
        get_model(MODEL, multi_gpu="all")
    with pytest.raises(FormatError, match="is no folder"):
        get_model(tmp_path / "absent", device="cpu")


def test_a_name_of_the_hub_is_looked_up_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: tmp_path / name)
    with pytest.raises(FormatError, match="tiny is no model folder"):
        get_model("owner/tiny", device="cpu")

    def fail(name: str) -> None:
        raise OSError("offline\nmode")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FormatError, match="owner/tiny is no folder, and the hub does not give it: offline mode"):
        get_model("owner/tiny", device="cpu")


def test_compatibility_is_a_forward_of_eight_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    good = family("llama")
    assert check_compatibility_before_quantization(good)
    with torch.no_grad():
        good.lm_head.weight.fill_(float("nan"))
    assert not check_compatibility_before_quantization(good)
    assert "gives NaN or infinity" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Linear cannot run on eight tokens"):
        check_compatibility_before_quantization(nn.Linear(3, 3), raise_on_error=True)


@pytest.mark.slow
def test_what_a_model_brings_for_its_inputs_is_saved(tmp_path: Path) -> None:
    maybe_save_preprocessors(MODEL, tmp_path / "out")
    assert get_tokenizer(tmp_path / "out")("a text")["input_ids"] == get_tokenizer(MODEL)("a text")["input_ids"]
    (tmp_path / "empty").mkdir()
    maybe_save_preprocessors(tmp_path / "empty", tmp_path / "none")
    assert not (tmp_path / "none").exists(), "what is not there is not saved"


def test_preprocessing_shows_the_layers_of_fused_experts() -> None:
    model, ids = family("mixtral"), torch.arange(16)[None]
    expected = model(ids).logits
    preprocess_for_quantization(model)
    preprocess_for_quantization(model, reload=True)
    revert_model_patching(model)
    assert prepare_for_moe_quant is preprocess_for_quantization
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".experts.0." in name]
    assert [name.rsplit(".", 1)[1] for name in names[:3]] == ["w1", "w3", "w2"]
    # Products of another shape: the order of sums in float32 differs.
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    for function in (preprocess_for_quantization, revert_model_patching):
        with pytest.raises(ConfigError, match="torch.nn.Module"):
            function("llama")  # type: ignore[arg-type]


def test_a_model_moves_where_it_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1000, 1000)
    assert move_model_to_device_if_it_fits(model, "cpu") is model
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4_000_000, 8_000_000))
    assert move_model_to_device_if_it_fits(model, "cuda:0").weight.device.type == "cpu"
    assert "it needs 0.0 GB" in capsys.readouterr().err


def test_a_float_model_is_saved_and_a_quantized_one_refused(tmp_path: Path) -> None:
    model = family("llama")
    save_model(model, None, tmp_path / "float")
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "float").iterdir()}
    ModelQuantizer(LLMTemplate.get("llama").get_config("int8")).quantize_model(model, [IDS])
    with pytest.raises(ConfigError, match="export_safetensors"):
        save_model(model, None, tmp_path / "quantized")
    with pytest.raises(ConfigError, match="no transformers model"):
        save_model(nn.Linear(2, 2), None, tmp_path / "other")
    assert not (tmp_path / "quantized").exists()


def test_a_seed_repeats_all_three_sources() -> None:
    drawn = []
    for _ in range(2):
        set_seed(7)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1] and llm.LLMTemplate is LLMTemplate
