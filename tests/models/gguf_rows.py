"""Tiny models of each architecture that GGUF files are written of, and of what varies inside one."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.plan import Plan
from quark.torch.writers.folder import of_model
from quark.torch.writers.gguf.file import GgufTarget

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPARSE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4}
GPT2 = {"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LONG |= {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.7 * i for i in range(8)]}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True},
    "mistral": SIZES | {"sliding_window": None},
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 32},
    "phi3": SIZES | {"sliding_window": None},
    "starcoder2": SIZES | {"sliding_window": None},
    "gemma2": SIZES | GEMMA,
    "gemma3_text": SIZES | GEMMA | {"num_hidden_layers": 6},
    "gpt2": GPT2,
    "gemma": SIZES | {"head_dim": 16},
    "olmo2": SIZES,
    "stablelm": SIZES | {"partial_rotary_factor": 0.25},
    "phi": SIZES | {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "gpt_neox": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"rotary_pct": 0.25},
    "granite": SIZES | {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    "mixtral": SIZES | {"num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "olmoe": SIZES | EXPERTS | {"num_key_value_heads": 4, "norm_topk_prob": False},
    "smollm3": SIZES | {"num_hidden_layers": 4},
    "olmo": SIZES,
    "olmo3": SIZES | {"num_hidden_layers": 4, "sliding_window": 8},
    "cohere": SIZES | {"logit_scale": 0.5},
    "cohere2": SIZES | {"logit_scale": 0.5, "num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16},
    "glm": SIZES | {"head_dim": 16},
    "glm4": SIZES | {"head_dim": 16},
    "falcon": SIZES | {"ffn_hidden_size": 128, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"vocab_size": 2048, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1},
    "mpt": {"vocab_size": 2048, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gpt_bigcode": GPT2,
    "nemotron": SIZES | {"head_dim": 16},
    "arcee": SIZES | {"head_dim": 16},
    "seed_oss": SIZES | {"head_dim": 16},
    "ernie4_5": SIZES | {"head_dim": 16},
    "exaone4": SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "hunyuan_v1_dense": SIZES | {"head_dim": 16},
    "helium": SIZES | {"head_dim": 16},
    "internlm3": SIZES | {"head_dim": 16},
    "ministral": SIZES | {"head_dim": 16, "sliding_window": 48},
    "granitemoe": SIZES | {"num_local_experts": 4, "embedding_multiplier": 3.0, "attention_multiplier": 0.1},
    "deepseek_v2": SIZES | SPARSE | LATENT | {"norm_topk_prob": False},
    "deepseek_v3": SIZES | SPARSE | LATENT,
    "glm4_moe_lite": SIZES | SPARSE | LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "glm4_moe": SIZES | SPARSE | {"head_dim": 16},
    "dots1": SIZES | SPARSE | {"num_key_value_heads": 4},
    "minimax_m2": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "ernie4_5_moe": SIZES
    | {"head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 32},
    "hunyuan_v1_moe": SIZES | {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "gpt_oss": SIZES
    | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
CONFIGS |= {
    "llama4_text": SIZES
    | {"head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
    | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192},
    "ministral3": SIZES
    | {"head_dim": 16}
    | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "jais2": SIZES | {"head_dim": 16, "num_key_value_heads": 4},
    "cwm": SIZES | {"head_dim": 16, "sliding_window": 48, "rope_parameters": PLAIN},
    "solar_open": SIZES | SPARSE | {"head_dim": 16},
    "exaone_moe": SIZES
    | SPARSE
    | {"head_dim": 16, "num_experts": 4, "num_shared_experts": 1, "num_hidden_layers": 4, "sliding_window": 8},
    "youtu": SIZES | LATENT,
}
PLAIN_HEADS = SIZES | {"head_dim": 16}
DELTA = PLAIN_HEADS | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MIXER = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}
MIXER |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
CONV = SIZES | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
CONFIGS |= {
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "granitemoehybrid": SIZES
    | HYBRID
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 32},
    "granitemoeshared": SIZES | {"num_local_experts": 4, "shared_intermediate_size": 32},
    "lfm2": CONV,
    "lfm2_moe": CONV | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    "mamba": MIXER,
    "falcon_mamba": MIXER,
    "mamba2": MIXER | {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "jamba": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
    "qwen3_5_text": DELTA
    | {"linear_num_key_heads": 4}
    | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with factors": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}},
    ),
    "llama, head_dim": ("llama", {"head_dim": 32}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "arcee, llama3": ("arcee", {"rope_parameters": LLAMA3}),
    "exaone4, llama3": ("exaone4", {"rope_parameters": LLAMA3}),
    "exaone4, 64 layers": (
        "exaone4",
        {
            "num_hidden_layers": 64,
            "sliding_window": 8,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        },
    ),
    "phi3, longrope": ("phi3", {"max_position_embeddings": 128, "rope_parameters": LONG}),
    "gemma2, 46 layers": ("gemma2", {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16}),
    "gemma3_text, 62 layers": (
        "gemma3_text",
        {"num_hidden_layers": 62, "head_dim": 32, "query_pre_attn_scalar": 16},
    ),
    "gemma3_text, two rotations": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            }
        },
    ),
    "falcon, one key": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3, groups": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "deepseek_v2, 27 layers": ("deepseek_v2", {"q_lora_rank": None, "num_hidden_layers": 27}),
    "llama4_text, llama3": ("llama4_text", {"rope_parameters": LLAMA3, "interleave_moe_layer_step": 1}),
    "exaone_moe, no window": (
        "exaone_moe",
        {"sliding_window": 64, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2, "n_group": 2},
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
    ),
    "granitemoehybrid, multipliers": (
        "granitemoehybrid",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "mamba_n_groups": 1,
        },
    ),
    "lfm2, adjusted": ("lfm2", {"intermediate_size": 200, "block_ffn_dim_multiplier": 1.3}),
    "qwen3_next, four layers": (
        "qwen3_next",
        {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    "ernie4_5_moe, two shared experts": ("ernie4_5_moe", {"moe_num_shared_experts": 2}),
}
"""Name -> `model_type`, and what is other than in CONFIGS."""


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A random model of a model type, its norms and biases random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(CONFIGS[kind] | options))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def filled(name: str) -> Any:
    """A model of CONFIGS or VARIANTS, experts apart, with values that no version of torch changes: float32."""
    kind, options = VARIANTS.get(name, (name, {}))
    model = build(kind, **options)
    random = np.random.RandomState(0)
    for value in model.state_dict().values():
        draw = torch.from_numpy(random.standard_normal(tuple(value.shape))).float()
        if value.is_floating_point():
            value.copy_(0.08 * draw if value.ndim > 1 else value + 0.1 * draw)
    model.tie_weights()
    unfuse_experts(model, lambda layer: True)
    return model


FACTS = Path(__file__).with_name("gguf_rows.json")
"""What files of `filled` models are like of which llama.cpp computed the logits of the model."""


def write_gguf(model: Any, file: Path, tokenizer: Path) -> None:
    """The file of a float model, its experts taken apart."""
    GgufTarget(tokenizer).writer(of_model(model, QConfig(QLayerConfig()), Plan({}, ()), None)).write(file)


def known_facts() -> dict[str, Any]:
    """Name in CONFIGS or VARIANTS -> facts."""
    facts: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
    return facts


def facts_of(file: Path) -> dict[str, Any]:
    """The metadata that a model is built from, and names, shapes and values of the tensors.

    Each of the first two blocks has a number of its own, those of all others make one.
    """
    reader = gguf.GGUFReader(file)
    apart = ("GGUF.", "general.", "tokenizer.")
    tensors: dict[str, Any] = {}
    for tensor in sorted(reader.tensors, key=lambda tensor: str(tensor.name)):
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        key = tensor.name if block is None or int(block[1]) < 2 else "others"
        # Factors of rotations are powers, whose last bit is the machine's.
        factors = tensor.name.startswith("rope_")
        tensors[key] = tensor.data.tolist() if factors else _number(tensor, tensors.get(key, 0))
    return {
        "architecture": reader.fields["general.architecture"].contents(),
        "metadata": {name: field.contents() for name, field in reader.fields.items() if not name.startswith(apart)},
        "tensors": tensors,
    }


def _number(tensor: Any, before: int) -> int:
    head = f"{tensor.name} {tensor.tensor_type.name} {[int(size) for size in tensor.shape]} ".encode()
    return zlib.crc32(head + np.ascontiguousarray(tensor.data).tobytes(), before)
