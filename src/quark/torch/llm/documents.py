"""Documents of a text file, of JSON lines or of a dataset, and the samples of token ids that they become.

A document is the whole of a text file, a line of JSON lines, or a row of a dataset. A line of JSON lines is one of two
objects: {"text": "..."}, or a conversation, which becomes a text by the chat template of the tokenizer:
{"messages": [{"role": "user", "content": "..."}, ...]}.

    packed         token ids of all documents one after another, cut into windows of equal length; the rest is left out
    not packed     a sample of each document, of a text file of each line that is not empty; cut at the length
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark.errors import CalibrationError, FormatError, one_line
from quark.torch.llm.chat_templates import render_chat
from quark.torch.llm.named_datasets import SOURCES, NamedDataset, rows_of
from quark.torch.llm.text import read_text, token_windows

DATASETS = "datasets:"
"""Begins the name of a dataset in the place of a path: datasets:NAME[:SPLIT[:COLUMN]]."""
LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON lines."""
COLUMNS = ("text", "messages")
"""Where a row holds its text, or its conversation, unless a column is named."""


@dataclass(frozen=True)
class Document:
    """A text, or a conversation.

    Attributes:
        content: The text, or the messages.
        place: Where it stands, for errors.
    """

    content: str | Sequence[Any]
    place: str

    def token_ids(self, tokenizer: Any, length: int | None = None) -> list[int]:
        """The ids with the special tokens of the tokenizer, or of its chat template.

        Args:
            tokenizer: Of transformers.
            length: Most tokens; None: all.

        Raises:
            CalibrationError: A conversation, and the tokenizer has no chat template, or its template refuses it.
        """
        options = {} if length is None else {"truncation": True, "max_length": length}
        # A chat template writes the special tokens itself.
        special = isinstance(self.content, str)
        return list(tokenizer(self.text(tokenizer), add_special_tokens=special, verbose=False, **options)["input_ids"])

    def text(self, tokenizer: Any) -> str:
        """The text as the model reads it. Raises CalibrationError as `token_ids` does."""
        if isinstance(self.content, str):
            return self.content
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{self.place} is a conversation, and the tokenizer of the model has no chat template. Possible: "
                'lines of {"text": "..."}.'
            )
        try:
            return render_chat(tokenizer, self.content)
        except FormatError as error:
            raise FormatError(f"{self.place}: {error}") from None
        except CalibrationError as error:
            raise CalibrationError(f"{self.place}: {error}") from None
        except Exception as error:  # noqa: BLE001 - of jinja2, or of what the template does with other messages
            raise CalibrationError(
                f"{self.place}: the chat template of the model refuses the messages: {one_line(error)[:200]}."
            ) from None


def is_dataset(data: Path) -> bool:
    """Return True where a path is the name of a dataset; a file that is called so is a file."""
    return str(data).startswith(DATASETS) and not data.exists()


def documents(data: Path) -> Iterator[Document]:
    """The documents of a text file, of JSON lines, or of a dataset.

    Raises:
        CalibrationError: It cannot be read, or a line or row holds neither text nor messages.
        MissingDependencyError: A dataset, and the package datasets is not installed.
    """
    if is_dataset(data):
        yield from _documents_of_dataset(data)
    elif data.suffix.lower() in LINES:
        for number, line in enumerate(read_text(data).split("\n"), 1):
            if line.strip():
                place = f"{data}, line {number},"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CalibrationError(f"{place} is not JSON: {one_line(error)}.") from None
                yield Document(_content(row, place), place)
    else:
        yield Document(read_text(data), str(data))


def samples_of(tokenizer: Any, data: Path, length: int, packing: bool, limit: int | None = None) -> list[torch.Tensor]:
    """Token ids of the first samples, each (1, tokens) int64.

    Args:
        tokenizer: Of transformers.
        data: A text file, JSON lines, or the name of a dataset.
        length: Tokens in a window; of a sample that is not packed, the most.
        packing: Whether windows are cut from all documents, one after another.
        limit: Most samples; None: all.

    Raises:
        CalibrationError: See `documents`; or there are fewer tokens than one window has, or no document.
        MissingDependencyError: See `documents`.
    """
    one_text = not is_dataset(data) and data.suffix.lower() not in LINES
    if packing and one_text:
        return token_windows(tokenizer, data, length, limit)
    if packing:
        return packed((document.token_ids(tokenizer) for document in documents(data)), str(data), length, limit)
    found: list[torch.Tensor] = []
    for document in lines_of(data) if one_text else documents(data):
        if limit is not None and len(found) == limit:
            break
        ids = document.token_ids(tokenizer, length)
        if ids:
            found.append(torch.tensor([ids]))
    if not found:
        raise CalibrationError(f"{data} holds no text.")
    return found


def lines_of(data: Path) -> Iterator[Document]:
    """The lines of a text file that are not empty, or the documents of what holds several."""
    if is_dataset(data) or data.suffix.lower() in LINES:
        yield from documents(data)
        return
    for number, line in enumerate(read_text(data).splitlines(), 1):
        if line.strip():
            yield Document(line.strip(), f"{data}, line {number},")


def packed(
    token_ids: Iterable[list[int]], name: str, length: int, limit: int | None = None, longest: int | None = None
) -> list[torch.Tensor]:
    """The first windows of documents put one after another, each (1, length) int64.

    Args:
        token_ids: Of each document.
        name: Of the data, for errors.
        length: Tokens in a window.
        limit: Most windows; None: all.
        longest: Documents of more tokens are left out; None: none are.

    Raises:
        CalibrationError: There are fewer tokens than one window has.
    """
    kept: list[int] = []
    for ids in token_ids:
        if longest is None or len(ids) <= longest:
            kept += ids
        if limit is not None and len(kept) >= limit * length:
            break
    count = len(kept) // length
    if count == 0:
        raise CalibrationError(f"{name} has {len(kept)} tokens; at least one window of {length} is needed.")
    count = count if limit is None else min(count, limit)
    return list(torch.tensor(kept[: count * length]).reshape(count, 1, length))


def _content(row: Any, place: str, column: str | None = None) -> str | Sequence[Any]:
    """The text or the messages of a line or a row."""
    wanted = (column,) if column else COLUMNS
    present = [name for name in wanted if isinstance(row, Mapping) and row.get(name) is not None]
    if len(present) != 1:
        came = f"has {', '.join(map(str, row))[:200] or 'nothing'}" if isinstance(row, Mapping) else "is no object"
        raise CalibrationError(f"{place} {came}; needed is {' or '.join(map(repr, wanted))}, one of them.")
    content = row[present[0]]
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(m, Mapping) and "role" in m for m in content):
        return content
    raise CalibrationError(f"{place} {present[0]!r} is neither text nor a list of messages with role and content.")


def _documents_of_dataset(data: Path) -> Iterator[Document]:
    name, split, column, *more = [*str(data).removeprefix(DATASETS).split(":"), "", ""]
    if not name or any(more):
        raise CalibrationError(
            f"{data} is no name of a dataset. Possible: {DATASETS}NAME, with :SPLIT or :SPLIT:COLUMN."
        )
    known = SOURCES.get(name, NamedDataset(name, "train"))
    source = NamedDataset(known.path, split or known.split, options=known.options)
    column = column or (known.column if name in SOURCES and isinstance(known.column, str) else "")
    for number, row in enumerate(rows_of(source), 1):
        place = f"{data}, row {number},"
        content = _content(row, place, column or None)
        if content:
            yield Document(content, place)
