"""Random models of a moment, as `save_pretrained` writes them: they stand where a real one goes, and know nothing."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from PIL import Image

LANGUAGE_MODEL = Path(__file__).parents[1] / "models" / "language_model"
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def mixture(folder: Path) -> Path:
    """A Qwen3-MoE: eight experts, of which each token takes two."""
    config = transformers.Qwen3MoeConfig(
        **WIDTHS, **TOKENS, head_dim=32, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64,
    )  # fmt: skip
    return _with_tokenizer(transformers.Qwen3MoeForCausalLM, config, folder)


def reranker(folder: Path) -> Path:
    """A BERT with one score for a question and a passage."""
    config = transformers.BertConfig(**WIDTHS, **TOKENS, num_labels=1)
    return _with_tokenizer(transformers.BertForSequenceClassification, config, folder)


def whisper(folder: Path) -> Path:
    """A Whisper for one second of sound."""
    config = transformers.WhisperConfig(
        **TOKENS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=50, max_target_positions=64,
        decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return _with_tokenizer(transformers.WhisperForConditionalGeneration, config, folder)


def sounds(folder: Path, signal: np.ndarray[Any, Any], count: int) -> Path:
    """Files of one second, of 16 bit and 16 kHz, cut out of a signal from -1 to 1."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(signal, count)):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((part[:16000] * 32767).astype("<i2").tobytes())
    return folder


def pipeline(folder: Path) -> Path:
    """A pipeline of diffusers that makes pictures of 16 by 16 without a prompt."""
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder


def detector(file: Path) -> Path:
    """A detector of white squares, one in each cell of 8 by 8 pixels at most: as much white, so long is the side."""
    corners = np.stack([*np.meshgrid(np.arange(8), np.arange(8))] * 2, -1).reshape(64, 4) * 8
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        graph (float[1, 3, 64, 64] image) => (float[64, 4] boxes, float[64, 1] scores)
        <int64[2] all = {64, 1}, float[1, 4] ends = {0, 0, 8, 8}> {
            white = Conv <strides = [8, 8]> (image, mean)
            scores = Reshape (white, all)
            side = Sqrt (scores)
            size = Mul (side, ends)
            boxes = Add (size, corners)
        }""")
    weights = {"mean": np.full((1, 3, 8, 8), 1 / 192), "corners": corners}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w.astype("f4"), name) for name, w in weights.items())
    onnx.save(model, file)
    return file


def squares(folder: Path, count: int) -> Path:
    """Pictures of white squares, and boxes.json in the form of COCO."""
    folder.mkdir()
    random, images, boxes = np.random.default_rng(0), [], []
    for number in range(count):
        pixels = np.zeros((64, 64, 3), np.uint8)
        for cell in random.choice(64, 6, replace=False):
            x, y, side = int(8 * (cell % 8)), int(8 * (cell // 8)), int(random.integers(4, 9))
            pixels[y : y + side, x : x + side] = 255
            boxes.append({"image_id": number, "category_id": 0, "bbox": [x, y, side, side]})
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png"})
    (folder / "boxes.json").write_text(json.dumps({"images": images, "annotations": boxes}), encoding="utf-8")
    return folder


def _with_tokenizer(kind: Any, config: Any, folder: Path) -> Path:
    """A random model, with the tokenizer of the example language model."""
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # those of a fresh model are so small that all outputs are alike
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, folder / name)
    return folder
