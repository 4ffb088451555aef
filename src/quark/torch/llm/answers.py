"""Texts of which the answers are what counts: each a question and its answer, as JSON lines or a dataset hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import torch

from quark.base.log import logger
from quark.errors import CalibrationError
from quark.torch.llm.documents import Document, documents, holds_media


@dataclass(frozen=True)
class AnsweredTexts(Sequence[torch.Tensor]):
    """Token ids of texts, and where the answer of each begins.

    Attributes:
        ids: Of each text, (1, tokens) int64.
        starts: How many tokens stand before each answer; 1 or more.
    """

    ids: Sequence[torch.Tensor]
    starts: Sequence[int]

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> AnsweredTexts: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | AnsweredTexts:
        return AnsweredTexts(self.ids[index], self.starts[index]) if isinstance(index, slice) else self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.ids)

    def __str__(self) -> str:
        count, tokens = len(self), sum(x.shape[1] - start for x, start in zip(self.ids, self.starts, strict=True))
        documents = f"{count} documents" if count != 1 else "1 document"
        return f"the answers of {documents} ({tokens} token{'s' if tokens != 1 else ''})"


def answered_texts(tokenizer: Any, data: Path, length: int, limit: int | None = None) -> AnsweredTexts | None:
    """The first documents with their answers; None where the first one has no answer, or one has images or sounds.

    Args:
        tokenizer: Of transformers.
        data: JSON lines, or the name of a dataset.
        length: Most tokens in a text; one whose answer begins after them is left out, which is logged.
        limit: Most documents; None: all.

    Raises:
        CalibrationError: See `documents`; or some have no answer, or no answer is within the length.
        MissingDependencyError: See `documents`.
    """
    read = list(islice(documents(data), limit))
    if not read or read[0].answer is None or holds_media(data):
        return None
    ids, starts = list[torch.Tensor](), list[int]()
    for document in read:
        require_answer(document, read[0])
        tokens, start = document.token_ids(tokenizer, length), max(1, document.answer_start(tokenizer, length))
        if start < len(tokens):
            ids.append(torch.tensor([tokens]))
            starts.append(start)
    if not ids:
        raise CalibrationError(f"{data}: no answer begins within {length} tokens. Possible: a larger --length.")
    if len(ids) < len(read):
        logger.warning(
            "%d of the %d documents of %s are left out: their answers do not begin within %d tokens. Possible: a "
            "larger --length.",
            len(read) - len(ids), len(read), data, length,
        )  # fmt: skip
    return AnsweredTexts(ids, starts)


def require_answer(document: Document, first: Document) -> None:
    """Raise CalibrationError for a document without an answer, or without choices, that the first one has."""
    for name, missing in (
        ("answer", document.answer is None),
        ("choices", bool(first.choices and not document.choices)),
    ):
        if missing:
            raise CalibrationError(f"{document.place} has no {name}, and {first.place.rstrip(',')} has.")
