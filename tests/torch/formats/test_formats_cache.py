"""Scales of a quantized KV cache in the formats of other programs, under the names that vLLM reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quark.base.libraries.compressed_tensors import unread_caches
from quark.errors import FormatError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_safetensors, import_model_from_safetensors
from tests.models.checkpoints import logits, stored
from tests.models.families import family
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama, token_batches
from tests.models.versions import LATENT_CACHES


def cached(scheme: str, cache: str = "fp8", post_rope: bool = False, **options: Any) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme, kv_cache_scheme=cache, **options)
    config = replace(config, kv_cache_post_rope=post_rope)
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(tiny_llama(), token_batches()))


@pytest.mark.parametrize("cache", ["fp8_per_head", pytest.param("int8_per_head", marks=pytest.mark.slow)])
def test_each_head_has_a_scale_that_transformers_computes_with(
    cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The readers are compressed_tensors and transformers: the model that they make gives the logits of ours."""
    from transformers import AutoModelForCausalLM

    model = cached("int4_wo_32", cache, post_rope=True)
    with torch.no_grad():
        stored_keys = tiny_llama()(token_batches()[0], use_cache=True).past_key_values.layers[0].keys
    folder = export_safetensors(model, tmp_path / "out", "compressed-tensors")
    tensors, config = stored(folder)
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"
    scale = tensors["model.layers.0.self_attn.k_scale"]
    assert scale.shape == (stored_keys.shape[1], 1, 1) and len(scale.unique()) > 1
    if unread_caches() is None:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(loaded.model.layers[0].self_attn.k_scale, scale)
        assert torch.equal(logits(loaded), logits(model))
    said = [record.message for record in caplog.records if "keys and values" in record.message]
    assert said == [why for why in [unread_caches()] if why]
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(seed=9), folder)), logits(model))
    one = cached("int4_wo_32", cache.partition("_")[0], post_rope=True)
    assert not torch.equal(logits(one), logits(model))


def joint(name: str, scheme: str, cache: str = "fp8", **options: Any) -> Any:
    config = LLMTemplate.get(name).get_config(scheme, kv_cache_scheme=cache)
    model = ModelQuantizer(replace(config, **options)).quantize_model(family(name), token_batches())
    return ModelQuantizer.freeze(model)


@pytest.mark.parametrize(
    ("form", "scheme", "cache"),
    [("compressed-tensors", "int4_wo_32", "fp8")]
    + [
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (("fp8", "fp8", "fp8"), ("compressed-tensors", "fp8", "int8_per_head"))
    ],
)
def test_one_layer_for_keys_and_values_has_both_names(form: str, scheme: str, cache: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = joint("phi3", scheme, cache)
    folder = export_safetensors(model, tmp_path / "out", form)
    tensors, _ = stored(folder)
    scale = model.model.layers[0].self_attn.qkv_proj.output_quantizer.scale
    for part in "kv":
        assert torch.equal(tensors[f"model.layers.0.self_attn.{part}_scale"].reshape(scale.shape), scale)
    assert torch.equal(logits(import_model_from_safetensors(family("phi3", 9), folder)), logits(model))
    if form == "compressed-tensors" and unread_caches() is None:
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    tensors["model.layers.0.self_attn.v_scale"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"v_scale differs from the scale of keys, and .*qkv_proj makes both"):
        import_model_from_safetensors(family("phi3", 9), folder)


@pytest.mark.parametrize(
    ("name", "why", "options"),
    [
        pytest.param("deepseek_v3", "latent attention, to which vLLM gives no scale", {}, marks=LATENT_CACHES),
        pytest.param("gpt2", r"vLLM takes attn\.k_scale for a name inside", {}, marks=pytest.mark.slow),
        pytest.param("phi3", "which is no k_proj or v_proj", {"kv_cache_post_rope": False}, marks=pytest.mark.slow),
    ],
)
def test_a_cache_whose_scale_nobody_would_find_is_refused(
    name: str, why: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = joint(name, "fp8", exclude=["*"], **options)
    with pytest.raises(NotSupportedError, match=f"compressed-tensors format has no place for scales of .*{why}"):
        export_safetensors(model, tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize("post_rope", [False, True])
@pytest.mark.parametrize(
    ("form", "scheme", "cache"),
    [("fp8", "fp8", "fp8"), ("compressed-tensors", "int4_wo_32", "fp8"), ("compressed-tensors", "fp8", "int8")],
)
def test_scales_of_the_cache_come_along(form: str, scheme: str, cache: str, post_rope: bool, tmp_path: Path) -> None:
    model = cached(scheme, cache, post_rope)
    folder = export_safetensors(model, tmp_path / "out", form)
    tensors, config = stored(folder)
    for layer in range(2):
        attention = model.get_submodule(f"model.layers.{layer}.self_attn")
        for kind in "kv":
            scale = tensors.pop(f"model.layers.{layer}.self_attn.{kind}_scale")
            assert scale.numel() == 1
            assert float(scale) == float(attention.get_submodule(f"{kind}_proj").output_quantizer.scale)
    assert not [name for name in tensors if "output" in name]
    if form == "fp8":
        assert config["kv_cache_scheme"] == "static"
    else:
        kind = {"num_bits": 8, "type": "float" if cache == "fp8" else "int", "strategy": "tensor", "dynamic": False}
        assert kind.items() <= config["kv_cache_scheme"].items() and config["kv_cache_scheme"]["symmetric"]
    loaded = import_model_from_safetensors(tiny_llama(seed=9), folder)
    assert torch.equal(logits(loaded), logits(model))


def test_the_library_reads_the_scheme_of_the_cache(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    _, config = stored(export_safetensors(cached("int4_wo_32"), tmp_path / "out", "compressed-tensors"))
    scheme = QuantizationConfig(**config).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy) == (8, "float", "tensor")


@pytest.mark.slow
def test_a_cache_that_has_no_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="awq format has no place for a KV cache"):
        export_safetensors(cached("uint4_wo_32"), tmp_path / "out", "awq")
    with pytest.raises(NotSupportedError, match=r"cache in int8\. Possible: a cache in fp8_e4m3"):
        export_safetensors(cached("fp8", "int8"), tmp_path / "out", "fp8")
    with pytest.raises(NotSupportedError, match="fp8 format has no place for .* fp8_e4m3 with a scale for each head"):
        export_safetensors(cached("fp8", "fp8_per_head", post_rope=True), tmp_path / "out", "fp8")
    with pytest.raises(NotSupportedError, match="gguf format has no place for a KV cache"):
        export_gguf(cached("int8_wo"), tmp_path / "out", "m", LANGUAGE_MODEL)
    with pytest.raises(NotSupportedError, match="quantized biases or outputs"):
        export_safetensors(cached("fp8", attention_scheme="fp8"), tmp_path / "out", "fp8")
    assert not list(tmp_path.iterdir())
