"""Text in, windows of token ids out, as a program that serves the model gives them to it; and how likely it finds them.

    window    the tokens that the tokenizer itself puts before a text (BOS), then as many of the text as fit

A model that was trained with BOS before each text is another model without it: of one the perplexity is 17 for 5.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from quark.base.progress import progress
from quark.errors import CalibrationError, FormatError, is_panic, one_line

IGNORED = -100
"""In the place of a token whose likelihood does not count, as `torch.nn.functional.cross_entropy` has it."""


def token_windows(
    tokenizer: Any, file: Path, length: int, limit: int | None = None, special: bool = True
) -> list[torch.Tensor]:
    """Cut a text file into windows of token ids, each of shape (1, length); a shorter rest is left out.

    Args:
        tokenizer: A transformers tokenizer.
        file: UTF-8 text.
        length: Tokens in a window, with those before the text.
        limit: Most windows returned; None for all.
        special: Whether each begins with the tokens that the tokenizer puts before a text.

    Raises:
        CalibrationError: The file cannot be read, or has fewer tokens than one window.
    """
    ids = token_ids(tokenizer, read_text(file), add_special_tokens=False)
    return windows_of(ids, str(file), length, limit, first_tokens(tokenizer) if special else ())


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of a text, with these options of a transformers tokenizer.

    Raises:
        FormatError: Its library gives up, as it does on a regular expression that tries too many ways.
        CalibrationError: The text has half of a surrogate pair, as JSON can write it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"The text {text[max(0, error.start - 20) : error.end + 20]!a} has half of a pair of characters, which no "
            "UTF-8 has. Possible: data without it."
        ) from None
    try:
        return list(tokenizer(text, verbose=False, **options)["input_ids"])
    except BaseException as error:
        if not is_panic(error):
            raise
        place = getattr(tokenizer, "name_or_path", "") or "This folder"
        raise FormatError(
            f"{place} has a tokenizer.json whose regular expressions fail on this text: {one_line(error)}."
        ) from None


def windows_of(
    ids: Sequence[int], name: str, length: int, limit: int | None = None, first: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Cut token ids into windows of shape (1, length), int64; a shorter rest is left out.

    Args:
        ids: Of one text, or of several one after another.
        name: Of the data, for errors.
        length: Tokens in a window.
        limit: Most windows; None: all.
        first: Tokens that each window begins with, where no text that has them begins there.

    Raises:
        CalibrationError: There are fewer tokens than one window has.
    """
    begin = list(first) if len(first) < length else []
    windows: list[list[int]] = []
    place = 0
    while limit is None or len(windows) < limit:
        before = [] if list(ids[place : place + len(begin)]) == begin else begin
        window = [*before, *ids[place : place + length - len(before)]]
        if len(window) < length:
            break
        windows.append(window)
        place += length - len(before)
    if not windows:
        raise CalibrationError(f"{name} has {len(ids)} tokens; at least one window of {length} is needed.")
    return list(torch.tensor(windows).reshape(len(windows), 1, length))


def first_tokens(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text by itself, as its post-processor has them; none of most."""
    plain, whole = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
    starts = [start for start in range(len(whole) - len(plain) + 1) if whole[start : start + len(plain)] == plain]
    return whole[: starts[0]] if plain and starts else []


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
        ids: (1, length); IGNORED where a token does not count.
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
