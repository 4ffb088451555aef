"""The metadata of a GGUF file that a reader builds the model from."""

from __future__ import annotations

from typing import Any

from quark.base.log import logger
from quark.gguf.architectures.architecture import (
    Architecture,
    first_of,
    head_size,
    kv_heads,
    sliding_window,
)
from quark.gguf.architectures.rope import write_rope
from quark.gguf.names import import_gguf

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def write_hyperparameters(writer: Any, architecture: Architecture, config: Any, further: int = 0) -> None:
    """All but the tokenizer. `writer` is a gguf.GGUFWriter, `further` how many blocks predict further tokens."""
    writer.add_context_length(_context(architecture, config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + further)
    if further:
        writer.add_nextn_predict_layers(further)
    _write_attention(writer, architecture, config)
    writer.add_vocab_size(config.vocab_size)
    epsilon = first_of(config, "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
    if epsilon is not None:
        (writer.add_layer_norm_eps if architecture.layer_norm else writer.add_layer_norm_rms_eps)(epsilon)
    if architecture.full_attention_period(config):
        writer.add_sliding_window(sliding_window(config) or 0)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            getattr(writer, f"add_{cap}")(getattr(config, cap))
    experts = first_of(config, *EXPERTS) if architecture.mixture else 0
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(first_of(config, "num_experts_per_tok", "moe_k", "moe_topk"))
    for name, method in architecture.details.items():
        if getattr(config, name) is not None:
            getattr(writer, method)(getattr(config, name))
    for name, value in architecture.derived(config).items():
        getattr(writer, f"add_{name}")(value)
    if architecture.gating:
        writer.add_expert_gating_func(import_gguf().ExpertGatingFuncType[architecture.gating])
    write_rope(writer, config)


def _write_attention(writer: Any, architecture: Architecture, config: Any) -> None:
    """Heads, and the feed-forward network after them."""
    layers = None if architecture.attention is None else list(architecture.attention(config))
    if layers is not None and not any(layers):
        writer.add_feed_forward_length(0)
        writer.add_head_count(first_of(config, "num_heads") or 0)  # of Mamba 2's states
        writer.add_head_count_kv(0)
        return
    writer.add_feed_forward_length((architecture.inner or _inner)(config))
    writer.add_head_count(config.num_attention_heads)
    heads = kv_heads(config)
    writer.add_head_count_kv(heads if layers is None else [heads if attends else 0 for attends in layers])
    writer.add_key_length(head_size(config))
    writer.add_value_length(first_of(config, "v_head_dim") or head_size(config))


def _context(architecture: Architecture, config: Any) -> int:
    """Tokens that a reader computes as the model does."""
    # A model whose positions are slopes has no longest context; 2048 tokens is what those models were trained with.
    # One that keeps a state instead has none at all.
    unnamed = 2048 if architecture.attention is None else 2**20
    longest = int(first_of(config, "max_position_embeddings", "max_seq_len", "seq_length") or unnamed)
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
