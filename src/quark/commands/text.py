"""Text in, batches of token ids out; and the perplexity of a model on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from quark.errors import CalibrationError
from quark.log import progress


def token_windows(tokenizer: Any, file: Path, length: int, limit: int | None = None) -> list[torch.Tensor]:
    """Cut a text file into windows of token ids, each of shape (1, length); a shorter rest is left out.

    Args:
        tokenizer: A transformers tokenizer.
        file: UTF-8 text.
        length: Tokens in a window.
        limit: Most windows returned; None for all.

    Raises:
        CalibrationError: The file cannot be read, or has fewer tokens than one window.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{file} is no UTF-8 text: {error}.") from None
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    count = len(ids) // length
    if count == 0:
        raise CalibrationError(f"{file} has {len(ids)} tokens; at least one window of {length} is needed.")
    count = count if limit is None else min(count, limit)
    return list(ids[: count * length].reshape(count, 1, length))


def perplexity(model: Any, windows: Sequence[torch.Tensor]) -> float:
    """Exp of the mean negative log likelihood of each next token within the windows."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad():
        for window in progress(windows, "perplexity", total=len(windows)):
            logits = model(window.to(device)).logits[:, :-1].float()
            targets = window[:, 1:].to(device)
            total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
    return math.exp(total / count)
