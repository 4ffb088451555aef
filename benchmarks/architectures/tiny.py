"""Any family of transformers as a tiny model with random weights: its own config class, with small sizes in it.

What a config calls its sizes differs from family to family, but the words are few: SIZES has them. A model that these
sizes do not fit is tried with the sizes of its own defaults for heads, and is said not to be built otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN, HEADS, TOKENS = 128, 64, 4, 32

SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "entity_vocab_size",
                     "encoder_hash_byte_group_vocab"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "embed_dim", "word_embed_proj_dim",
                     "hidden_dim", "projection_dim", "width", "input_hidden_size", "lru_width",
                     "attention_hidden_size", "hidden_size_per_layer_input", "n_embed", "encoder_hidden_size",
                     "decoder_hidden_size", "d_embed", "emb_dim", "mamba_d_ssm", "entity_emb_size", "d_latents"),
                    HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
                     "ffn_hidden_size", "intermediate_size_mlp", "moe_intermediate_size", "expert_ffn_hidden_size",
                     "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "mlp_hidden_size",
                     "ff_dim", "dff", "dim_ff", "feed_forward_size", "inner_dim", "shared_intermediate_size"),
                    2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers",
                     "decoder_num_hidden_layers", "depth", "num_dense_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads",
                     "encoder_num_key_value_heads", "decoder_num_key_value_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_dim", "global_head_dim", "d_head", "dim_head",
                     "mamba_d_head"),
                    HIDDEN // HEADS),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer",
                     "moe_num_primary_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts",
                     "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
                     "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions", "max_target_positions",
                     "sliding_window", "max_seq_len", "attention_window", "local_window_size"), 64),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel"), 16),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 16),
    **dict.fromkeys(("expand", "mamba_expand"), 1),
    **dict.fromkeys(("index_head_dim", "mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("num_latents",), 8),
    "encoder_hash_byte_group_vocab": 64,
    "time_step_rank": 4,
}  # fmt: skip
"""What configs call their sizes -> what a tiny model has."""

STRUCTURES: tuple[dict[str, Any], ...] = (
    {},
    {"attn_layer_indices": [1]},
    {"layer_types": ["mamba", "attention"]},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 0},
    {"attention_types": [[["global", "local"], 1]]},
    {"attn_layer_period": 2, "attn_layer_offset": 1},
    {"n_groups": 1},
    {"num_experts_per_tok": 1},
)
"""What a family may want to have said beside its sizes: one is tried after the other."""

TURNING = (HIDDEN // HEADS // 2, HIDDEN // HEADS // 4)
"""Frequencies of a head, of which time, height and width of an image get a part each (Qwen2-VL, GLM-V): all turn, or
half of them.
"""

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
             "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "unk_token_id")  # fmt: skip


def variants(kind: Any, **sizes: Any) -> Iterator[Any]:
    """Configs of a family with small sizes, those that its class takes: the first whose model runs is its tiny model.

    Args:
        kind: Class of the config.
        sizes: In place of what SIZES says.

    Raises:
        Exception: What the class says of the first one, where it takes none.
    """
    first: Exception | None = None
    names, count = set(vars(kind())), 0
    tried = [(structure, 0) for structure in STRUCTURES if structure.keys() <= names]
    for structure, turning in (*tried, *(({}, turning) for turning in TURNING)):
        for fill in (False, True):
            try:
                yield tiny_config(kind, fill, turning, **structure, **sizes)
                count += 1
            except Exception as error:  # noqa: BLE001 - whatever a family's validation raises
                first = first or error
    if first is not None and count == 0:
        raise first


def tiny_config(kind: Any, fill: bool = False, turning: int = 0, **sizes: Any) -> Any:
    """The config of a family with small sizes.

    Args:
        kind: Class of the config.
        fill: Whether sizes that are None by default get one, too.
        turning: How many frequencies of a head are of time, height and width; 0: nothing is said of them.
        sizes: In place of what SIZES says.
    """
    default = kind()
    small = _small(default, fill, turning, sizes)
    parts = {
        name: tiny_config(type(part), fill, turning).to_dict()
        for name, part in vars(default).items()
        if hasattr(part, "model_type")
    }
    return kind(**small, **parts, **sizes)


def _small(default: Any, fill: bool, turning: int, sizes: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in vars(default).items() if name not in sizes}
    renamed = set(getattr(default, "attribute_map", ()))
    if "qk_nope_head_dim" in own:
        renamed.add("head_dim")  # follows from it
    small: dict[str, Any] = {}
    for name, value in own.items():
        if name in SIZES and name not in renamed and type(value) in (int, type(None)) and value != 0:
            small[name] = SIZES[name] if fill or value is not None or name in ("n_inner",) else None
            if name == "num_key_value_heads" and value == own.get("num_attention_heads"):
                small[name] = HEADS
        elif name in TOKEN_IDS and isinstance(value, int):
            small[name] = 1
        elif name in TOKEN_IDS and isinstance(value, list):
            small[name] = [1]
        elif name == "rope_parameters" and turning and isinstance(value, dict):
            small[name] = {**value, "mrope_section": [turning - 2 * (turning // 3), turning // 3, turning // 3]}
        elif name == "layer_types" and value:
            # One layer of each kind.
            kinds = list(dict.fromkeys(value))
            small[name] = (kinds * 2)[: max(2, len(kinds))]
    if "layer_types" in small:
        small |= dict.fromkeys(
            {"num_hidden_layers", "num_layers", "n_layers"} & small.keys(), len(small["layer_types"])
        )
    return {name: value for name, value in small.items() if value is not None}


def tiny_model(kind: Any, config: Any) -> nn.Module:
    """A model in float32 whose weights are random, all of them: routers and biases that begin as zeros, too."""
    torch.manual_seed(0)
    model: nn.Module = kind(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(std=0.02)
    return model


def batches(model: Any, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Inputs of the kind that the model takes."""
    generator = torch.Generator().manual_seed(1)
    config = model.config

    def tokens() -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)

    def batch() -> dict[str, torch.Tensor]:
        if model.main_input_name == "input_features":
            frames = 2 * getattr(config, "max_source_positions", 64)
            if hasattr(config, "input_feat_per_channel"):
                made = {"input_features": torch.randn(2, frames, config.input_feat_per_channel, generator=generator)}
            else:
                made = {"input_features": torch.randn(2, config.num_mel_bins, frames, generator=generator)}
        elif model.main_input_name == "input_values":
            made = {"input_values": torch.randn(2, 8000, generator=generator)}
        elif model.main_input_name == "pixel_values":
            made = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
        else:
            made = {"input_ids": tokens()}
        if type(model).__name__ == "CLIPModel":
            made["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator)
        if getattr(config, "is_encoder_decoder", False):
            made["decoder_input_ids"] = tokens()
        return made

    return [batch() for _ in range(count)]
