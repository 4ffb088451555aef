"""What GGUF files of each architecture hold: which tensors change on the way, and the hyperparameters.

Names of tensors come from the gguf package's own maps. An architecture is a row below when a file of it has been read
back by another program with equal logits; each of these is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quark.core.registry import Registry
from quark.errors import NotSupportedError

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """How models of one `model_type` become a GGUF file.

    Attributes:
        arch: Name in gguf.MODEL_ARCH_NAMES.
        pairs: Whether rows of q and k are reordered, because the reader rotates neighbours and not halves.
        unit_norms: Whether the model computes with 1 + weight in its norms; files hold the sum.
        layer_norm: Whether its norms subtract the mean (else they are RMS norms).
        head_sizes: Whether the size of a head is written apart from hidden_size / heads.
        windowed: Whether attention has a sliding window.
        fused_heads: Whether queries, keys and values of each head lie together in one matrix; files hold them apart.
        mixture: Whether it is a mixture of experts.
        details: Field of the config -> method of the writer, for what only this architecture has.
        refuse: What of a config has no place in a file; a sentence, or None.
    """

    arch: str
    pairs: bool = False
    unit_norms: bool = False
    layer_norm: bool = False
    head_sizes: bool = False
    windowed: bool = False
    fused_heads: bool = False
    mixture: bool = False
    details: Mapping[str, str] = field(default_factory=dict)
    refuse: Callable[[Any], str | None] = lambda config: None

    def row_order(self, name: str, config: Any) -> torch.Tensor | None:
        """Which row of the model's tensor each row in the file is; None where nothing moves."""
        leaf = name.rsplit(".", 2)[-2]
        if self.fused_heads and leaf == "query_key_value":
            size = head_size(config)
            rows = torch.arange(3 * config.num_attention_heads * size).reshape(-1, 3, size)
            return rows.transpose(0, 1).reshape(-1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": _kv_heads(config)}.get(leaf)
        if not self.pairs or heads is None:
            return None
        size = head_size(config)
        # Halves of a head, one under the other, become neighbours.
        return torch.arange(heads * size).reshape(heads, 2, size // 2).transpose(1, 2).reshape(-1)

    def adds_one(self, name: str) -> bool:
        """Whether the file holds 1 + the tensor."""
        return self.unit_norms and name.endswith("norm.weight")


def head_size(config: Any) -> int:
    """Values in an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _gemma2_scale(config: Any) -> str | None:
    return None if config.query_pre_attn_scalar == head_size(config) else "query_pre_attn_scalar other than head_dim"


def _gemma3_scale(config: Any) -> str | None:
    return _gemma2_scale(config) or ("softcapping" if config.final_logit_softcapping else None)


def _gpt2_activation(config: Any) -> str | None:
    standard = config.activation_function == "gelu_new" and config.scale_attn_weights
    return None if standard and not config.scale_attn_by_inverse_layer_idx else "another activation or attention scale"


def _dense_layers(config: Any) -> str | None:
    if config.use_sliding_window:
        return "a sliding window"
    return "layers without experts" if config.mlp_only_layers or config.decoder_sparse_step != 1 else None


ARCHITECTURES: Registry[Architecture] = Registry("GGUF architecture")
"""`model_type` of a transformers config -> architecture."""
for _type, _row in {
    "llama": Architecture("llama", pairs=True, refuse=lambda c: "mlp_bias" if c.mlp_bias else None),
    "mistral": Architecture("llama", pairs=True, refuse=lambda c: "a sliding window" if c.sliding_window else None),
    "qwen2": Architecture("qwen2", refuse=lambda c: "a sliding window" if c.use_sliding_window else None),
    "qwen3": Architecture(
        "qwen3", head_sizes=True, refuse=lambda c: "a sliding window" if c.use_sliding_window else None
    ),
    "phi3": Architecture("phi3", windowed=True),
    "starcoder2": Architecture("starcoder2", layer_norm=True),
    "gemma2": Architecture("gemma2", unit_norms=True, head_sizes=True, windowed=True, refuse=_gemma2_scale),
    "gemma3_text": Architecture("gemma3", unit_norms=True, head_sizes=True, windowed=True, refuse=_gemma3_scale),
    "gemma": Architecture("gemma", unit_norms=True, head_sizes=True),
    "olmo2": Architecture("olmo2"),
    "stablelm": Architecture(
        "stablelm",
        layer_norm=True,
        details={"use_parallel_residual": "add_parallel_residual"},
        refuse=lambda c: "norms of queries and keys" if c.qk_layernorm else None,
    ),
    "phi": Architecture(
        "phi2", layer_norm=True, refuse=lambda c: "norms of queries and keys" if c.qk_layernorm else None
    ),
    "gpt_neox": Architecture(
        "gptneox",
        layer_norm=True,
        fused_heads=True,
        details={"use_parallel_residual": "add_parallel_residual"},
        refuse=lambda c: None if c.attention_bias else "attention without biases",
    ),
    "granite": Architecture(
        "granite",
        pairs=True,
        details={
            "attention_multiplier": "add_attention_scale",
            "embedding_multiplier": "add_embedding_scale",
            "residual_multiplier": "add_residual_scale",
            "logits_scaling": "add_logit_scale",
        },
        refuse=lambda c: "mlp_bias" if c.mlp_bias else None,
    ),
    "mixtral": Architecture(
        "llama", pairs=True, mixture=True, refuse=lambda c: "a sliding window" if c.sliding_window else None
    ),
    "qwen2_moe": Architecture(
        "qwen2moe",
        mixture=True,
        details={
            "moe_intermediate_size": "add_expert_feed_forward_length",
            "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
        },
        refuse=lambda c: "weights of experts that sum to one" if c.norm_topk_prob else _dense_layers(c),
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        head_sizes=True,
        mixture=True,
        details={"moe_intermediate_size": "add_expert_feed_forward_length"},
        refuse=lambda c: _dense_layers(c) if c.norm_topk_prob else "weights of experts that do not sum to one",
    ),
    "olmoe": Architecture(
        "olmoe",
        mixture=True,
        refuse=lambda c: "weights of experts that sum to one, or clipping" if c.norm_topk_prob or c.clip_qkv else None,
    ),
    "gpt2": Architecture("gpt2", layer_norm=True, refuse=_gpt2_activation),
}.items():
    ARCHITECTURES.register(_type, _row)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a model. Raises NotSupportedError, naming what is possible, for one that has no row."""
    kind = str(getattr(config, "model_type", None))
    if kind not in ARCHITECTURES:
        raise NotSupportedError(
            f"GGUF files of {kind!r} models cannot be verified yet. Possible: {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[kind]
    reason = architecture.refuse(config) or _refuse_rope(config)
    if reason:
        raise NotSupportedError(f"A GGUF file of a {kind} model has no place for {reason}. Possible: the quark format.")
    return architecture


def _refuse_rope(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    kinds = {entry.get("rope_type", "default") for entry in nested}
    return None if kinds <= {"default"} else f"rotary scaling of type {', '.join(sorted(kinds - {'default'}))}"


def write_hyperparameters(writer: Any, architecture: Architecture, config: Any) -> None:
    """The metadata that a reader builds the model from. `writer` is a gguf.GGUFWriter."""
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or _gpt2_inner(config))
    writer.add_head_count(heads)
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_vocab_size(config.vocab_size)
    names = ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps") if architecture.layer_norm else ("rms_norm_eps",)
    epsilon = next(getattr(config, name) for name in names if hasattr(config, name))
    (writer.add_layer_norm_eps if architecture.layer_norm else writer.add_layer_norm_rms_eps)(epsilon)
    if architecture.head_sizes:
        writer.add_key_length(head_size(config))
        writer.add_value_length(head_size(config))
    if architecture.windowed and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            getattr(writer, f"add_{cap}")(getattr(config, cap))
    if architecture.mixture:
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    for name, method in architecture.details.items():
        getattr(writer, method)(getattr(config, name))
    _write_rope(writer, config)


def _write_rope(writer: Any, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    full = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_size(config) * full.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(full["rope_theta"])


def _gpt2_inner(config: Any) -> int:
    return int(getattr(config, "n_inner", None) or 4 * config.hidden_size)
