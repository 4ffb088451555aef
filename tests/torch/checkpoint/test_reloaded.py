"""A model that was loaded from a quantized checkpoint is exported, saved and quantized further, its codes untouched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quark.errors import ConfigError, NotSupportedError
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    export_gguf,
    export_safetensors,
    gguf_config,
    import_model_from_gguf,
    import_model_from_safetensors,
)
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import LANGUAGE_MODEL
from tests.torch.writers.test_gguf import IDS, MIX_SIZES, build, logits, tensors

pytestmark = pytest.mark.slow
F16 = torch.float16


def quantized(scheme: str) -> Any:
    model = build("llama", F16, attention_bias=False, **MIX_SIZES)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    return quantizer.freeze(quantizer.quantize_model(model, [IDS]))


def reload(folder: Path) -> Any:
    return import_model_from_safetensors(None, folder, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(
    ("scheme", "first", "second"),
    [
        ("int4_wo_32", "quark", "awq"),
        ("uint4_wo_128", "awq", "compressed-tensors"),
        ("uint4_wo_128", "compressed-tensors", "quark"),
        ("int8", "quark", "compressed-tensors"),
        ("mxfp4", "compressed-tensors", "quark"),
        ("fp8", "fp8", "quark"),
    ],
)
def test_formats_of_equal_grids_hold_the_same_codes(scheme: str, first: str, second: str, tmp_path: Path) -> None:
    """The folder made of the reloaded model is that of the model itself, tensor by tensor."""
    model = quantized(scheme)
    loaded = reload(export_safetensors(model, tmp_path / "first", first))
    converted = load_file(export_safetensors(loaded, tmp_path / "second", second) / "model.safetensors")
    direct = load_file(export_safetensors(model, tmp_path / "direct", second) / "model.safetensors")
    assert torch.equal(logits(reload(tmp_path / "second")), logits(model))
    if scheme != "uint4_wo_128":  # compressed-tensors holds as signed what the others hold as unsigned
        assert converted.keys() == direct.keys()
        assert all(torch.equal(converted[name].float(), direct[name].float()) for name in direct)


def test_folders_and_gguf_files_of_equal_grids_hold_the_same_values(tmp_path: Path) -> None:
    model = quantized("int4_wo_32")
    loaded = reload(export_safetensors(model, tmp_path / "quark"))
    file = export_gguf(loaded, tmp_path, "m", LANGUAGE_MODEL)
    direct = tensors(export_gguf(model, tmp_path / "direct", "m", LANGUAGE_MODEL))
    assert all(np.array_equal(tensor.data, direct[name].data) for name, tensor in tensors(file).items())
    of_file = import_model_from_gguf(build("llama", F16, seed=5, attention_bias=False, **MIX_SIZES), file)
    again = export_safetensors(of_file, tmp_path / "again", "awq")
    assert torch.equal(logits(reload(again)), logits(model))
    # The minimum of Q4_1 is a float16 of its own, scale times zero point is not.
    wide = reload(export_safetensors(quantized("uint4_wo_32"), tmp_path / "uint4"))
    with pytest.raises(NotSupportedError, match="would not keep its values to the bit"):
        export_gguf(wide, tmp_path / "out", "m", LANGUAGE_MODEL)
    assert not list((tmp_path / "out").glob("*"))


def test_files_of_mixes_are_written_again_and_fit_no_folder(tmp_path: Path) -> None:
    float_model = build("llama", F16, attention_bias=False, **MIX_SIZES)
    quantizer = ModelQuantizer(gguf_config(float_model, "q4_k_m"))
    model = quantizer.freeze(quantizer.quantize_model(float_model))
    file = export_gguf(model, tmp_path, "m", LANGUAGE_MODEL)
    loaded = import_model_from_gguf(build("llama", F16, seed=5, attention_bias=False, **MIX_SIZES), file)
    again = export_gguf(loaded, tmp_path / "again", "m", LANGUAGE_MODEL)
    reread = import_model_from_gguf(build("llama", F16, seed=6, attention_bias=False, **MIX_SIZES), again)
    assert torch.equal(logits(reread), logits(model))
    with pytest.raises(NotSupportedError, match="cannot hold the block types of GGUF"):
        export_safetensors(loaded, tmp_path / "quark")
    with pytest.raises(NotSupportedError, match="export_gguf"):
        loaded.save_pretrained(tmp_path / "quark")


def test_a_reloaded_model_is_saved_as_it_came(tmp_path: Path) -> None:
    for form in ("quark", "awq"):
        folder = export_safetensors(quantized("uint4_wo_128"), tmp_path / form, form)
        loaded = copy.deepcopy(reload(folder))
        loaded.save_pretrained(tmp_path / f"{form}-saved")
        one, other = (load_file(place / "model.safetensors") for place in (folder, tmp_path / f"{form}-saved"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(logits(reload(tmp_path / f"{form}-saved")), logits(loaded))
        loaded.save_pretrained(tmp_path / f"{form}-saved")  # as a trainer does, again and again
        assert load_file(tmp_path / f"{form}-saved" / "model.safetensors").keys() == one.keys()
        with pytest.raises(NotSupportedError, match="variant"):
            loaded.save_pretrained(tmp_path / "other", variant="fp16")


def test_what_was_left_in_float_is_quantized_and_the_rest_stays(tmp_path: Path) -> None:
    model = build("llama", F16, attention_bias=False, **MIX_SIZES)
    config = LLMTemplate.get("llama").get_config("uint4_wo_128", exclude_layers=["*down_proj", "lm_head"])
    quantizer = ModelQuantizer(config)
    first = reload(export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), tmp_path / "first"))
    before = {name: layer.weight.clone() for name, layer in quantized_layers(first).items()}
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo"))
    both = quantizer.freeze(quantizer.quantize_model(first))
    layers = quantized_layers(both)
    assert set(layers) - set(before) == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    assert all(torch.equal(layers[name].weight, weight) for name, weight in before.items())
    saved = reload(export_safetensors(both, tmp_path / "both"))
    assert torch.equal(logits(saved), logits(both))
    with pytest.raises(ConfigError, match="holds quantized layers already, and none"):
        ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo")).quantize_model(saved)


def test_blocks_that_share_their_weights_in_float_hold_codes_of_their_own(tmp_path: Path) -> None:
    """Encoder and decoder of DiffusionGemma have one set of weights; what they become depends on their inputs."""
    from benchmarks.architectures.__main__ import build as tiny

    model, _ = tiny("diffusion_gemma", "DiffusionGemmaModel")
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo"))
    model = quantizer.freeze(quantizer.quantize_model(model))
    layer = model.decoder.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.flip(1), requires_grad=False)
    loaded = type(model).from_pretrained(export_safetensors(model, tmp_path / "out"))
    own = import_model_from_safetensors(None, tmp_path / "out")
    ours, theirs = quantized_layers(own), quantized_layers(loaded)
    assert ours.keys() == theirs.keys() and len(ours) > 40
    assert all(torch.equal(ours[name].weight, theirs[name].weight) for name in ours)
    twin = ours["encoder.language_model.layers.0.self_attn.q_proj"].weight
    assert torch.equal(ours["decoder.layers.0.self_attn.q_proj"].weight, twin.flip(1))


def test_a_bias_that_a_quantized_head_shares_is_loaded_from_its_one_name(tmp_path: Path) -> None:
    """BLIP's head and the predictions around it hold one bias, which files hold once."""
    from transformers import BlipTextLMHeadModel

    from benchmarks.architectures.__main__ import build as tiny

    model, _ = tiny("blip_text_model", "BlipTextLMHeadModel")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo", exclude_layers=[]))
    model = quantizer.freeze(quantizer.quantize_model(model))
    assert "cls.predictions.decoder" in quantized_layers(model)
    loaded = BlipTextLMHeadModel.from_pretrained(export_safetensors(model, tmp_path / "out"))
    assert torch.equal(loaded.cls.predictions.decoder.bias, model.cls.predictions.bias)


def test_experts_that_the_module_around_them_draws_are_loaded(tmp_path: Path) -> None:
    """Qwen 3 Omni draws the merged weights of experts, which a quantized folder holds apart, when it is loaded."""
    from benchmarks.architectures.__main__ import build as tiny

    model, _ = tiny("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel")
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo"))
    model = quantizer.freeze(quantizer.quantize_model(model))
    folder = export_safetensors(model, tmp_path / "out")
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    ours, theirs = (quantized_layers(m) for m in (import_model_from_safetensors(None, folder), loaded))
    assert not any(report.values()) and any("experts" in name for name in ours)
    assert all(torch.equal(ours[name].weight, theirs[name].weight) for name in ours)
