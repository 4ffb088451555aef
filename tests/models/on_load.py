"""What tests of quantizing while loading share: float folders, what is made of them, and whether two models are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quark.core.schemes import SCHEMES
from tests.models.families import SIZES, family

WITHOUT_DATA = [name for name, layer in SCHEMES.items() if not layer.needs_data]
"""Schemes that need no calibration data."""


def float_model(name: str) -> Any:
    """A tiny random model: of a family; one with a tied head is "tied", an encoder whose decoder is tied "bert"."""
    if name == "bert":
        from transformers import AutoConfig, AutoModelForMaskedLM

        torch.manual_seed(0)
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **{**SIZES, "tie_word_embeddings": True}))
    return family("qwen3" if name == "tied" else name, **({"tie_word_embeddings": True} if name == "tied" else {}))


FAMILIES = ("llama", "tied", "gpt2", "qwen3_moe", "bert")
"""Names of `float_model`: dense, tied, transposed weights (Conv1D), experts that transformers merges, an encoder."""


def assert_same(one: Any, other: Any) -> None:
    """Two models have modules of the same classes, and tensors of the same types, shapes and bytes."""
    assert [(n, type(m)) for n, m in one.named_modules()] == [(n, type(m)) for n, m in other.named_modules()]
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        there = theirs[name]
        assert (tensor.dtype, tensor.shape) == (there.dtype, there.shape), name
        assert tensor.is_contiguous() and there.is_contiguous(), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)), name


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of two rows of token ids."""
    out: torch.Tensor = model.eval()(torch.arange(2, 42).reshape(2, 20)).logits
    return out


def assert_same_files(one: Path, other: Path) -> None:
    """Two folders have the same bytes as config.json and weights."""
    names = sorted(path.name for path in other.glob("*.safetensors"))
    assert names == sorted(path.name for path in one.glob("*.safetensors"))
    for name in ("config.json", *names):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
