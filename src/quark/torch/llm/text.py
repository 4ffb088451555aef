"""Text in, windows of token ids out; and how likely a model finds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from quark.base.progress import progress
from quark.errors import CalibrationError


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
    ids = tokenizer(read_text(file), return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    count = len(ids) // length
    if count == 0:
        raise CalibrationError(f"{file} has {len(ids)} tokens; at least one window of {length} is needed.")
    count = count if limit is None else min(count, limit)
    return list(ids[: count * length].reshape(count, 1, length))


def read_text(file: Path) -> str:
    """The text of a file. Raises CalibrationError where it cannot be read, or is no UTF-8."""
    if file.exists() and not file.is_file():
        raise CalibrationError(f"{file} is a folder, a pipe or a device; a text file is needed.")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{file} is no UTF-8 text: {error}.") from None


def negative_log_likelihood(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """The sum over the tokens of a window, the first left out, in nats.

    Args:
        logits: (1, length, vocabulary).
        ids: (1, length).
    """
    return float(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))


def perplexity(model: Any, windows: Sequence[torch.Tensor]) -> float:
    """Exp of the mean negative log likelihood of each next token within the windows."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad():
        for window in progress(windows, "perplexity", total=len(windows)):
            ids = window.to(device)
            total += negative_log_likelihood(model(ids).logits, ids)
            count += ids.numel() - len(ids)
    return math.exp(total / count)
