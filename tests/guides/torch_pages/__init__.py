"""Snippets of the public pages on PyTorch, restated with small models, by topic.

Each runs with the names that `workplace` gives, in a folder of its own, and asserts its effect. None uses what only
this package has, so all can be run with the documented system, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LANGUAGE_MODEL = Path(__file__).parents[3] / "examples" / "models" / "language_model"


def workplace() -> dict[str, Any]:
    """What pages take for granted: a model, its tokenizer, calibration data, a classifier, and distances.

    Returns:
        dict: `llama()`, a new small Llama; `tokenizer`; `data`, a DataLoader of ids; `ids`; `save()`, a folder with the
        model; `net()`, a small convolutional classifier; `images`; `distance(model, reference)`, how far the logits
        are from those of another model, as a share of their size.
    """
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))

    def llama(**options: Any) -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | options)), dtype=torch.float32).eval()

    def save(folder: str = "tiny_llama") -> str:
        llama().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    def net() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 4),
        ).eval()

    def distance(model: Any, reference: Any) -> float:
        with torch.no_grad():
            found, expected = model(ids).logits, reference(ids).logits
        return float((found - expected).norm() / expected.norm())

    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return {
        "torch": torch,
        "nn": torch.nn,
        "tokenizer": tokenizer,
        "ids": ids,
        "data": DataLoader(ids, batch_size=2),
        "llama": llama,
        "save": save,
        "net": net,
        "images": images,
        "distance": distance,
    }
