"""The metadata of a GGUF file that a reader builds the model from."""

from __future__ import annotations

from typing import Any

from quark.log import logger
from quark.torch.writers.gguf.architectures.architecture import (
    Architecture,
    first_of,
    head_size,
    kv_heads,
    sliding_window,
)
from quark.torch.writers.gguf.architectures.rope import write_rope
from quark.torch.writers.gguf.names import import_gguf

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def write_hyperparameters(writer: Any, architecture: Architecture, config: Any) -> None:
    """All but the tokenizer. `writer` is a gguf.GGUFWriter."""
    writer.add_context_length(_context(architecture, config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_inner(config))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(first_of(config, "v_head_dim") or head_size(config))
    writer.add_vocab_size(config.vocab_size)
    epsilon = first_of(config, "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
    if epsilon is not None:
        (writer.add_layer_norm_eps if architecture.layer_norm else writer.add_layer_norm_rms_eps)(epsilon)
    if architecture.full_attention_period(config):
        writer.add_sliding_window(sliding_window(config) or 0)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            getattr(writer, f"add_{cap}")(getattr(config, cap))
    if architecture.mixture:
        writer.add_expert_count(
            first_of(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        )
        writer.add_expert_used_count(first_of(config, "num_experts_per_tok", "moe_k", "moe_topk"))
    for name, method in architecture.details.items():
        if getattr(config, name) is not None:
            getattr(writer, method)(getattr(config, name))
    for name, value in architecture.derived(config).items():
        getattr(writer, f"add_{name}")(value)
    if architecture.gating:
        writer.add_expert_gating_func(import_gguf().ExpertGatingFuncType[architecture.gating])
    write_rope(writer, config)


def _context(architecture: Architecture, config: Any) -> int:
    """Tokens that a reader computes as the model does."""
    # A model whose positions are slopes has no longest context; 2048 tokens is what those models were trained with.
    longest = int(first_of(config, "max_position_embeddings", "max_seq_len", "seq_length") or 2048)
    window = sliding_window(config)
    if architecture.full_attention_period(config) or window is None or window >= longest:
        return longest
    logger.info(
        "Readers of %r files know no sliding window: the context is its %d tokens, not %d.",
        architecture.arch,
        window,
        longest,
    )
    return window


def _inner(config: Any) -> int:
    """Values between the two layers of a feed-forward network."""
    factor = getattr(config, "expansion_ratio", 4)
    return int(
        first_of(config, "intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "n_inner")
        or factor * config.hidden_size
    )
