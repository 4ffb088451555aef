"""The table of the architectures that GGUF files are written of.

Names of tensors come from the gguf package's own maps. An architecture is a row below when llama.cpp computes the
logits of the float model from a file of it, and what of its configs llama.cpp would not compute is refused.
"""

from __future__ import annotations

from typing import Any

from quark.core.registry import Registry
from quark.errors import NotSupportedError
from quark.torch.writers.gguf.architectures.architecture import (
    Architecture,
    head_size,
    refuse_activation,
    refuse_windows,
    sliding_window,
)
from quark.torch.writers.gguf.architectures.rope import refuse_rope

EXPERT_SIZE = {"moe_intermediate_size": "add_expert_feed_forward_length"}
PARALLEL = {"use_parallel_residual": "add_parallel_residual"}
SPARSE = EXPERT_SIZE | {
    "n_shared_experts": "add_expert_shared_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "routed_scaling_factor": "add_expert_weights_scale",
    "norm_topk_prob": "add_expert_weights_norm",
}
SCALES = {
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
}


def refuse_fields(**wrong: str) -> Any:
    """The refusal of configs in which one of these fields is true; what each is called."""

    def refuse(config: Any) -> str | None:
        return next((what for name, what in wrong.items() if getattr(config, name, None)), None)

    return refuse


def _query_scale(config: Any, layers: int) -> str | None:
    """Readers know the largest model, which divides by another root, by its number of layers."""
    largest = config.num_hidden_layers == layers
    expected = config.hidden_size // config.num_attention_heads if largest else head_size(config)
    return None if config.query_pre_attn_scalar == expected else f"query_pre_attn_scalar other than {expected}"


def _gemma2(config: Any) -> str | None:
    # Readers take 50 and 30 where a file says nothing.
    capped = config.attn_logit_softcapping and config.final_logit_softcapping
    return _query_scale(config, 46) if capped else "logits without softcapping"


def _gemma3(config: Any) -> str | None:
    return _query_scale(config, 62) or refuse_fields(
        final_logit_softcapping="softcapping", attn_logit_softcapping="softcapping"
    )(config)


def _gpt2_scale(config: Any) -> str | None:
    standard = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    return None if standard else "another attention scale"


def _dense_layers(config: Any) -> str | None:
    return "layers without experts" if config.mlp_only_layers or config.decoder_sparse_step != 1 else None


def _qwen2_moe(config: Any) -> str | None:
    return "weights of experts that sum to one" if config.norm_topk_prob else _dense_layers(config)


def _qwen3_moe(config: Any) -> str | None:
    return _dense_layers(config) if config.norm_topk_prob else "weights of experts that do not sum to one"


def _no_rope_layers(config: Any) -> str | None:
    usual = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
    return None if config.no_rope_layers == usual else "rotations in layers other than three of four"


def _exaone4(config: Any) -> str | None:
    # Readers rotate all layers where they know no window; the model rotates those with a window alone.
    return "a sliding window in a model of other than 64 layers" if sliding_window(config) else None


def _falcon(config: Any) -> str | None:
    if not config.parallel_attn:
        return "attention and feed-forward one after the other"
    return refuse_fields(alibi="alibi", bias="biases")(config)


def _mpt(config: Any) -> str | None:
    attention = config.attn_config
    if not attention.alibi:
        return "positions other than alibi"
    return refuse_fields(qk_ln="norms of queries and keys", softmax_scale="another attention scale")(attention)


QK_NORMS = {"qk_layernorm": "norms of queries and keys"}
ARCHITECTURES: Registry[Architecture] = Registry("GGUF architecture")
"""`model_type` of a transformers config -> architecture."""
for _type, _row in {
    "llama": Architecture("llama", pairs=True, refuse=refuse_fields(mlp_bias="mlp_bias")),
    "mistral": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "starcoder2": Architecture("starcoder2", "gelu", layer_norm=True),
    "gemma2": Architecture("gemma2", "gelu", unit_norms=True, window_period=2, refuse=_gemma2),
    "gemma3_text": Architecture("gemma3", "gelu", unit_norms=True, window_period=6, refuse=_gemma3),
    "gemma": Architecture("gemma", "gelu", unit_norms=True),
    "smollm3": Architecture("smollm3", pairs=True, refuse=_no_rope_layers),
    "olmo": Architecture("olmo", pairs=True, derived=lambda c: {"layer_norm_eps": 1e-5}),
    "olmo2": Architecture("olmo2"),
    "olmo3": Architecture("olmo2", window_period=4),
    "cohere": Architecture("command-r", layer_norm=True, details={"logit_scale": "add_logit_scale"}),
    "cohere2": Architecture("cohere2", layer_norm=True, window_period=4, details={"logit_scale": "add_logit_scale"}),
    "glm": Architecture("chatglm"),
    "glm4": Architecture("glm4"),
    "falcon": Architecture("falcon", "gelu", layer_norm=True, fused_heads="query_key_value", refuse=_falcon),
    "bloom": Architecture("bloom", "gelu", layer_norm=True, fused_heads="query_key_value"),
    "mpt": Architecture("mpt", "gelu", layer_norm=True, derived=lambda c: {"max_alibi_bias": 8.0}, refuse=_mpt),
    "gpt_bigcode": Architecture("starcoder", "gelu", layer_norm=True),
    "nemotron": Architecture("nemotron", "relu2", layer_norm=True, unit_norms=True),
    "arcee": Architecture("arcee", "relu2", pairs=True),
    "seed_oss": Architecture("seed_oss"),
    "ernie4_5": Architecture("ernie4_5"),
    "exaone4": Architecture(
        "exaone4",
        window_period=4,
        window_layers=64,
        refuse=lambda c: None if c.num_hidden_layers == 64 else _exaone4(c),
    ),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "helium": Architecture("llama"),
    "internlm3": Architecture("llama", pairs=True),
    "ministral": Architecture("llama", pairs=True),
    "stablelm": Architecture("stablelm", layer_norm=True, details=PARALLEL, refuse=refuse_fields(**QK_NORMS)),
    "phi": Architecture("phi2", "gelu", layer_norm=True, refuse=refuse_fields(**QK_NORMS)),
    "gpt_neox": Architecture(
        "gptneox",
        "gelu",
        layer_norm=True,
        fused_heads="query_key_value",
        details=PARALLEL,
        refuse=lambda c: None if c.attention_bias else "attention without biases",
    ),
    "granite": Architecture("granite", pairs=True, details=SCALES, refuse=refuse_fields(mlp_bias="mlp_bias")),
    "mixtral": Architecture("llama", pairs=True, mixture=True),
    "qwen2_moe": Architecture(
        "qwen2moe",
        mixture=True,
        details=EXPERT_SIZE | {"shared_expert_intermediate_size": "add_expert_shared_feed_forward_length"},
        refuse=_qwen2_moe,
    ),
    "qwen3_moe": Architecture("qwen3moe", mixture=True, details=EXPERT_SIZE, refuse=_qwen3_moe),
    "olmoe": Architecture(
        "olmoe",
        mixture=True,
        refuse=refuse_fields(norm_topk_prob="weights of experts that sum to one", clip_qkv="clipping"),
    ),
    "granitemoe": Architecture("granitemoe", pairs=True, mixture=True, details=SCALES),
    "glm4_moe": Architecture("glm4moe", mixture=True, details=SPARSE, gating="SIGMOID"),
    "dots1": Architecture("dots1", mixture=True, details=SPARSE, gating="SIGMOID"),
    "minimax_m2": Architecture(
        "minimax-m2", mixture=True, details={"intermediate_size": "add_expert_feed_forward_length"}, gating="SIGMOID"
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        mixture=True,
        details=EXPERT_SIZE
        | {
            "moe_num_shared_experts": "add_expert_shared_count",
            "moe_layer_interval": "add_interleave_moe_layer_step",
            "moe_layer_start_index": "add_leading_dense_block_count",
        },
        derived=lambda c: {"expert_shared_feed_forward_length": c.moe_num_shared_experts * c.moe_intermediate_size},
    ),
    "hunyuan_v1_moe": Architecture(
        "hunyuan-moe",
        mixture=True,
        details={"intermediate_size": "add_expert_feed_forward_length"},
        derived=lambda c: {"expert_shared_feed_forward_length": c.intermediate_size},
    ),
    "gpt_oss": Architecture(
        "gpt-oss", mixture=True, window_period=2, details={"intermediate_size": "add_expert_feed_forward_length"}
    ),
    "gpt2": Architecture("gpt2", "gelu", layer_norm=True, refuse=_gpt2_scale),
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
    refusals = (refuse_activation, refuse_windows, refuse_rope)
    reason = architecture.refuse(config) or next((r for f in refusals if (r := f(architecture, config))), None)
    if reason:
        raise NotSupportedError(f"A GGUF file of a {kind} model has no place for {reason}. Possible: the quark format.")
    return architecture
