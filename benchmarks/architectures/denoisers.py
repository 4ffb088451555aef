"""Any denoiser of diffusers as a tiny model with random weights: its own class, with small sizes in its arguments.

What classes call their sizes differs, but the words are few: SIZES has them, and INPUTS what they call their inputs. A
model is found by trying kinds of latents (pictures, videos, tokens) until its forward runs. What none of this fits has
a row of its own in `denoiser_rows`, or is said not to be built.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.architectures.denoiser_rows import ROWS, made
from quark.torch.model.batches import named_outputs

HIDDEN, HEADS, TEXT, CHANNELS, SIDE, FRAMES, WORDS = 64, 4, 64, 4, 8, 2, 6
HEAD = HIDDEN // HEADS
ROTARY = {1: (16,), 2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}
LENGTHS = {2: (64, 64), 3: (64, 64, 64)}
"""Of each number of axes: channels of a head for each, which 16 are in all, and the most positions of each."""

WIDTHS = ("in_channels", "in_visual_dim", "io_channels", "in_dim", "latent_dim", "embedding_dim", "hidden_size")
"""What classes call the channels of their latents."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "model_dim", "embed_dim", "dit_dim", "inner_dim",
                     "time_embed_hidden_dim", "caption_projection_dim", "embedding_dim", "token_dim",
                     "time_dim", "time_embed_dim"), HIDDEN),
    **dict.fromkeys(("cross_attention_dim", "joint_attention_dim", "text_dim", "text_embed_dim",
                     "text_embed_2_dim", "caption_channels", "cap_feat_dim", "context_in_dim", "text_emb_dim",
                     "text_in_dim", "in_text_dim", "in_text_dim2", "pooled_projection_dim", "text_hidden_dim",
                     "condition_dim", "cond_token_dim", "global_cond_dim", "dit_text_dim",
                     "cross_attention_dim_t5", "text_encoder_dim", "conditioning_dim",
                     "crossattn_proj_in_channels", "encoder_hidden_states_channels", "global_states_input_dim",
                     "cross_attention_input_dim", "clip_text_pooled_in_channels", "image_embed_dim",
                     "image_proj_dim", "llm_features_dim", "encoder_hid_dim", "audio_cross_attention_dim",
                     "image_dim", "img_context_dim_out", "audio_acoustic_hidden_dim"), TEXT),
    **dict.fromkeys(("ffn_dim", "intermediate_size", "ff_dim", "ffn_hidden_size", "ff_inner_dim",
                     "text_intermediate_size", "moe_intermediate_dim", "approximator_hidden_dim"), 2 * HIDDEN),
    **dict.fromkeys(("num_layers", "num_single_layers", "num_mmdit_layers", "num_single_dit_layers",
                     "n_layers", "depth", "num_hidden_layers", "num_visual_blocks", "dit_depth",
                     "mmdit_layers", "transformer_num_layers", "nlayers"), 2),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers", "num_text_blocks", "approximator_layers",
                     "num_refiner_text_blocks", "num_layerwise_text_blocks", "LFE_depth",
                     "perceiver_num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "num_cross_attention_heads", "dit_heads",
                     "nheads", "text_num_attention_heads", "audio_num_attention_heads",
                     "face_encoder_num_heads", "cross_attn_num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_attention_heads",
                     "text_num_key_value_heads"), 2),
    **dict.fromkeys(("attention_head_dim", "head_dim", "cross_attention_head_dim", "audio_attention_head_dim",
                     "linear_head_dim"), HEAD),
    **dict.fromkeys(("in_channels", "out_channels", "in_visual_dim", "out_visual_dim", "latent_channels",
                     "in_dim", "out_dim", "io_channels", "latent_dim", "audio_in_channels",
                     "audio_out_channels", "latent_channel", "cond_in_channels"), CHANNELS),
    **dict.fromkeys(("sample_size", "sample_width", "sample_height"), SIDE),
    **dict.fromkeys(("text_len", "text_len_t5", "max_text_seq_length", "max_sequence_length"), WORDS),
    **dict.fromkeys(("freq_dim", "timestep_guidance_channels", "timestep_channels", "timestep_embed_dim",
                     "timestep_features_dim", "time_proj_dim", "fourier_embedding_dim", "adaln_dim",
                     "time_step_dim", "approximator_num_channels", "time_embedding_dim",
                     "timestep_ratio_embedding_dim", "adaln_lora_dim"), 32),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim_rope", "rope_dim",
                     "rope_dim_list", "axes_dim", "mrope_section"), ROTARY),
    **dict.fromkeys(("axes_lens", "max_resolution"), LENGTHS),
    "max_size": {3: (8, 16, 16)}, "rope_scale": {3: (1.0, 1.0, 1.0)},
    "sample_frames": 5, "video_length": FRAMES, "vocab_size": 128, "pos_embed_max_size": 16, "multiple_of": 8,
    "num_experts": 4, "num_embeds_ada_norm": 8, "num_text_layers": 2, "vace_layers": {8: (0, 1)}, "rotary_dim": 8,
    "vace_in_channels": CHANNELS, "prior_vq_quantizer_codebook_size": 16, "norm_num_groups": 8, "groups": 8,
    "block_out_channels": {2: (32, 64), 3: (32, 32, 64), 4: (32, 32, 64, 64)}, "layers_per_block": 1,
    "num_embeddings": WORDS, "additional_embeddings": 4,
    "num_memory_tokens": 4, "local_add_cond_dim": 8, "rope_freq_dim": 2, "injection_layer_ids": {5: (0, 1)},
    "num_embodiment_domains": 2, "patch_latent_dim": 4 * CHANNELS, "addition_embed_type_num_heads": HEADS,
    "transformer_layers_per_block": 1, "pos_embed_max_pos": 20, "max_position_embeddings": 128,
    "num_frames": FRAMES, "projection_class_embeddings_input_dim": 96, "addition_time_embed_dim": 32,
}  # fmt: skip
"""What classes call their sizes -> what a tiny model has; of a tuple, by its length."""
NEEDED: tuple[dict[str, Any], ...] = (
    {},
    {"in_channels": CHANNELS, "cross_attention_dim": TEXT},
    {"patch_size": 1},
    {"patch_size": 2},
    {"patch_size": 2, "in_channels": CHANNELS, "out_channels": CHANNELS},
    {"patch_size": 2, "in_channels": CHANNELS},
    {"patch_size": 2, "in_channels": CHANNELS, "caption_channels": [TEXT, TEXT], "llama_layers": [0, 1]},
    {"num_kv_heads": 2},
    {"in_channels": 4 * CHANNELS},
    {"norm_num_groups": 1},
    {"in_channels": CHANNELS, "norm_type": "ada_norm_single", "caption_channels": TEXT, "cross_attention_dim": HIDDEN,
     "sample_size": SIDE, "patch_size": 2},
)  # fmt: skip
"""What a class may want to have said beside its sizes: one is tried after the other."""


def denoisers() -> dict[str, Any]:
    """Name -> class, of all transformers and UNets of diffusers; adapters beside a denoiser (ControlNet) are none."""
    import diffusers

    names = [name for name in dir(diffusers) if any(word in name for word in ("Transformer", "UNet", "DiT"))]
    kinds = {name: getattr(diffusers, name) for name in names if not name.startswith("Autoencoder")}
    return {
        name: kind
        for name, kind in kinds.items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and "Control" not in name and not name.endswith("Vae")
    }


def tiny_denoiser(kind: Any) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """A tiny model of a class, and what makes a batch of its inputs. Raises what the first try raised."""
    if kind.__name__ in ROWS:
        sizes, inputs = ROWS[kind.__name__]
        torch.manual_seed(0)
        model = _filled(kind(**sizes))
        make = partial(_row_batch, inputs)
        _try(model, make)
        return model, make
    first: Exception | None = None
    for extra in NEEDED:
        known = inspect.signature(kind.__init__).parameters
        if extra and not all(name in known for name in extra):
            continue
        try:
            torch.manual_seed(0)
            model = _filled(kind(**(_sizes(known) | extra)))
        except Exception as error:  # noqa: BLE001 - sizes that this class does not take
            first = first or error
            continue
        for make in _makers(model):
            try:
                _try(model, make)
            except Exception as error:  # noqa: BLE001 - latents that it does not take
                first = first or error
            else:
                return model, make
    raise first or ValueError("no sizes were tried")


@torch.no_grad()
def _filled(model: Any) -> nn.Module:
    """The model with random numbers in the place of zeros, with which layers begin that hide what is before them."""
    for parameter in model.parameters():
        if not parameter.any() or not parameter.isfinite().all():
            parameter.normal_(std=0.02)
    return nn.Module.float(model.eval())  # that of diffusers warns


@torch.no_grad()
def _try(model: nn.Module, make: Callable[[], dict[str, Any]]) -> None:
    """Raise what a forward raises, and ValueError where its numbers are not finite."""
    found = [x for _, x in named_outputs(model(**make()))]
    if not found or not all(x.isfinite().all() for x in found):
        raise ValueError("the output of the float model is not finite")


def _row_batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: made(value) for name, value in inputs.items()}


def _sizes(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The arguments of a class that SIZES knows."""
    found = {}
    for name, parameter in parameters.items():
        value = SIZES.get(name)
        if isinstance(value, dict):
            value = value.get(len(parameter.default)) if isinstance(parameter.default, (tuple, list)) else None
            value = type(parameter.default)(value) if value is not None else None
        if value is not None and (parameter.default is not None or parameter.default is inspect.Parameter.empty):
            found[name] = value
    return found


def _makers(model: nn.Module) -> Iterator[Callable[[], dict[str, Any]]]:
    """What makes a batch, for each kind of latents that the model may take."""
    config: Any = getattr(model, "config", {})
    names = inspect.signature(model.forward).parameters
    channels = next((config[name] for name in WIDTHS if isinstance(config.get(name), int)), CHANNELS)
    kinds = [(2, channels, SIDE, SIDE), (2, channels, FRAMES, SIDE, SIDE), (2, SIDE * SIDE // 4, channels),
             (2, FRAMES, channels, SIDE, SIDE), (2, channels, 4 * SIDE), (2, FRAMES, SIDE, SIDE, channels),
             (2, channels), (2, channels, 1, SIDE, SIDE)]  # fmt: skip
    for shape, steps, optional in itertools.product(kinds, ("integer", "float", "one"), (False, True)):
        yield partial(_batch, config, names, shape, steps, optional)


def _batch(config: Any, names: Mapping[str, Any], shape: tuple[int, ...], steps: str, optional: bool) -> dict[str, Any]:
    """Inputs by name; optional ones where asked for, or where no denoiser runs without them."""
    rows, tokens = shape[0], shape[1] if len(shape) == 3 else SIDE * SIDE // 4
    axes = len(config.get("axes_dims_rope") or (1, 1, 1))
    times = torch.rand(rows)
    time = {"integer": (1000 * times).long(), "float": times, "one": (1000 * times[0]).long()}[steps]
    latents = torch.randn(*shape)
    text = torch.randn(rows, WORDS, TEXT)
    known: dict[str, Any] = {
        **dict.fromkeys(("hidden_states", "sample", "x"), latents),
        **dict.fromkeys(("timestep", "timesteps", "t", "timestep_r", "r_timestep", "timestep_ratio"), time),
        **dict.fromkeys(("encoder_hidden_states", "cap_feats", "text_bth", "encoder_hidden_states_t5", "clip_text",
                         "encoder_hidden_states_1"), text),
        **dict.fromkeys(("pooled_projections", "pooled_embeds", "proj_embedding"), torch.randn(rows, TEXT)),
        **dict.fromkeys(("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask",
                         "text_embedding_mask", "text_embedding_mask_t5"),
                        torch.ones(rows, WORDS, dtype=torch.bool if optional else torch.long)),
        "img_ids": torch.arange(axes * tokens).reshape(tokens, axes) % 4, "txt_ids": torch.zeros(WORDS, axes),
        "guidance": torch.full((rows,), 4.0), "class_labels": torch.zeros(rows, dtype=torch.long),
        "img_shapes": [[(1, 4, tokens // 4)]] * rows, "text_lens": torch.full((rows,), WORDS),
        **dict.fromkeys(("original_size", "target_size"), torch.full((rows, 2), 8.0)),
        "crop_coords": torch.zeros(rows, 2), "num_frames": FRAMES, "height": 4, "width": max(1, tokens // 4 // FRAMES),
        "fps": torch.full((rows,), 8), "added_time_ids": torch.ones(rows, 3), "clip_text_pooled": text[:, :1],
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "image_embeds": torch.randn(rows, WORDS, TEXT), "txt_seq_lens": [WORDS] * rows,
        "position_ids": torch.zeros(tokens + WORDS, 3, dtype=torch.long),
        "image_latents": latents, "context_latents": latents, "text_encoder_layers": [text] * 4,
        "prior_token_id": torch.zeros(rows, SIDE * SIDE // 4, dtype=torch.long), "chunk_partition": (1, 1),
        "prior_token_drop": torch.zeros(rows, dtype=torch.bool), "text_rope_pos": torch.arange(WORDS),
        "visual_rope_pos": [torch.arange(FRAMES), torch.arange(SIDE // 2), torch.arange(SIDE // 2)],
        "img_mask": torch.ones(rows, 16, dtype=torch.bool), "control_hidden_states": latents,
        "audio_hidden_states": torch.randn(rows, 8, CHANNELS), "audio_encoder_hidden_states": text,
        "rotary_embedding": (torch.randn(4 * SIDE, HEAD // 2), torch.randn(4 * SIDE, HEAD // 2)),
        "image_rotary_emb": torch.randn(16, HEAD // 2, dtype=torch.complex64), "effnet": latents,
        "image_embeddings": text[:, 0], "image_meta_size": torch.ones(rows, 6), "global_hidden_states": text[:, :1],
        "style": torch.zeros(rows, dtype=torch.long), "indices_latents": None,
        "audio_num_frames": 8, "encoder_hidden_states_llama3": [text] * 4, "img_sizes": [[4, 4]] * rows,
        "padding_mask": torch.zeros(1, 1, SIDE, SIDE),
        "latent_cond": latents, "attention_mask": torch.ones(rows, tokens, dtype=torch.bool),
    }  # fmt: skip
    often = {"timestep", "encoder_hidden_states", "pooled_projections", "img_ids", "txt_ids", "timesteps", "img_shapes",
             "encoder_hidden_states_mask", "class_labels", "added_cond_kwargs", "num_frames", "height", "width",
             "encoder_attention_mask", "clip_text", "fps", "global_hidden_states",
             "control_hidden_states", "audio_num_frames", "image_embeddings", "image_meta_size", "style",
             "text_embedding_mask", "text_embedding_mask_t5"}  # fmt: skip
    needed = {name for name, each in names.items() if each.default is inspect.Parameter.empty}
    wanted = needed | (
        often
        if not optional
        else often
        | {
            "guidance",
            "encoder_hidden_states_t5",
            "image_embeds",
            "effnet",
            "rotary_embedding",
            "encoder_hidden_states_llama3",
        }
    )
    if optional:
        wanted -= {"class_labels", "added_cond_kwargs"} - needed
    return {name: known[name] for name in names if name in wanted and name in known}
