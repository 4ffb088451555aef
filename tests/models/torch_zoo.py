"""Small models that the tests share, made at random from fixed seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.llm.text import token_windows

ROOT = Path(__file__).parents[2]
LANGUAGE_MODEL = ROOT / "examples" / "models" / "language_model"
TEXT = ROOT / "examples" / "models" / "text"


class Mlp(nn.Module):
    """Two linear layers; input (..., 128), output (..., 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 128)
        self.down = nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class EveryLayer(nn.Module):
    """One of each layer that quark replaces; input: token ids (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.bag = nn.EmbeddingBag(64, 64, mode="mean")
        self.linear = nn.Linear(64, 64)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.deconv = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(256, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embedding(ids)) + self.bag(ids)[:, None]
        image = x[:, :4].reshape(len(ids), 4, 8, 8)
        image = self.deconv(torch.relu(self.conv(image)))
        return self.head(image.reshape(len(ids), 4, -1))


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> Mlp:
    """A seeded Mlp."""
    torch.manual_seed(seed)
    return Mlp().to(dtype).eval()


def every_layer(seed: int = 0) -> EveryLayer:
    """A seeded EveryLayer."""
    torch.manual_seed(seed)
    return EveryLayer().eval()


def token_batches(count: int = 3, vocabulary: int = 64, length: int = 16) -> list[torch.Tensor]:
    """Seeded batches of token ids, (2, length) each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (2, length), generator=generator) for _ in range(count)]


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random two-layer Llama: hidden 128, grouped queries, vocabulary 64."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    # from_config, as loading does, keeps the rotary frequencies in float32; `.to(dtype)` would round them.
    return AutoModelForCausalLM.from_config(LlamaConfig(**(settings | options)), dtype=dtype).eval()


def tiny_opt(folder: Path, seed: int = 0) -> Path:
    """A random OPT with the tokenizer of the example language model, saved to `folder`."""
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=64,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def language_model() -> Any:
    """The example model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()


def text_windows(name: str, length: int, count: int) -> list[torch.Tensor]:
    """Windows of tokens of "calibration" or "heldout", the texts beside the example model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    return token_windows(tokenizer, TEXT / f"{name}.txt", length, count, special=False)  # as the model was trained
