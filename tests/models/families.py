"""Small random models of the families of language models that transformers has, two blocks each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quark.compat.llm_scripts.model_loading import preprocess_for_quantization
from quark.torch.layers.replace import set_submodule
from quark.torch.model.passes import UnfusedExperts

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""What most families call their sizes."""

GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip

MOE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                  "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 16,
                 "moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size_mlp": 128,
                    "interleave_moe_layer_step": 1, "attention_chunk_size": 64},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 16},
}  # fmt: skip
"""Families whose experts transformers holds in one tensor: the sizes of their mixtures."""


def family(model_type: str, seed: int = 0, **options: Any) -> Any:
    """A random model of a family, in evaluation mode, with weights large enough that every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = GPT2 if model_type == "gpt2" else {**SIZES, **MOE.get(model_type, {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model.eval()


class Expert(nn.Module):
    """One expert, which is called with its tokens."""

    def __init__(self, mixture: UnfusedExperts, index: int) -> None:
        super().__init__()
        shell = copy.copy(mixture)
        shell.__dict__ = {**mixture.__dict__, "_modules": {}}
        self.mixture = (shell,)  # no child
        for name, layer in mixture.get_submodule(str(index)).named_children():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (mixture,) = self.mixture
        y: torch.Tensor = self.get_submodule(mixture.names[2])(mixture._inner(self, x))
        return y if mixture.post_expert_norm is None else mixture.post_expert_norm(y)  # type: ignore[no-any-return]


class ExpertModules(nn.ModuleList):
    """Experts that are modules of their own and called only with tokens, as code of checkpoints has them."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self):
            token, slot = torch.where(chosen == index)
            if len(token):
                mixed.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return mixed


def with_expert_modules(model: Any) -> Any:
    """A model whose mixtures call modules, in place of fused experts; not those that get sorted rows."""
    preprocess_for_quantization(model)
    for name, mixture in [(n, m) for n, m in model.named_modules() if isinstance(m, UnfusedExperts) and not m.sorted]:
        set_submodule(model, name, ExpertModules(Expert(mixture, index) for index in range(mixture.count)))
    return model


CONVERTED: dict[str, Callable[[], Any]] = {name: (lambda name=name: family(name)) for name in ("gpt2", *MOE)}  # type: ignore[misc]
"""Models that a pass changes."""
