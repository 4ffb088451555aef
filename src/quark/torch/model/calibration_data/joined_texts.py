"""Puts short texts one after another in one row, each still read alone, so that fewer forwards run.

    input_ids       a b c      and      d e        ->        a b c d e
    position_ids                                             0 1 2 0 1

Where positions begin again a text begins, and attention reads no token of another one: so do the masks of transformers
where a batch has no mask and no cache. Nothing is padded, so every position counts, and statistics that are sums or
extremes over tokens are those of the texts one by one. Layers that carry a state from token to token (Mamba, linear
attention, convolutions), and embeddings of positions that are not given, would read on: so it is tried.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quark.core.metrics import sqnr
from quark.torch.model.batches import evaluating, forward_batch, input_device, named_outputs

LEAST = {2: 40.0, 4: 60.0}
"""Bytes of a value of the model -> dB by which a text has to be the same alone. Of the example language model it is
131 in float32, 47 in bfloat16; where it reads on from another text, 10."""
Row = list[torch.Tensor]
"""Texts of one row, each (1, tokens)."""


def joined_texts(model: nn.Module, texts: Sequence[Any], length: int) -> list[Any] | None:
    """Batches of several texts each, the longest first.

    Args:
        model: Float, with its weights; it is run on one of the rows, and on the texts of that row.
        texts: Token ids (1, tokens), each of one text; what else is among them stays as it is, after them.
        length: Most tokens in a row of several texts.

    Returns:
        Batches of `input_ids` and `position_ids`, (1, tokens) int64; None where there is nothing to join, or the model
        does not read each text alone.
    """
    alone = [text for text in texts if _is_text(text)]
    rows = _packed(alone, length)
    tried = next((row for row in rows if len(row) > 1), None)
    if tried is None or not _reads_alone(model, tried):
        return None
    return [_batch(row) for row in rows] + [text for text in texts if not _is_text(text)]


def _is_text(batch: Any) -> bool:
    return isinstance(batch, torch.Tensor) and batch.ndim == 2 and len(batch) == 1 and not batch.is_floating_point()


def _packed(texts: Sequence[torch.Tensor], length: int) -> list[Row]:
    """Texts by length, each in the first row that has room for it."""
    rows: list[Row] = []
    room: list[int] = []
    for text in sorted(texts, key=lambda text: -text.shape[1]):
        place = next((index for index, left in enumerate(room) if left >= text.shape[1]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(text)
        room[place] -= text.shape[1]
    return rows


def _batch(row: Row) -> dict[str, Any]:
    positions = [torch.arange(text.shape[1], device=text.device) for text in row]
    return {"input_ids": torch.cat(row, 1), "position_ids": torch.cat(positions)[None], "use_cache": False}


def _reads_alone(model: nn.Module, row: Row) -> bool:
    """Return True where each text of a row gives the output that it gives alone."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    lengths = [text.shape[1] for text in row]
    try:
        parts = torch.split(_output(model, _batch(row)), lengths, 1)
        alone = [_output(model, {"input_ids": text, "use_cache": False}) for text in row]
        found = min(float(sqnr(x, part)) for x, part in zip(alone, parts, strict=True))
    except Exception:  # noqa: BLE001 - a model that does not take it so reads texts one by one
        return False
    return not math.isnan(found) and found >= LEAST.get(next(model.parameters()).itemsize, math.inf)


def _output(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the output of a model for each token, (1, tokens, ...): the first of its outputs."""
    with evaluating(model), torch.no_grad():
        return next(x for _, x in named_outputs(forward_batch(model, batch, input_device(model)))).float()
