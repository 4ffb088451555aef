"""Batches of texts of unequal length: bare, one by one, or padded at the right or the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

PAD = 63
"""Stands at masked positions, and in no text; `loud_padding` gives it an embedding that nobody overlooks."""
LENGTHS = (12, 7, 16, 9, 16, 11)
FORMS = ("right", "left", "four dimensions", "shared positions")


def texts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    """Ids of tokens, (length,), without that of the padding and the special ones."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, PAD, (length,), generator=draw) for length in lengths]


def loud_padding(model: Any) -> Any:
    """The model with an embedding of the padding that is large, behind a norm too: all of it lies in one channel."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight[PAD]
        embedding.zero_()
        embedding[0] = 30
    return model


def bare(ids: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each text alone."""
    return [{"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]} for text in ids]


def padded(ids: Sequence[torch.Tensor], form: str = "right", rows: int = 3, length: int = 20) -> list[dict[str, Any]]:
    """Batches of several texts, padded to one length, in one of `FORMS`."""
    return [_padded(ids[start : start + rows], form, length) for start in range(0, len(ids), rows)]


def _padded(ids: Sequence[torch.Tensor], form: str, length: int) -> dict[str, Any]:
    batch = torch.full((len(ids), length), PAD)
    mask = torch.zeros(len(ids), length, dtype=torch.long)
    for row, text in enumerate(ids):
        first = length - len(text) if form == "left" else 0
        batch[row, first : first + len(text)] = text
        mask[row, first : first + len(text)] = 1
    if form == "left":
        return {"input_ids": batch, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if form == "four dimensions":
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None] & mask.bool()[:, None, None]
        added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        return {"input_ids": batch, "attention_mask": added}
    if form == "shared positions":
        return {"input_ids": batch, "attention_mask": mask, "position_ids": torch.arange(length)[None]}
    return {"input_ids": batch, "attention_mask": mask}


class Encoder(nn.Module):
    """One block of attention; its padding is the loudest word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32)
        self.query, self.value, self.up, self.down = (nn.Linear(32, 32) for _ in range(4))
        with torch.no_grad():
            self.words.weight[PAD] = 30

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        heads = (*x.shape[:2], 4, 8)
        query, value = self.query(x).view(heads).transpose(1, 2), self.value(x).view(heads).transpose(1, 2)
        scores = query @ query.transpose(-1, -2) + (1 - attention_mask[:, None, None].float()) * -1e9
        y = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        flat = self.up(x + y).relu().flatten(0, 1)
        out: torch.Tensor = self.down(flat).view(x.shape)
        return out
