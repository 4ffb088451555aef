"""Sizes and inputs of denoisers whose words no other class has, which a search by names does not find.

A row is the class, fields of its config, and its inputs: a tuple is the shape of random numbers, of a list the same,
and anything else stands for itself.
"""

from __future__ import annotations

from typing import Any

import torch

HALF, LATE = torch.tensor([0.5, 0.9]), torch.tensor([500, 90])
TEXT_FIRST = torch.arange(18) < 2
"""Of a sequence of two text tokens and sixteen of a picture: which are text."""


def _grid(rows: int, columns: int) -> torch.Tensor:
    """Frame, row and column of each token, [rows * columns, 3]."""
    return torch.tensor([[0, i, j] for i in range(rows) for j in range(columns)])


ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AceStepTransformer1DModel": (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "in_channels": 16, "audio_acoustic_hidden_dim": 8},
        {"hidden_states": (2, 32, 8), "timestep": HALF, "timestep_r": HALF, "encoder_hidden_states": (2, 6, 64),
         "context_latents": (2, 32, 8)},
    ),
    "AnyFlowTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32},
        {"hidden_states": (2, 2, 4, 8, 8), "timestep": torch.full((2, 2), 500.0),
         "r_timestep": torch.full((2, 2), 250.0), "encoder_hidden_states": (2, 6, 16)},
    ),
    "AnyFlowFARTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32},
        {"hidden_states": (1, 4, 4, 16, 16), "timestep": torch.full((1, 4), 500.0),
         "r_timestep": torch.full((1, 4), 250.0), "encoder_hidden_states": (1, 12, 16), "chunk_partition": [2, 2]},
    ),
    "BriaFiboTransformer2DModel": (
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 64, "text_encoder_dim": 32, "axes_dims_rope": [4, 6, 6]},
        {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 6, 64), "img_ids": _grid(4, 4),
         "txt_ids": torch.zeros(6, 3), "timestep": torch.tensor([1.0]),
         "text_encoder_layers": [(1, 6, 32), (1, 6, 32)]},
    ),
    "BriaFibo2Transformer2DModel": (
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 24,
         "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8,
         "gist_step": 4, "gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6),
         "axes_lens": (16, 16, 16)},
        {"hidden_states": (2, 4, 8, 8), "timestep": HALF, "encoder_hidden_states": (2, 2, 6, 24)},
    ),
    "CosmosTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
         "text_embed_dim": 16, "adaln_lora_dim": 8, "max_size": (4, 32, 32), "concat_padding_mask": False,
         "extra_pos_embed_type": None},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": HALF, "encoder_hidden_states": (2, 6, 16)},
    ),
    "Cosmos3OmniTransformer": (
        {"head_dim": 12, "hidden_size": 48, "intermediate_size": 96, "latent_channel": 4, "latent_patch_size": 1,
         "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "patch_latent_dim": 4,
         "rope_axes_dim": [2, 2, 2], "vocab_size": 32, "dtype": "float32"},
        {"input_ids": torch.tensor([1, 2]), "text_indexes": torch.tensor([0, 1]),
         "position_ids": torch.arange(18).expand(3, 18).clone(), "und_len": 2, "sequence_length": 18,
         "vision_tokens": [(1, 4, 1, 4, 4)], "vision_token_shapes": [[1, 4, 4]],
         "vision_sequence_indexes": torch.arange(2, 18), "vision_mse_loss_indexes": torch.arange(2, 18),
         "vision_timesteps": torch.ones(16), "vision_noisy_frame_indexes": [torch.tensor([0])]},
    ),
    "HiDreamImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 4, "caption_channels": [8, 4], "text_emb_dim": 8,
         "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (8, 4, 4), "max_resolution": (32, 32),
         "llama_layers": [0, 1], "force_inference_output": True},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states_t5": (2, 8, 8),
         "encoder_hidden_states_llama3": (2, 2, 8, 4), "pooled_embeds": (2, 8), "timesteps": LATE},
    ),
    "HunyuanVideo15Transformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
         "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 16, "text_embed_2_dim": 8,
         "image_embed_dim": 12, "rope_axes_dim": (4, 4, 8), "target_size": 16, "task_type": "t2v"},
        {"hidden_states": (1, 4, 1, 8, 8), "timestep": torch.tensor([300.0]), "encoder_hidden_states": (1, 6, 16),
         "encoder_hidden_states_2": (1, 4, 8), "encoder_attention_mask": torch.ones(1, 6),
         "encoder_attention_mask_2": torch.ones(1, 4), "image_embeds": torch.zeros(1, 3, 12)},
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16, "pooled_projection_dim": 8,
         "rope_axes_dim": (4, 6, 6), "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        {"hidden_states": (1, 4, 3, 8, 8), "timestep": torch.tensor([300]), "encoder_hidden_states": (1, 12, 16),
         "pooled_projections": (1, 8), "encoder_attention_mask": torch.ones(1, 12), "guidance": torch.tensor([6]),
         "image_embeds": (1, 12, 16), "indices_latents": torch.ones(3), "latents_clean": (1, 4, 2, 8, 8),
         "indices_latents_clean": torch.ones(2), "latents_history_2x": (1, 4, 2, 8, 8),
         "indices_latents_history_2x": torch.ones(2), "latents_history_4x": (1, 4, 8, 8, 8),
         "indices_latents_history_4x": torch.ones(8)},
    ),
    "Ideogram4Transformer2DModel": (
        {"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "intermediate_size": 128, "adaln_dim": 16, "llm_features_dim": 24, "rope_theta": 10_000,
         "mrope_section": (2, 1, 1)},
        {"hidden_states": (1, 18, 16), "encoder_hidden_states": (1, 18, 24), "timestep": torch.tensor([0.5]),
         "position_ids": torch.cat([torch.zeros(2, 3).long(), 65536 + _grid(4, 4)])[None],
         "segment_ids": torch.ones(1, 18, dtype=torch.long),
         "indicator": torch.where(TEXT_FIRST, 3, 2)[None]},
    ),
    "JoyImageEditPlusTransformer3DModel": (
        {"in_channels": 16, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 16, "num_layers": 2,
         "rope_dim_list": [4, 6, 6]},
        {"hidden_states": (1, 16, 16, 1, 2, 2), "encoder_hidden_states": (1, 12, 16), "timestep": torch.tensor([1.0]),
         "shape_list": [[[1, 4, 2], [1, 4, 2]]]},
    ),
    "Kandinsky3UNet": (
        {"time_embedding_dim": 64, "groups": 8, "attention_head_dim": 16, "layers_per_block": 2,
         "block_out_channels": (32, 64), "cross_attention_dim": 32, "encoder_hid_dim": 32},
        {"sample": (2, 4, 8, 8), "timestep": LATE, "encoder_hidden_states": (2, 6, 32),
         "encoder_attention_mask": torch.ones(2, 6)},
    ),
    "Kandinsky6Transformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16,
         "model_dim": 48, "ff_dim": 96, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
         "in_audio_dim": 4, "out_audio_dim": 4},
        {"hidden_states": (2, 2, 8, 8, 9), "encoder_hidden_states": (2, 6, 8), "pooled_projections": (2, 8),
         "timestep": LATE.float()},
    ),
    "Kandinsky6SRTransformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 8, "time_dim": 16, "patch_size": (1, 2, 2), "model_dim": 48,
         "ff_dim": 96, "num_visual_blocks": 2, "axes_dims": (4, 4, 4)},
        {"hidden_states": (1, 2, 16, 16, 9), "timestep": torch.tensor([300.0])},
    ),
    "Krea2Transformer2DModel": (
        {"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "timestep_embed_dim": 32, "text_hidden_dim": 32,
         "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
         "text_intermediate_size": 64, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
         "axes_dims_rope": (4, 6, 6)},
        {"hidden_states": (2, 16, 16), "encoder_hidden_states": (2, 6, 2, 32), "timestep": HALF,
         "position_ids": torch.cat([torch.zeros(6, 3).long(), _grid(4, 4)])},
    ),
    "LuminaNextDiT2DModel": (
        {"sample_size": 16, "hidden_size": 48, "num_layers": 2, "num_attention_heads": 3, "num_kv_heads": 1,
         "multiple_of": 16, "learn_sigma": False, "cross_attention_dim": 32},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 32), "timestep": HALF,
         "encoder_mask": torch.ones(2, 6), "image_rotary_emb": (384, 384, 8), "cross_attention_kwargs": {}},
    ),
    "MiniMaxH3Transformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 48, "num_layers": 2,
         "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4, "audio_in_channels": 6, "text_dim": 8,
         "freq_dim": 8, "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2},
        {"hidden_states": (2, 8, 16), "audio_hidden_states": (2, 6, 6), "encoder_hidden_states": (2, 4, 8),
         "timestep": torch.tensor([0.7, 0.3]),
         "timestep_indices": torch.tensor([0] * 4 + [1] * 6 + [0] * 8),
         "token_tags": torch.tensor([1] * 4 + [2] * 6 + [0] * 8), "position_ids": torch.arange(54.0).reshape(18, 3),
         "text_indices": torch.arange(4), "audio_indices": torch.arange(4, 10), "video_indices": torch.arange(10, 18)},
    ),
    "MiniMaxMusic3Transformer1DModel": (
        {"in_channels": 8, "condition_dim": 16, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
         "ff_inner_dim": 128, "rotary_dim": 8, "fourier_embedding_dim": 16},
        {"hidden_states": (2, 8, 16), "timestep": HALF, "encoder_hidden_states": (2, 16, 16)},
    ),
    "OmniGenTransformer2DModel": (
        {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
         "num_layers": 2, "pad_token_id": 0, "vocab_size": 100, "time_step_dim": 8,
         "rope_scaling": {"long_factor": [1] * 6, "short_factor": [1] * 6}},
        {"hidden_states": (2, 4, 8, 8), "timestep": HALF, "input_ids": torch.ones(2, 24, dtype=torch.long),
         "input_img_latents": [(1, 4, 8, 8)], "input_image_sizes": {0: [[0, 16]]},
         "attention_mask": torch.ones(2, 41, 41), "position_ids": torch.arange(41).expand(2, 41).clone()},
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 16, "hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": [8, 8]},
        {"hidden_states": (2, 4, 8, 8), "timestep": HALF, "encoder_hidden_states": (2, 6, 16)},
    ),
    "QwenImage21Transformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "context_in_dim": 8, "mlp_ratio": 2, "axes_dims_rope": (4, 6, 6)},
        {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 4, 8),
         "encoder_hidden_states_mask": torch.ones(1, 4, dtype=torch.long), "timestep": torch.tensor([0.5]),
         "img_shapes": [[[1, 4, 4]]], "img_mask": torch.arange(8)[None] >= 4},
    ),
    "SanaWMTransformer3DModel": (
        {"in_channels": 4, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "softmax_every_n": 2,
         "linear_head_dim": 16, "caption_channels": 8, "mlp_ratio": 2.0, "chunk_plucker_channels": 8,
         "chunk_plucker_post_attn_blocks": 2},
        {"hidden_states": (1, 4, 4, 8, 8), "timestep": torch.full((1, 1, 4), 300.0),
         "encoder_hidden_states": (1, 1, 16, 8), "encoder_attention_mask": torch.ones(1, 16, dtype=torch.long),
         "camera_conditions": torch.cat([torch.eye(4).flatten(), torch.tensor([8.0, 8, 4, 4])]).repeat(1, 4, 1),
         "chunk_plucker": (1, 8, 4, 8, 8)},
    ),
    "SanaWMLTX2RefinerTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
         "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "num_layers": 2, "caption_channels": 16,
         "rope_double_precision": False},
        {"hidden_states": (2, 32, 4), "encoder_hidden_states": (2, 8, 16), "timestep": torch.full((2, 32), 300.0),
         "video_rotary_emb": [torch.ones(2, 32, 16), torch.zeros(2, 32, 16)],
         "encoder_attention_mask": torch.ones(2, 8)},
    ),
    "StableAudio3DiTModel": (
        {"io_channels": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "cond_token_dim": 16, "global_cond_dim": 16,
         "local_add_cond_dim": 9, "timestep_features_dim": 16, "num_memory_tokens": 4},
        {"hidden_states": (2, 8, 16), "timestep": HALF, "encoder_hidden_states": (2, 6, 16),
         "global_hidden_states": (2, 16)},
    ),
    "StableAudioDiTModel": (
        {"sample_size": 16, "in_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "num_key_value_attention_heads": 2, "out_channels": 8, "cross_attention_dim": 32, "time_proj_dim": 16,
         "global_states_input_dim": 16, "cross_attention_input_dim": 32},
        {"hidden_states": (2, 8, 16), "timestep": HALF, "encoder_hidden_states": (2, 6, 32),
         "global_hidden_states": (2, 1, 16), "rotary_embedding": [torch.ones(17, 8), torch.zeros(17, 8)]},
    ),
    "StableCascadeUNet": (
        {"in_channels": 4, "out_channels": 4, "conditioning_dim": 32, "block_out_channels": (32, 64),
         "num_attention_heads": (2, 4), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
         "clip_text_pooled_in_channels": 16, "timestep_ratio_embedding_dim": 16},
        {"sample": (2, 4, 8, 8), "timestep_ratio": HALF, "clip_text_pooled": (2, 1, 16)},
    ),
    "TransformerTemporalModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 32, "num_layers": 2,
         "norm_num_groups": 8, "cross_attention_dim": None},
        {"hidden_states": (4, 32, 8, 8), "num_frames": 2},
    ),
    "UNet1DModel": (
        {"sample_size": 16, "in_channels": 14, "out_channels": 14, "time_embedding_type": "positional",
         "flip_sin_to_cos": False, "use_timestep_embedding": True, "freq_shift": 1.0,
         "mid_block_type": "MidResTemporalBlock1D",
         "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"), "up_block_types": ("UpResnetBlock1D",),
         "out_block_type": "OutConv1DBlock", "block_out_channels": (32, 64), "act_fn": "swish",
         "downsample_each_block": False},
        {"sample": (2, 14, 16), "timestep": LATE},
    ),
    "WanAnimateTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "latent_channels": 4,
         "out_channels": 4, "text_dim": 16, "ffn_dim": 48, "num_layers": 2, "image_dim": 16, "rope_max_seq_len": 32,
         "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_encoder_size": 16,
         "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16, "face_encoder_hidden_dim": 16,
         "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2},
        {"hidden_states": (1, 12, 3, 8, 8), "timestep": torch.tensor([300]), "encoder_hidden_states": (1, 12, 16),
         "encoder_hidden_states_image": (1, 12, 16), "pose_hidden_states": (1, 4, 2, 8, 8),
         "face_pixel_values": (1, 3, 5, 16, 16)},
    ),
}  # fmt: skip


def made(value: Any) -> Any:
    """A value of a row: random numbers of a shape, or itself."""
    if isinstance(value, tuple):
        return torch.randn(value)
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [torch.randn(shape) for shape in value]
    return value
