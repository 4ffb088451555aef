"""Models and data for the PyTorch flow, and shortcuts to quantize them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.fingerprint.outputs import MODELS, hash_arrays
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization import QConfig

FOLDER = "models/language_model"
"""The example language model, seen from the folder in which outputs are written."""

LLAMA = LLMTemplate.get("llama")

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Families of language models, each with another structure: what their configs have beside `SIZES`."""


@cache
def tokens() -> list[torch.Tensor]:
    """Two batches of calibration data, (1, 64) each."""
    text = (MODELS / "text" / "calibration.txt").read_text(encoding="utf-8")[:4000]
    ids = AutoTokenizer.from_pretrained(MODELS / "language_model")(text, return_tensors="pt").input_ids[0]
    return list(ids[: 2 * 64].reshape(2, 1, 64))


def language_model(dtype: torch.dtype = torch.float16) -> Any:
    """The example one."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()


def family(name: str) -> Any:
    """A small random model of a family, whose norms are not the identity."""
    torch.manual_seed(0)
    sizes = {} if name == "gpt2" else SIZES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **FAMILIES[name]}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


class EveryLayer(nn.Module):
    """One of each layer that is quantized; input: token ids (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.bag = nn.EmbeddingBag(64, 64, mode="mean")
        self.linear = nn.Linear(64, 64)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.deconv = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(256, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 4, 64)."""
        x = self.linear(self.embedding(ids)) + self.bag(ids)[:, None]
        image = x[:, :4].reshape(len(ids), 4, 8, 8)
        image = self.deconv(torch.relu(self.conv(image)))
        return self.head(image.reshape(len(ids), 4, -1))


class Convolutions(nn.Module):
    """Convolutions with norms, an Add, a Concat, poolings, a linear layer; input (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities (n, 5)."""
        x = self.stem(images)
        x = torch.cat([self.norm(self.conv(x)) + x, x], dim=1)
        x = nn.functional.adaptive_avg_pool2d(nn.functional.max_pool2d(x, 2), 1).flatten(1)
        return torch.softmax(self.head(x), dim=-1)


def linears() -> nn.Sequential:
    """Two linear layers; input (..., 128)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 48)).eval()


def vectors() -> list[torch.Tensor]:
    """Three batches for `linears`, the largest values not in the last one."""
    torch.manual_seed(1)
    return [scale * torch.randn(2, 8, 128) for scale in (1.0, 3.0, 0.5)]


def quantized(config: QConfig, model: Any, data: list[torch.Tensor] | None) -> Any:
    """The model after calibration, frozen."""
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, data))


def computed(model: Any, *arguments: torch.Tensor) -> str:
    """A hash of what a model computes; live activations are in no file."""
    with torch.no_grad():
        found = model(*arguments)
    return hash_arrays([getattr(found, "logits", found).float()])


def logits(model: Any) -> str:
    """The same of a language model."""
    return computed(model, tokens()[1])
