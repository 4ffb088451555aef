"""Texts of datasets that scripts name, read by the package datasets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quark.errors import CalibrationError, one_line
from quark.torch.llm.other_packages import other_package

_SHUFFLE_SEED = 42


@dataclass(frozen=True)
class NamedDataset:
    """Where the texts of a name come from.

    Attributes:
        path: For `datasets.load_dataset`.
        split: Of the dataset.
        column: That holds the text, or the messages of a conversation; of several, their texts are joined.
        options: For `load_dataset`.
    """

    path: str
    split: str
    column: str | tuple[str, ...] = "text"
    options: dict[str, str] = field(default_factory=dict)


_PILE = NamedDataset("mit-han-lab/pile-val-backup", "validation")
WIKITEXT = NamedDataset("Salesforce/wikitext", "train", options={"name": "wikitext-2-raw-v1"})
SOURCES = {
    "pileval": _PILE,
    "wikitext": WIKITEXT,
    "cnn_dailymail": NamedDataset("abisee/cnn_dailymail", "train", "article", {"name": "3.0.0"}),
    "pileval_for_awq_benchmark": _PILE,
    "wikitext_for_gptq_benchmark": WIKITEXT,
    "HuggingFaceH4/ultrachat_200k": NamedDataset("HuggingFaceH4/ultrachat_200k", "train_sft", "messages"),
}
"""The documented names."""


def dataset_text(source: NamedDataset, limit: int | None = None) -> str:
    """The texts of a dataset as one, with empty lines between: what perplexity is measured on.

    Args:
        source: Which.
        limit: Texts that are taken; None: all.
    """
    return "\n\n".join(itertools.islice(texts_of(source), limit))


def rows_of(source: NamedDataset, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The first rows of a dataset, all columns; None: all of them. Raises as `texts_of` does."""
    yield from map(dict, itertools.islice(_loaded(source), limit))


def texts_of(source: NamedDataset, shuffled: bool = False) -> Iterator[Any]:
    """The texts, or the conversations, one after another.

    Args:
        source: Which.
        shuffled: In the order of a seed, which benchmarks share.

    Raises:
        MissingDependencyError: The package datasets is not installed.
        CalibrationError: It does not give the dataset.
    """
    rows = _loaded(source)
    for row in rows.shuffle(seed=_SHUFFLE_SEED) if shuffled else rows:
        yield row[source.column] if isinstance(source.column, str) else "".join(row[name] for name in source.column)


def _loaded(source: NamedDataset) -> Any:
    datasets = other_package(
        "datasets", f"The dataset {source.path}", "A text file can be given in place of a dataset's name."
    )
    try:
        return datasets.load_dataset(source.path, split=source.split, **source.options)
    except Exception as error:
        raise CalibrationError(
            f"The dataset {source.path} cannot be loaded: {one_line(error)[:300]} A text file can stand in its place."
        ) from error
