"""Tiny model folders of many kinds, as `save_pretrained` writes them, with data that each kind takes."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS = SIZES | TOKENS | {"vocab_size": 2048}
CAUSAL = WORDS | {"num_key_value_heads": 2, "max_position_embeddings": 256}
PATCHES = SIZES | {"image_size": 32, "patch_size": 8}
ENCODER_DECODER = TOKENS | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 2048,
    "decoder_start_token_id": 1,
}
T5 = TOKENS | {"vocab_size": 2048, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
               "decoder_start_token_id": 0}  # fmt: skip
WHISPER = ENCODER_DECODER | {"max_source_positions": 50, "max_target_positions": 64, "num_mel_bins": 16,
                             "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
DEEPSEEK = CAUSAL | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2,
                     "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
                     "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
WAVES = SIZES | {"vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8),
                 "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 4}  # fmt: skip

KINDS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "classifier": ("BertForSequenceClassification", "BertConfig", WORDS | {"num_labels": 3}, "text"),
    "token_classifier": ("RobertaForTokenClassification", "RobertaConfig", WORDS | {"num_labels": 5}, "text"),
    "masked_lm": ("BertForMaskedLM", "BertConfig", WORDS, "text"),
    "sentence_encoder": ("BertModel", "BertConfig", WORDS, "text"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "text"),
    "bart": ("BartForConditionalGeneration", "BartConfig", ENCODER_DECODER, "text"),
    "vit": ("ViTForImageClassification", "ViTConfig", PATCHES | {"num_labels": 4}, "images"),
    "clip": ("CLIPModel", "CLIPConfig", {"projection_dim": 32,
             "text_config": WORDS | {"max_position_embeddings": 32}, "vision_config": PATCHES}, "images"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "audio"),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES, "audio"),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", {"image_token_index": 2047,
              "text_config": CAUSAL | {"model_type": "llama"},
              "vision_config": PATCHES | {"model_type": "clip_vision_model", "projection_dim": 32}}, "text"),
    "mamba": ("MambaForCausalLM", "MambaConfig", TOKENS | {"vocab_size": 2048, "hidden_size": 64, "state_size": 8,
              "num_hidden_layers": 2}, "text"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", CAUSAL | {"head_dim": 16}, "text"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", CAUSAL | {"head_dim": 16}, "text"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", CAUSAL | {"num_local_experts": 4}, "text"),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, "text"),
    "llama_classifier": ("LlamaForSequenceClassification", "LlamaConfig", CAUSAL | {"num_labels": 3}, "text"),
}  # fmt: skip
"""Name -> its class, the class of its config, the arguments of that, and what data it takes."""


def model_folder(name: str, folder: Path) -> Path:
    """Write a random model of a kind, with the tokenizer or processor that it needs."""
    import transformers

    class_name, config_name, arguments, data = KINDS[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, max(4, parameter.shape[-1]) ** -0.5)
    model.save_pretrained(folder)
    if data != "audio":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(LANGUAGE_MODEL / file, folder / file)
    if data == "images":
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    if name == "whisper":
        transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400).save_pretrained(folder)
    elif data == "audio":
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def _text(folder: Path) -> Path:
    return TEXT / "calibration.txt"


def _images(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(8):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"the picture of number {index}")
    return folder


def _audio(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(4):
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes((rng.standard_normal(16000) * 3000).astype("<i2").tobytes())
    return folder


DATA: dict[str, Callable[[Path], Path]] = {"text": _text, "images": _images, "audio": _audio}
"""Kind of data -> how to write some."""
