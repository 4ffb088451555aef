"""Text for training scripts: windows of a named dataset, and what transformers' Trainer takes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from quark.errors import CalibrationError, ConfigError, did_you_mean
from quark.torch.llm.named_datasets import WIKITEXT, NamedDataset, texts_of

__all__ = ["get_loader", "get_pile10k_dataloader", "get_trainer_dataset"]

SOURCES = {
    "wikitext": WIKITEXT,
    "Salesforce/wikitext": WIKITEXT,
    "shibing624/AdvertiseGen": NamedDataset("shibing624/AdvertiseGen", "train", ("content", "summary")),
}
"""The documented names."""
PILE_10K = NamedDataset("NeelNanda/pile-10k", "train")
SEED = 0
"""Of the windows that are chosen where a script takes fewer than there are."""


def get_loader(
    path: str,
    subset: str,
    tokenizer: Any,
    seqlen: int = 1024,
    num_batch: int = -1,
    batch_size: int = 1,
    shuffle: bool = False,
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of windows of a dataset's text: lists of one tensor of ids, (batch_size, seqlen) int64.

    Args:
        path: A name of `SOURCES`, which the package datasets reads.
        subset: The split: "train", "test".
        tokenizer: From `get_tokenizer`.
        seqlen: Tokens in a window.
        num_batch: Batches, of windows that a seed chooses; -1, or more than there are: all, in their order.
        batch_size: Windows in a batch; the last one may have fewer.
        shuffle: Another order of the windows at each pass.

    Raises:
        ConfigError: The name is unknown, or a size is wrong.
        CalibrationError: The text is shorter than one window.
        MissingDependencyError: The package datasets is not installed.
    """
    _require_counts(seqlen=seqlen, batch_size=batch_size)
    text = "\n\n".join(texts_of(replace(_source(path), split=subset)))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    count = len(ids) // seqlen
    if count == 0:
        raise CalibrationError(f"The dataset {path} has {len(ids)} tokens; at least one window of {seqlen} is needed.")
    windows = ids[: count * seqlen].reshape(count, seqlen)
    if 0 <= num_batch * batch_size < count:
        windows = windows[random.Random(SEED).sample(range(count), num_batch * batch_size)]
    return DataLoader(TensorDataset(windows), batch_size=batch_size, shuffle=shuffle)


def get_trainer_dataset(
    path: str,
    subset: str,
    tokenizer: Any,
    max_train_samples: int | None,
    max_eval_samples: int | None,
    seqlen: int = 1024,
) -> dict[str, Any]:
    """`train_dataset`, `eval_dataset` and `data_collator` of transformers' Trainer.

    Each text stands between the beginning and the end token; all are joined and cut into rows of `seqlen` tokens. A row
    is a dict of lists: `input_ids`, `attention_mask` (ones) and `labels` (the ids; models shift them). Rows for
    evaluation are of the test split of WikiText-2, whatever is trained on.

    Args:
        path: A name of `SOURCES`, which the package datasets reads.
        subset: The split that is trained on: "train".
        tokenizer: From `get_tokenizer`; it needs an end token.
        max_train_samples, max_eval_samples: Texts, from the first; None: all.
        seqlen: Tokens in a row.

    Raises:
        ConfigError: The name is unknown, a size is wrong, or the tokenizer has no end token.
        CalibrationError: The texts are shorter than one row.
        MissingDependencyError: The package datasets is not installed.
    """
    import transformers  # only here: the loaders need none of it

    _require_counts(seqlen=seqlen)
    if tokenizer.eos_token is None:
        raise ConfigError("The tokenizer has no end token, which stands after each text.")
    sources = {
        "train_dataset": (replace(_source(path), split=subset), max_train_samples),
        "eval_dataset": (replace(WIKITEXT, split="test"), max_eval_samples),
    }
    rows = {
        role: _token_windows(itertools.islice(texts_of(source), limit), tokenizer, seqlen, source.path)
        for role, (source, limit) in sources.items()
    }
    return {**rows, "data_collator": transformers.default_data_collator}


def get_pile10k_dataloader(
    tokenizer: Any, train_size: int = 512, seqlen: int = 2048, seed: int = 0, batch_size: int = 8
) -> tuple[DataLoader[torch.Tensor], None]:
    """Batches of ids of the first ten thousand texts of the Pile, one window at a random place of each long one.

    Args:
        tokenizer: From `get_tokenizer`.
        train_size: Windows; all there are where fewer texts are longer than a window.
        seqlen: Tokens in a window.
        seed: Of the order of the texts and of the places.
        batch_size: Windows in a batch; the last one may have fewer.

    Returns:
        The loader of (batch_size, seqlen) int64, and None, where scripts expect one for evaluation.

    Raises:
        CalibrationError: No text is longer than a window.
        MissingDependencyError: The package datasets is not installed.
    """
    _require_counts(train_size=train_size, seqlen=seqlen, batch_size=batch_size)
    texts, chance = list(texts_of(PILE_10K)), random.Random(seed)
    chance.shuffle(texts)
    windows = torch.tensor(list(itertools.islice(_long_windows(texts, tokenizer, seqlen, chance), train_size)))
    if len(windows) == 0:
        raise CalibrationError(f"No text of {PILE_10K.path} is longer than a window of {seqlen} tokens.")
    return DataLoader(windows, batch_size=batch_size), None  # type: ignore[arg-type]


def _long_windows(texts: Iterable[str], tokenizer: Any, length: int, chance: random.Random) -> Iterator[list[int]]:
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) > length:
            start = chance.randint(0, len(ids) - length - 1)
            yield ids[start : start + length]


def _token_windows(texts: Iterable[str], tokenizer: Any, length: int, path: str) -> list[dict[str, list[int]]]:
    begin = tokenizer.bos_token or ""
    ids: list[int] = []
    for text in texts:
        whole = begin + text + tokenizer.eos_token
        ids += tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < length:
        raise CalibrationError(f"The texts of {path} have {len(ids)} tokens; at least one row of {length} is needed.")
    cut = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": row, "attention_mask": [1] * length, "labels": list(row)} for row in cut]


def _source(path: str) -> NamedDataset:
    if path not in SOURCES:
        raise ConfigError(f"The dataset {path!r} is unknown. {did_you_mean(path, SOURCES)}")
    return SOURCES[path]


def _require_counts(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it counts from 1.")
