"""The table of the architectures that GGUF files are written of.

Names of tensors come from the gguf package's own maps. An architecture is a row below when llama.cpp computes the
logits of the float model from a file of it, and what of its configs llama.cpp would not compute is refused.
"""

from __future__ import annotations

from typing import Any

from quark.core.names.registry import Registry
from quark.errors import NotSupportedError
from quark.gguf.architectures.architecture import (
    Architecture,
    head_size,
    kv_heads,
    refuse_activation,
    refuse_fields,
    refuse_windows,
    sliding_window,
)
from quark.gguf.architectures.recurrent import RECURRENT
from quark.gguf.architectures.rope import refuse_rope

BIAS = ("attention_bias",)
BIASES = (*BIAS, "mlp_bias")
_TIED = "tie_word_embeddings"
_EXPERT_SIZE = {"moe_intermediate_size": "add_expert_feed_forward_length"}
_PARALLEL = {"use_parallel_residual": "add_parallel_residual"}
SPARSE = _EXPERT_SIZE | {
    "n_shared_experts": "add_expert_shared_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "routed_scaling_factor": "add_expert_weights_scale",
    "norm_topk_prob": "add_expert_weights_norm",
}
_RANKS = {"kv_lora_rank": "add_kv_lora_rank", "q_lora_rank": "add_q_lora_rank"}
LATENT = SPARSE | _RANKS
GROUPS = {"n_group": "add_expert_group_count", "topk_group": "add_expert_group_used_count"}
SCALES = {
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
}


def _query_scale(config: Any, layers: int) -> str | None:
    """Readers know the largest model, which divides by another root, by its number of layers."""
    largest = config.num_hidden_layers == layers
    expected = config.hidden_size // config.num_attention_heads if largest else head_size(config)
    return None if config.query_pre_attn_scalar == expected else f"query_pre_attn_scalar other than {expected}"


def _gemma2(config: Any) -> str | None:
    # Readers take 50 and 30 where a file says nothing.
    capped = config.attn_logit_softcapping and config.final_logit_softcapping
    return _query_scale(config, 46) if capped else "logits without softcapping"


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


def _falcon(config: Any) -> str | None:
    return None if config.parallel_attn else "attention and feed-forward one after the other"


def _mpt(config: Any) -> str | None:
    attention = config.attn_config
    if not attention.alibi:
        return "positions other than alibi"
    found = next((name for name in ("qk_ln", "softmax_scale", "clip_qkv") if getattr(attention, name, None)), None)
    return f"attn_config.{found}" if found else None


def _bigcode(config: Any) -> str | None:
    if not config.multi_query:
        return "keys of more than one head"
    return None if config.scale_attn_weights else "another attention scale"


def _gpt_oss(config: Any) -> str | None:
    if not config.attention_bias:
        return "attention without biases"
    # Configs have them from transformers 5.19 on; models of older ones compute with the usual values.
    usual = getattr(config, "swiglu_alpha", 1.702) == 1.702 and getattr(config, "swiglu_limit", 7.0) == 7.0
    return None if usual else "a gate with other swiglu_alpha or swiglu_limit"


def _shared_heads(config: Any) -> str | None:
    return None if kv_heads(config) == config.num_attention_heads else "fewer heads of keys than of queries"


def _latent(config: Any) -> str | None:
    """DeepSeek's attention, whose keys and values come from one short vector."""
    if not config.q_lora_rank and config.num_hidden_layers not in (26, 27):
        return "queries without q_lora_rank in a model of other than 26 or 27 layers"
    if not getattr(config, "rope_interleave", True):
        return "rotations of halves"
    if config.rms_norm_eps > 1e-5:
        return "rms_norm_eps above 1e-5"  # the norms of the short vectors have 1e-6, and readers one for all
    rope = config.rope_parameters
    if rope["rope_type"] == "linear":
        return "rotary scaling of type linear"
    even = rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim") and not rope.get("attention_factor")
    return "yarn with mscale other than mscale_all_dim" if rope["rope_type"] == "yarn" and not even else None


def _deepseek_v2(config: Any) -> str | None:
    grouped = config.topk_method != "greedy" and (config.n_group or 1) > 1
    return "experts that are chosen by groups" if grouped else _latent(config)


def _llama4(config: Any) -> str | None:
    # Readers know both published models, by the number of experts, and their windows and temperatures by heart.
    if config.use_qk_norm == (config.num_local_experts == 128):
        return "normed queries with 128 experts, or others without"
    if config.attention_chunk_size != 8192:
        return f"attention_chunk_size={config.attention_chunk_size}"
    if not config.attn_temperature_tuning or (config.floor_scale, config.attn_scale) != (8192, 0.1):
        return "another temperature of attention"
    step = config.interleave_moe_layer_step
    mixed = config.moe_layers == list(range(step - 1, config.num_hidden_layers, step))
    return _no_rope_layers(config) if mixed else "experts in other layers than each interleave_moe_layer_step-th"


def _exaone_moe(config: Any) -> str | None:
    dense = config.mlp_layer_types.count("dense")
    leading = config.mlp_layer_types == ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense)
    return None if leading else "layers without experts after ones with them"


def _temperature(config: Any) -> dict[str, Any]:
    """By how much queries grow with the logarithm of their position."""
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    return {"attn_temperature_scale": beta} if beta else {}


def _youtu_derived(config: Any) -> dict[str, Any]:
    """A model without experts, as one of which all layers lead."""
    return {
        "leading_dense_block_count": config.num_hidden_layers,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
    }


ARCHITECTURES: Registry[Architecture] = Registry("GGUF architecture")
"""`model_type` of a transformers config -> architecture."""
for _type, _row in {
    "llama": Architecture("llama", pairs=True, without=("mlp_bias",)),
    "mistral": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", without=BIAS),
    "phi3": Architecture("phi3"),
    "starcoder2": Architecture(
        "starcoder2", "gelu", layer_norm=True, refuse=lambda c: None if c.use_bias else "layers without biases"
    ),
    "gemma2": Architecture("gemma2", "gelu", unit_norms=True, window_period=2, without=BIAS, refuse=_gemma2),
    "gemma3_text": Architecture(
        "gemma3",
        "gelu",
        unit_norms=True,
        window_period=6,
        without=(*BIAS, "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
        refuse=lambda c: _query_scale(c, 62),
    ),
    "gemma": Architecture("gemma", "gelu", unit_norms=True, without=BIAS),
    "smollm3": Architecture("smollm3", pairs=True, without=BIASES, refuse=_no_rope_layers),
    "olmo": Architecture(
        "olmo",
        pairs=True,
        without=(*BIAS, "clip_qkv"),
        derived=lambda c: {"layer_norm_eps": 1e-5},
    ),
    "olmo2": Architecture("olmo2", without=(*BIAS, _TIED)),
    "olmo3": Architecture("olmo2", window_period=4, without=(*BIAS, _TIED)),
    "cohere": Architecture(
        "command-r",
        layer_norm=True,
        without=(*BIAS, "use_qk_norm"),
        details={"logit_scale": "add_logit_scale"},
    ),
    "cohere2": Architecture(
        "cohere2",
        layer_norm=True,
        window_period=4,
        without=BIAS,
        whole_heads=True,
        details={"logit_scale": "add_logit_scale"},
    ),
    "glm": Architecture("chatglm", whole_heads=True),
    "glm4": Architecture("glm4"),
    "falcon": Architecture(
        "falcon",
        "gelu",
        layer_norm=True,
        fused_heads="query_key_value",
        without=("alibi", "bias"),
        refuse=_falcon,
    ),
    "bloom": Architecture(
        "bloom",
        "gelu",
        layer_norm=True,
        fused_heads="query_key_value",
        without=("apply_residual_connection_post_layernorm",),
    ),
    "mpt": Architecture("mpt", "gelu", layer_norm=True, derived=lambda c: {"max_alibi_bias": 8.0}, refuse=_mpt),
    "gpt_bigcode": Architecture("starcoder", "gelu", layer_norm=True, refuse=_bigcode),
    "nemotron": Architecture("nemotron", "relu2", layer_norm=True, unit_norms=True, without=(_TIED,), whole_heads=True),
    "arcee": Architecture("arcee", "relu2", pairs=True, without=BIASES),
    "seed_oss": Architecture("seed_oss", without=("attention_out_bias", "mlp_bias")),
    "ernie4_5": Architecture("ernie4_5", without=("use_bias",)),
    "exaone4": Architecture(
        "exaone4",
        window_period=4,
        window_layers=64,
        # Readers rotate all layers where they know no window; the model rotates those with a window alone.
        refuse=lambda c: (
            "a sliding window in a model of other than 64 layers"
            if c.num_hidden_layers != 64 and sliding_window(c)
            else None
        ),
    ),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", without=BIAS),
    "helium": Architecture("llama", without=("mlp_bias",)),
    "internlm3": Architecture("llama", pairs=True, without=("mlp_bias",)),
    "ministral": Architecture("llama", pairs=True),
    "stablelm": Architecture("stablelm", layer_norm=True, without=("qk_layernorm", _TIED), details=_PARALLEL),
    "phi": Architecture("phi2", "gelu", layer_norm=True, without=("qk_layernorm", _TIED)),
    "gpt_neox": Architecture(
        "gptneox",
        "gelu",
        layer_norm=True,
        fused_heads="query_key_value",
        without=(_TIED,),
        details=_PARALLEL,
        refuse=lambda c: None if c.attention_bias else "attention without biases",
    ),
    "granite": Architecture("granite", pairs=True, without=("mlp_bias",), details=SCALES),
    "mixtral": Architecture("llama", pairs=True, mixture=True),
    "qwen2_moe": Architecture(
        "qwen2moe",
        mixture=True,
        without=(_TIED,),
        details=_EXPERT_SIZE | {"shared_expert_intermediate_size": "add_expert_shared_feed_forward_length"},
        refuse=_qwen2_moe,
    ),
    "qwen3_moe": Architecture("qwen3moe", mixture=True, without=BIAS, details=_EXPERT_SIZE, refuse=_qwen3_moe),
    "olmoe": Architecture(
        "olmoe", mixture=True, without=(*BIAS, _TIED, "norm_topk_prob", "clip_qkv"), refuse=_shared_heads
    ),
    "granitemoe": Architecture("granitemoe", pairs=True, mixture=True, details=SCALES),
    "glm4_moe": Architecture("glm4moe", mixture=True, details=SPARSE | GROUPS, gating="SIGMOID"),
    "dots1": Architecture(
        "dots1", mixture=True, without=(*BIAS, _TIED), details=SPARSE | GROUPS, gating="SIGMOID", refuse=_shared_heads
    ),
    "deepseek_v2": Architecture(
        "deepseek2",
        mixture=True,
        without=(*BIASES, "norm_topk_prob"),
        details=LATENT,
        gating="SOFTMAX",
        refuse=_deepseek_v2,
    ),
    "deepseek_v3": Architecture(
        "deepseek2", mixture=True, without=BIAS, details=LATENT | GROUPS, gating="SIGMOID", refuse=_latent
    ),
    "glm4_moe_lite": Architecture(
        "deepseek2",
        mixture=True,
        without=BIAS,
        details={name: method for name, method in (LATENT | GROUPS).items() if name != "first_k_dense_replace"},
        derived=lambda c: {"leading_dense_block_count": c.mlp_layer_types.count("dense")},
        gating="SIGMOID",
        refuse=_latent,
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        mixture=True,
        without=(_TIED,),
        details={"intermediate_size": "add_expert_feed_forward_length"},
        gating="SIGMOID",
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        mixture=True,
        without=("use_bias",),
        details=_EXPERT_SIZE
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
        without=BIAS,
        details={"intermediate_size": "add_expert_feed_forward_length"},
        derived=lambda c: {"expert_shared_feed_forward_length": c.intermediate_size},
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        mixture=True,
        without=(_TIED,),
        refuse=_gpt_oss,
        window_period=2,
        details={"intermediate_size": "add_expert_feed_forward_length"},
        alternating="gate_up_proj",
        splits=lambda config: {
            f"gate_up_proj.{leaf}": (f"ffn_gate_exps.{leaf}", f"ffn_up_exps.{leaf}") for leaf in ("weight", "bias")
        },
    ),
    "llama4_text": Architecture(
        "llama4",
        mixture=True,
        without=BIAS,
        details={
            "intermediate_size": "add_expert_feed_forward_length",
            "interleave_moe_layer_step": "add_interleave_moe_layer_step",
        },
        refuse=_llama4,
    ),
    "ministral3": Architecture(
        "mistral3",
        pairs=True,
        derived=_temperature,
    ),
    "jais2": Architecture("jais2", "relu2", layer_norm=True, refuse=_shared_heads),
    "cwm": Architecture("llama", pairs=True, without=("mlp_bias",)),
    "solar_open": Architecture(
        "glm4moe",
        mixture=True,
        details={name: method for name, method in (SPARSE | GROUPS).items() if name != "first_k_dense_replace"},
        derived=lambda c: {"leading_dense_block_count": 0},
        gating="SIGMOID",
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        mixture=True,
        window_period=4,
        without=(_TIED,),
        details=_EXPERT_SIZE
        | GROUPS
        | {
            "num_shared_experts": "add_expert_shared_count",
            "routed_scaling_factor": "add_expert_weights_scale",
            "norm_topk_prob": "add_expert_weights_norm",
        },
        derived=lambda c: {"leading_dense_block_count": c.mlp_layer_types.count("dense")},
        gating="SIGMOID",
        refuse=_exaone_moe,
    ),
    "youtu": Architecture(
        "deepseek2", without=BIAS, details=_RANKS, derived=_youtu_derived, gating="SIGMOID", refuse=_latent
    ),
    "gpt2": Architecture("gpt2", "gelu", layer_norm=True, refuse=_gpt2_scale),
}.items():
    ARCHITECTURES.register(_type, _row)
for _type, _row in RECURRENT.items():
    ARCHITECTURES.register(_type, _row)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a model. Raises NotSupportedError, naming what is possible, for one that has no row."""
    kind = str(getattr(config, "model_type", None))
    if kind not in ARCHITECTURES:
        raise NotSupportedError(
            f"GGUF files of {kind!r} models cannot be verified yet. Possible: {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[kind]
    refusals = (refuse_fields, refuse_activation, refuse_windows, refuse_rope)
    reason = architecture.refuse(config) or next((r for f in refusals if (r := f(architecture, config))), None)
    if reason:
        raise NotSupportedError(f"A GGUF file of a {kind} model has no place for {reason}. Possible: the quark format.")
    return architecture
