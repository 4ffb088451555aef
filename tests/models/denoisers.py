"""Tiny denoisers of diffusers with random weights, and what a pipeline gives each in a step.

A row is a class of diffusers, the fields of its config, and its arguments: a shape is of random numbers, anything else
stands for itself. One sample each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

STEP = torch.tensor([300])
SHARE = torch.tensor([0.3])
IDS = torch.zeros(16, 3), torch.zeros(7, 3)

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sd3": (
        "SD3Transformer2DModel",
        {"sample_size": 16, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
         "pooled_projection_dim": 64, "out_channels": 4},
        {"hidden_states": (1, 4, 16, 16), "encoder_hidden_states": (1, 7, 32), "pooled_projections": (1, 64),
         "timestep": STEP},
    ),
    "flux": (
        "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 7, 32), "pooled_projections": (1, 32),
         "img_ids": IDS[0], "txt_ids": IDS[1], "timestep": SHARE},
    ),
    "unet": (
        "UNet2DConditionModel",
        {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "in_channels": 4, "out_channels": 4,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8},
        {"sample": (1, 4, 16, 16), "timestep": STEP, "encoder_hidden_states": (1, 7, 32)},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3,
         "caption_channels": 32, "in_channels": 4, "cross_attention_dim": 24, "out_channels": 8,
         "num_embeds_ada_norm": 8, "use_additional_conditions": False},
        {"hidden_states": (1, 4, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 8, 32),
         "added_cond_kwargs": {"aspect_ratio": None, "resolution": None}},
    ),
    "wan": (
        "WanTransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
         "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32},
        {"hidden_states": (1, 4, 2, 8, 8), "timestep": STEP, "encoder_hidden_states": (1, 6, 16)},
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 3, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4)},
        {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 7, 16),
         "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": SHARE,
         "img_shapes": [[(1, 4, 4)]]},
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True,
         "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
        {"hidden_states": (1, 4, 2, 6, 6), "timestep": STEP, "encoder_hidden_states": (1, 9, 16),
         "pooled_projections": (1, 8), "encoder_attention_mask": torch.ones(1, 9), "guidance": torch.tensor([6.0])},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 4,
         "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
         "cross_attention_dim": 8, "caption_channels": 8, "sample_size": 8},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 6, 8), "timestep": STEP},
    ),
    "aura": (
        "AuraFlowTransformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
         "out_channels": 4, "pos_embed_max_size": 64},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 6, 32), "timestep": SHARE},
    ),
    "cog": (
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
         "text_embed_dim": 8, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 8,
         "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 8},
        {"hidden_states": (1, 2, 4, 8, 8), "encoder_hidden_states": (1, 8, 8), "timestep": STEP},
    ),
    "lumina": (
        "Lumina2Transformer2DModel",
        {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
         "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128), "cap_feat_dim": 32},
        {"hidden_states": (1, 4, 16, 16), "encoder_hidden_states": (1, 9, 32),
         "encoder_attention_mask": torch.ones(1, 9, dtype=torch.bool), "timestep": SHARE},
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
         "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16},
        {"hidden_states": (1, 32, 8), "encoder_hidden_states": (1, 7, 16),
         "encoder_attention_mask": torch.ones(1, 7, dtype=torch.bool), "timestep": STEP, "num_frames": 2, "height": 4,
         "width": 4},
    ),
}  # fmt: skip


def denoiser(name: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """The network of a row, from seed 0, in evaluation mode; with some fields of its config changed."""
    import diffusers

    kind, config, _ = ROWS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**{**config, **changed}).eval()
    with torch.no_grad():  # some layers begin with zeros, behind which nothing is seen
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return nn.Module.to(model, dtype)  # that of diffusers warns


def step(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a pipeline gives the network of a row in a step."""
    generator = torch.Generator().manual_seed(seed)
    return {key: _value(value, generator, dtype) for key, value in ROWS[name][2].items()}


def _value(value: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return torch.randn(value, generator=generator).to(dtype)
    return dict(value) if isinstance(value, Mapping) else value


@torch.no_grad()
def output(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """What a network makes of a step."""
    return model(**batch, return_dict=False)[0]  # type: ignore[no-any-return]
