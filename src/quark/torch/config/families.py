"""The documented templates of the families of language models that they know, as their readers expect them.

Nothing is quantized by these lists alone: a pattern may match nothing, and a head, router or tower that a model calls
otherwise is found by its role (`selectors`); the layers that share a scale are found in the model as long as the lists
of an algorithm are those that are shown here.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from quark.torch.config.algo_configs import AlgoConfig, RotationConfig

A = TypeVar("A", bound=AlgoConfig)

# A row a family.
# fmt: off
_EXCLUDED = {
    "chatglm": "transformer.output_layer",
    "cohere": "lm_head",
    "dbrx": "lm_head *router.layer",
    "deepseek": "lm_head *.gate",
    "deepseek_v2": "lm_head *self_attn* *mlp.gate",
    "deepseek_v3": "lm_head *self_attn* *mlp.gate",
    "deepseek_v32": "lm_head *mlp.gate model.layers.61.* *self_attn*",
    "deepseek_v4": "*attn* embed head *ffn.gate* hc_* mtp.*",
    "deepseek_vl_v2": "lm_head model.sam_model* model.vision_model* model.projector*",
    "gemma2": "lm_head",
    "gemma3": "*vision_tower* *multi_modal_projector* *lm_head",
    "gemma3_text": "*lm_head",
    "gemma4": (
        "*vision_tower* *embed_vision* *audio_tower* *embed_audio* *multi_modal_projector* *lm_head "
        "*router.proj"
    ),
    "gemma4_unified": "*embed_vision* *vision_embedder* *embed_audio* *lm_head",
    "glm4_moe": "lm_head *mlp.gate *self_attn* *shared_experts.* *mlp.down_proj *mlp.gate_proj *mlp.up_proj",
    "glm4_moe_lite": "lm_head *self_attn* *mlp.gate",
    "glm_moe_dsa": "*self_attn* *mlp.gate *lm_head *mlp.gate_proj *mlp.up_proj *mlp.down_proj",
    "glm5_next": (
        "*self_attn* *mlp.gate *mlp.gate_proj *mlp.up_proj *mlp.down_proj *visual* *lm_head* "
        "model.language_model.layers.45.*"
    ),
    "gptj": "lm_head",
    "gpt_oss": "lm_head *router*",
    "granitemoehybrid": "lm_head *router*",
    "grok-1": "lm_head *.gate",
    "hunyuan_v1_dense": "lm_head",
    "instella": "lm_head",
    "kimi_k2": "*self_attn* *mlp.gate *lm_head *mlp.gate_proj *mlp.up_proj *mlp.down_proj *shared_experts*",
    "kimi_k25": (
        "*self_attn* *mlp.gate *lm_head *mlp.gate_proj *mlp.up_proj *mlp.down_proj *shared_experts* "
        "*mm_projector* *vision_tower*"
    ),
    "kimi_k3": (
        "*block_sparse_moe.gate* *block_sparse_moe.routed_expert_down_proj* "
        "*block_sparse_moe.routed_expert_up_proj* *lm_head* *vision_tower* *mm_projector* "
        "*self_attention_res_proj* *mlp_res_proj* *output_attn_res_proj* *self_attn.*_conv1d*"
    ),
    "lfm2": "lm_head *conv.in_proj *conv.out_proj",
    "llama": "lm_head",
    "llama4": "multi_modal_projector* *feed_forward.router vision_model* *lm_head",
    "minimax_m2": "lm_head *block_sparse_moe.gate* *self_attn*",
    "minimax_m3_vl": (
        "*lm_head *vision_tower* *multi_modal_projector* *patch_merge_mlp* *block_sparse_moe.gate "
        "*self_attn*"
    ),
    "mistral": "lm_head",
    "mixtral": "lm_head *.gate",
    "mllama": "*lm_head *patch_embedding multi_modal_projector",
    "muse_glimmer": "*vision_tower* *vision_adapter* *vision_projection* lm_head",
    "olmo": "lm_head",
    "opt": "lm_head",
    "phi": "lm_head",
    "phi3": "lm_head",
    "qwen": "lm_head",
    "qwen2": "lm_head",
    "qwen2_moe": "lm_head *.gate *.shared_expert_gate",
    "qwen3": "lm_head",
    "qwen3_moe": "lm_head *.gate",
    "qwen3_next": (
        "lm_head mtp.fc *linear_attn.in_proj_ba *linear_attn.in_proj_qkvz *mlp.gate "
        "*mlp.shared_expert_gate *self_attn.k_proj *self_attn.q_proj *self_attn.v_proj"
    ),
    "qwen3_vl_moe": "lm_head *mlp.gate *.visual.*",
    "qwen3_5_moe": (
        "lm_head model.visual.* mtp.* *mlp.gate *shared_expert_gate* *.linear_attn.* *.self_attn.* "
        "*.shared_expert.*"
    ),
    "qwen3_5": "lm_head model.visual.* *mtp*",
    "qwen4_exp": (
        "lm_head model.visual.* mtp.* *mlp.gate *shared_expert_gate* *.linear_attn.* *.self_attn.* "
        "*hyper_connection* *.ple.*"
    ),
    "qwen4_exp_text": (
        "lm_head model.visual.* mtp.* *mlp.gate *shared_expert_gate* *.linear_attn.* *.self_attn.* "
        "*hyper_connection* *.ple.*"
    ),
}
# fmt: on
EXCLUDED = {family: tuple(patterns.split()) for family, patterns in _EXCLUDED.items()}
"""Family -> patterns of the layers that stay in float."""
PATTERNS = frozenset(pattern for patterns in EXCLUDED.values() for pattern in patterns)
"""All of them. One in an exclude list is an expectation and no claim: models lack a head, a tower or a router."""

PLAIN = ("hunyuan_v1_dense", "llama", "mistral", "qwen2", "qwen3")
"""Families whose blocks are a norm, attention, a norm and a gated MLP under the names of Llama."""
_ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
_OUT, _GATED, _DOWN = "self_attn.o_proj", ["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj"


def _fold(before: str, layers: list[str], inside: str = "") -> dict[str, Any]:
    """An entry of `scaling_layers`: the layers read what `before` writes; `inside`: the module whose output counts."""
    return {"prev_op": before, "layers": layers, "inp": layers[0]} | ({"module2inspect": inside} if inside else {})


SHOWN: dict[str, Any] = {
    "scaling_layers": [
        _fold("input_layernorm", _ATTENTION, "self_attn"),
        _fold("self_attn.v_proj", [_OUT]),
        _fold("post_attention_layernorm", _GATED, "mlp"),
        _fold("mlp.up_proj", [_DOWN]),
    ],
    "inside_layer_modules": [*_ATTENTION[1:], _ATTENTION[0], _OUT, *reversed(_GATED), _DOWN],
    "model_decoder_layers": "model.layers",
}
"""Field of an algorithm's config -> what templates of `PLAIN` families show in it."""


def with_shown(config: A, family: str) -> A:
    """The config of an algorithm as a template shows it: with the lists of its family, where it leaves them empty."""
    named = (
        {entry.name for entry in fields(config)} if family in PLAIN and not isinstance(config, RotationConfig) else ()
    )
    return replace(
        config, **{name: value for name, value in SHOWN.items() if name in named and not getattr(config, name)}
    )


def without_shown(config: A) -> A:
    """A config without the lists that a template shows: an algorithm finds in the model what it can do there."""
    empty = type(config)()
    shown = {name: getattr(empty, name) for name, value in SHOWN.items() if getattr(config, name, None) == value}
    return config if shown.keys() <= {"model_decoder_layers"} else replace(config, **shown)
