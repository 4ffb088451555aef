"""Rotation of models whose layers are taken apart first (GPT-2, mixture of experts), and of a quantized cache (R3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.compat.torch_names.shorthand_specs import Int8PerTensorSpec
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.algorithms.rotation.quarot import ModelRotation
from quark.torch.algorithms.scaling.float64_forward import Exact, difference
from quark.torch.config.algo_configs import GPTQConfig, RotationConfig
from quark.torch.layers.online_rotation import input_rotations
from quark.torch.model.passes import prepare
from tests.models.architectures import build, token_ids
from tests.models.torch_zoo import tiny_llama, token_batches

DOWN = {"gpt2": 2, "mixtral": 8, "qwen3_moe": 8}
"""Model -> its down projections: two blocks, of one or of four experts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DOWN)
def test_outputs_stay_the_same(name: str) -> None:
    model = build(name).double()
    before = Exact(model, (token_ids(),), {}).run()[0]
    prepare(model, lambda layer: True)
    ModelRotation(model, RotationConfig(r2=True, r3=name != "gpt2", r4=True, random_r1=True)).rotate()
    assert difference(before, Exact(model, (token_ids(),), {}).run()[0]) < 1e-9
    assert len(list(input_rotations(model))) == DOWN[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", DOWN)
def test_reloaded_models_compute_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = LLMTemplate.get("llama").get_config("mxfp4")
    algorithm = RotationConfig(r2=True, r4=True, rotation_size=8)
    model = ModelQuantizer(replace(config, algo_config=[algorithm])).quantize_model(build(name))
    export_safetensors(model, tmp_path / "quark")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quark")
    with torch.no_grad():
        assert torch.equal(reloaded(token_ids()).logits, model(token_ids()).logits)


def with_outlying_keys() -> Any:
    """Two features of each key are 30 times as large, and those of the queries as much smaller."""
    model = tiny_llama()
    with torch.no_grad():
        for block in model.model.layers:
            for layer, factor in ((block.self_attn.k_proj, 30), (block.self_attn.q_proj, 1 / 30)):
                # The two of one pair of the rotary embedding, so that it mixes equals.
                layer.weight.unflatten(0, (-1, 32))[:, [15, 31]] *= factor
    return model


@pytest.mark.slow
def test_r3_spreads_outlying_keys_in_the_cache(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = token_batches()[0]
    with torch.no_grad():
        expected = with_outlying_keys()(ids).logits
    config = LLMTemplate.get("llama").get_config("int8_wo", kv_cache_scheme="fp8")
    int8 = Int8PerTensorSpec("min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False)
    cache = {k: replace(v, output_tensors=int8.to_quantization_spec()) for k, v in config.kv_cache_quant_config.items()}
    config = replace(config, kv_cache_quant_config=cache, kv_cache_post_rope=True)
    errors, scales = [], []
    for algorithms in (None, [RotationConfig(r1=False, r3=True)]):
        quantizer = ModelQuantizer(replace(config, algo_config=algorithms))
        model = quantizer.quantize_model(with_outlying_keys(), token_batches())
        with torch.no_grad():
            errors.append(float((model(ids).logits - expected).norm()))
        scales.append(float(model.get_buffer("model.layers.0.self_attn.k_proj.output_quantizer.scale")))
    assert scales[1] < scales[0] / 3 and errors[1] < 0.9 * errors[0]  # the rest is of weights and values
    export_safetensors(model, tmp_path / "quark")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quark")
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_gptq_solves_what_the_rotated_layers_read(tmp_path: Path) -> None:
    """GPTQ after R4 sees rotated inputs: it beats rounding to nearest in the output of the down projection."""
    from transformers import AutoModelForCausalLM

    config = LLMTemplate.get("llama").get_config("uint4_wo_128")
    ids = torch.randint(0, 64, (4, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = tiny_llama()(ids).logits
    errors = []
    for algorithms in ([RotationConfig(r2=True, r4=True)], [RotationConfig(r2=True, r4=True), GPTQConfig()]):
        model = ModelQuantizer(replace(config, algo_config=algorithms)).quantize_model(tiny_llama(), [ids])
        with torch.no_grad():
            errors.append(float((model(ids).logits - expected).norm()))
    assert errors[1] < 0.9 * errors[0]
    export_safetensors(model, tmp_path / "quark")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quark")
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, model(ids).logits)
