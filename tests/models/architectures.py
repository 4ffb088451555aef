"""Small random models of many architectures, built from their transformers configs."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = LLAMA | {"num_experts_per_tok": 2}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", LLAMA),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "gemma": ("Gemma", LLAMA | {"head_dim": 8}),
    "gemma2": ("Gemma2", LLAMA | {"head_dim": 8}),
    "gemma3": ("Gemma3Text", LLAMA | {"head_dim": 8}),
    "phi": ("Phi", LLAMA | TOKENS | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", LLAMA | TOKENS),
    "falcon": ("Falcon", SMALL | TOKENS),
    "falcon_new": ("Falcon", SMALL | TOKENS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neox": ("GPTNeoX", SMALL | {"intermediate_size": 64}),
    "opt": ("OPT", SMALL | {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "bert": ("Bert", SMALL | {"intermediate_size": 64}),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | TOKENS),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32}),
}
"""Name -> (prefix of the transformers config class, its arguments)."""


def build(name: str, seed: int = 0) -> Any:
    """A random model whose norms and biases are not the identity, so that an error in them shows."""
    import transformers

    prefix, settings = SETTINGS[name]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(seed)
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(5)
    return model


def token_ids(length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random ids, (1, length)."""
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))
