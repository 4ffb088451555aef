"""Calibration data of language-model scripts: windows of token ids, from a text file or a named dataset.

Texts are joined and cut into windows without padding, of which nothing would be learned. The two names of
benchmarks are the recipes of their papers' code:

    pileval_for_awq_benchmark     shuffled by seed 42; texts longer than a window are left out
    wikitext_for_gptq_benchmark   windows at random places of the whole text, from seed 0
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from quark.errors import CalibrationError, ConfigError, NotSupportedError, did_you_mean
from quark.torch.llm.chat_templates import render_chat
from quark.torch.llm.documents import packed
from quark.torch.llm.named_datasets import SOURCES, WIKITEXT, texts_of
from quark.torch.llm.text import token_windows

__all__ = ["get_calib_dataloader", "get_wikitext2"]

PLACES_SEED = 0


def get_calib_dataloader(
    dataset_name: str | os.PathLike[str],
    tokenizer: Any = None,
    batch_size: int = 1,
    num_calib_data: int = 512,
    seqlen: int = 512,
    device: torch.device | str | None = None,
    shuffle: bool = False,
    processor: Any = None,
) -> DataLoader[torch.Tensor]:
    """Batches of token ids, (batch_size, seqlen) int64; the last one may be smaller.

    Args:
        dataset_name: A text file, or a name of `SOURCES`, which the package datasets reads.
        tokenizer: From `get_tokenizer`.
        batch_size: Windows in a batch.
        num_calib_data: Windows; all there are where the text has fewer.
        seqlen: Tokens in a window.
        device: Where the ids lie; None: the CPU. `quantize_model` moves them to its model.
        shuffle: Another order of the batches' windows at each pass.
        processor: None: only text is read here.

    Raises:
        CalibrationError: The text cannot be read, or is shorter than one window.
        ConfigError: The name is unknown, or an argument is wrong.
        MissingDependencyError: A dataset is named and the package datasets is not installed.
    """
    if tokenizer is None:
        raise ConfigError("get_calib_dataloader needs the tokenizer of the model: tokenizer=get_tokenizer(folder).")
    if processor is not None:
        raise NotSupportedError(
            "get_calib_dataloader(processor=...): only text is read here; pass batches of your own."
        )
    for name, value in (("batch_size", batch_size), ("num_calib_data", num_calib_data), ("seqlen", seqlen)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it counts from 1.")
    if Path(dataset_name).is_file():
        windows = token_windows(tokenizer, Path(dataset_name), seqlen, num_calib_data)
    else:
        windows = _dataset_windows(str(dataset_name), tokenizer, num_calib_data, seqlen)
    ids = torch.cat(windows).to(device or "cpu")
    return DataLoader(ids, batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


def get_wikitext2(
    tokenizer: Any, nsamples: int, seqlen: int, device: torch.device | str | None, seed: int = PLACES_SEED
) -> torch.Tensor:
    """Windows at random places of the training text of WikiText-2: (nsamples, seqlen) int64, a window a row.

    Args:
        tokenizer: From `get_tokenizer`.
        nsamples, seqlen: How many, and of how many tokens.
        device: Where they lie; None: the CPU.
        seed: Of the places.
    """
    return torch.cat(_random_windows(texts_of(WIKITEXT), tokenizer, nsamples, seqlen, seed)).to(device or "cpu")


def _dataset_windows(name: str, tokenizer: Any, count: int, length: int) -> list[torch.Tensor]:
    if name == "ScienceQA":
        raise NotSupportedError("The dataset ScienceQA holds images; only text is read here: pass batches of your own.")
    if name not in SOURCES:
        raise ConfigError(f"The dataset {name!r} is unknown, and no text file. {did_you_mean(name, SOURCES)}")
    source = SOURCES[name]
    if name == "wikitext_for_gptq_benchmark":
        return _random_windows(texts_of(source), tokenizer, count, length, PLACES_SEED)
    benchmark = name == "pileval_for_awq_benchmark"
    texts = _conversations(texts_of(source), tokenizer) if source.column == "messages" else texts_of(source, benchmark)
    token_ids = (tokenizer(text.strip(), verbose=False)["input_ids"] for text in texts)
    return packed(token_ids, "The dataset", length, count, longest=length if benchmark else None)


def _conversations(conversations: Iterable[Any], tokenizer: Any) -> Iterator[str]:
    """Each conversation as the model reads it: by its chat template, else its contents line by line."""
    for messages in conversations:
        if getattr(tokenizer, "chat_template", None):
            yield render_chat(tokenizer, messages)
        else:
            yield "\n".join(message["content"] for message in messages)


def _random_windows(texts: Iterable[str], tokenizer: Any, count: int, length: int, seed: int) -> list[torch.Tensor]:
    ids = torch.tensor(tokenizer("\n\n".join(texts), verbose=False)["input_ids"])
    if len(ids) <= length:
        raise CalibrationError(f"The dataset has {len(ids)} tokens; more than one window of {length} is needed.")
    places = random.Random(seed)
    starts = [places.randint(0, len(ids) - length - 1) for _ in range(count)]
    return [ids[start : start + length][None] for start in starts]
