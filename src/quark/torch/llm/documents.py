"""Documents of a text file, of JSON lines or of a dataset, and the samples of token ids that they become.

A document is the whole of a text file, a line of JSON lines, or a row of a dataset. A line of JSON lines is one of:

    {"text": "..."}                                       a text
    {"messages": [{"role": "user", "content": "..."}]}    a conversation, which the chat template makes a text; what it
                                                          reads beside messages may follow: "tools", "documents",
                                                          "chat_template_kwargs"
    {"conversations": [{"from": "human", "value": ""}]}   the same, as ShareGPT has it
    {"prompt": "...", "completion": "..."}                a text in two parts, or two lists of messages
    {"prompt": "...", "answer": "..."}                    a question and its answer: two turns where there is a chat
                                                          template, else two lines
    {"prompt": "...", "choices": ["a", "b"], "answer": 0} a question and its answer, which is one of the choices, as an
                                                          index or a text

    packed         token ids of all documents one after another, each with its special tokens, cut into windows of
                   equal length, each of which begins as a text does (BOS); the rest is left out
    not packed     a sample of each document, of a text file of each line that is not empty; cut at the length
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quark.base.log import logger
from quark.errors import CalibrationError, FormatError, one_line
from quark.torch.llm.chat_templates import render_chat
from quark.torch.llm.media import for_template, media_in, opened, processed
from quark.torch.llm.named_datasets import SOURCES, NamedDataset, rows_of
from quark.torch.llm.text import first_tokens, read_text, token_ids, token_windows, windows_of

DATASETS = "datasets:"
"""Begins the name of a dataset in the place of a path: datasets:NAME[:SPLIT[:COLUMN]]."""
LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON lines."""
COLUMNS = ("text", "messages", "conversations", "prompt")
"""Where a row holds its text, its conversation or the first part of it, unless a column is named."""
REPLIES = ("completion", "answer", "response")
"""Where a row with a prompt holds what follows it."""
BESIDE = ("tools", "documents")
"""Columns that a chat template may read beside messages."""
TURNS = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "function_call": "assistant",
         "observation": "tool", "function": "tool"}  # fmt: skip
"""Names of speakers in ShareGPT -> roles; others are roles."""


@dataclass(frozen=True)
class Document:
    """A text, or a conversation.

    Attributes:
        content: The text, or the messages; without the answer, where there is one.
        place: Where it stands, for errors.
        beside: What the chat template reads beside the messages.
        answer: What follows the content, a text or messages; None: the content is all.
        question: Whether content and answer, two texts, are turns of a conversation where there is a chat template.
        choices: Possible answers, of which the answer is one; none: any text may be one.
    """

    content: str | Sequence[Any]
    place: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    answer: str | Sequence[Any] | None = None
    question: bool = False
    choices: tuple[str, ...] = ()

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
        special = not self._is_chat(tokenizer)
        return token_ids(tokenizer, self.text(tokenizer), add_special_tokens=special, **options)

    def answer_start(self, tokenizer: Any, length: int | None = None) -> int:
        """How many of the ids of `token_ids` stand before the answer; 0 where there is none."""
        if self.answer is None:
            return 0
        whole, before = self.token_ids(tokenizer, length), self.prompt_ids(tokenizer)
        same = 0
        while same < min(len(before), len(whole)) and before[same] == whole[same]:
            same += 1
        return same

    def with_answer(self, answer: str) -> Document:
        """This question with another answer."""
        return replace(self, answer=answer)

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """The ids that ask for an answer. Raises CalibrationError as `token_ids` does."""
        if self._is_chat(tokenizer):
            self._refuse_media()
            asked = self._rendered(tokenizer, self._turns(self.content, "user"), True)
            return token_ids(tokenizer, asked, add_special_tokens=False)
        return token_ids(tokenizer, self._joined(""))

    def text(self, tokenizer: Any) -> str:
        """The text as the model reads it. Raises CalibrationError as `token_ids` does."""
        if not self._is_chat(tokenizer):
            return self._joined(self.answer if isinstance(self.answer, str) else "")
        self._refuse_media()
        return self._rendered(tokenizer, self.messages, False)

    @property
    def messages(self) -> list[Any]:
        """Content and answer as the turns of a conversation."""
        return [*self._turns(self.content, "user"), *self._turns(self.answer or (), "assistant")]

    def processed(self, processor: Any, folder: Path) -> Mapping[str, Any]:
        """The inputs that the processor of a model makes of it, with its images and sounds.

        Args:
            processor: Of transformers, with a tokenizer that has the chat template.
            folder: Where names of files begin.

        Raises:
            CalibrationError: A file cannot be read, or the template or the processor refuses the conversation.
        """
        if not self._is_chat(processor.tokenizer):
            text = self._joined(self.answer if isinstance(self.answer, str) else "")
        else:
            text = self._rendered(processor.tokenizer, for_template(self.messages), False)
        return processed(processor, text, opened(self.messages, self.place, folder), self.place)

    def _is_chat(self, tokenizer: Any) -> bool:
        return not isinstance(self.content, str) or (self.question and bool(getattr(tokenizer, "chat_template", None)))

    def _joined(self, answer: str) -> str:
        """The text of a document that is no conversation, with an answer."""
        assert isinstance(self.content, str)
        return f"{self.content}\n{answer}" if self.question else f"{self.content}{answer}"

    def _turns(self, content: str | Sequence[Any], role: str) -> list[Any]:
        return [{"role": role, "content": content}] if isinstance(content, str) else [*content]

    def _rendered(self, tokenizer: Any, messages: Sequence[Any], answers: bool) -> str:
        """The text of messages, with the begin of an answer or without."""
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{self.place} is a conversation, and the tokenizer of the model has no chat template. Possible: "
                'lines of {"text": "..."}.'
            )
        try:
            return render_chat(tokenizer, messages, answers, self.beside)
        except FormatError as error:
            raise FormatError(f"{self.place}: {error}") from None
        except CalibrationError as error:
            raise CalibrationError(f"{self.place}: {error}") from None
        except Exception as error:  # noqa: BLE001 - of jinja2, or of what the template does with other messages
            raise CalibrationError(
                f"{self.place}: the chat template of the model refuses the messages: {one_line(error)[:200]}."
            ) from None

    def _refuse_media(self) -> None:
        """Raise CalibrationError for an image, a sound or a video, of which a chat template writes a placeholder."""
        for kind, _ in media_in(self.messages):
            raise CalibrationError(
                f"{self.place} has a part of the type {kind!r}, and is read as text alone. Possible: lines without it; "
                "a folder of .npz files, each with what the model's processor makes of one sample "
                "(np.savez(path, **inputs) of return_tensors='np'); or in Python such inputs as batches."
            )


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
                yield _document(row, place)
    else:
        yield Document(read_text(data), str(data))


def holds_documents(data: Path) -> bool:
    """Return whether data are JSON lines or a dataset, which hold several documents."""
    return is_dataset(data) or data.suffix.lower() in LINES


def holds_media(data: Path) -> bool:
    """Return whether a line of JSON lines has an image, a sound or a video. Raises as `documents` does."""
    return (
        not is_dataset(data)
        and holds_documents(data)
        and any(next(media_in(document.messages), None) is not None for document in documents(data))
    )


def samples_of(
    tokenizer: Any, data: Path, length: int, packing: bool | None, limit: int | None = None
) -> list[torch.Tensor]:
    """Token ids of the first samples, each (1, tokens) int64.

    Args:
        tokenizer: Of transformers.
        data: A text file, JSON lines, or the name of a dataset.
        length: Tokens in a window; of a sample that is not packed, the most.
        packing: Whether windows are cut from all documents, one after another; None: where several documents have
            enough tokens for one window, and always of a text file.
        limit: Most samples; None: all.

    Raises:
        CalibrationError: See `documents`; or there are fewer tokens than one window has, or no document.
        MissingDependencyError: See `documents`.
    """
    one_text = not holds_documents(data)
    if packing is not False and one_text:
        return token_windows(tokenizer, data, length, limit)
    if packing is not False:
        return _windows_or_samples(tokenizer, data, length, packing is None, limit)
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


def _windows_or_samples(
    tokenizer: Any, data: Path, length: int, or_samples: bool, limit: int | None
) -> list[torch.Tensor]:
    """The windows of several documents; with `or_samples` each document, where all have fewer tokens than a window."""
    texts: Iterable[list[int]] = (document.token_ids(tokenizer) for document in documents(data))
    if or_samples:
        # No more is read than tells whether there is a window.
        texts, read, tokens = iter(texts), list[list[int]](), 0
        while tokens < length and (ids := next(texts, None)) is not None:
            read.append(ids)
            tokens += len(ids)
        if 0 < tokens < length:
            logger.info("%s has %d tokens, less than a window of %d: each document is a sample.", data, tokens, length)
            return [torch.tensor([ids]) for ids in read if ids][:limit]
        texts = itertools.chain(read, texts)
    return packed(texts, str(data), length, limit, first=first_tokens(tokenizer))


def lines_of(data: Path) -> Iterator[Document]:
    """The lines of a text file that are not empty, or the documents of what holds several."""
    if holds_documents(data):
        yield from documents(data)
        return
    for number, line in enumerate(read_text(data).splitlines(), 1):
        if line.strip():
            yield Document(line.strip(), f"{data}, line {number},")


def packed(
    token_ids: Iterable[list[int]],
    name: str,
    length: int,
    limit: int | None = None,
    longest: int | None = None,
    first: Sequence[int] = (),
) -> list[torch.Tensor]:
    """The first windows of documents put one after another, each (1, length) int64.

    Args:
        token_ids: Of each document.
        name: Of the data, for errors.
        length: Tokens in a window.
        limit: Most windows; None: all.
        longest: Documents of more tokens are left out; None: none are.
        first: What each window begins with, if the first document does.

    Raises:
        CalibrationError: There are fewer tokens than one window has.
    """
    kept: list[int] = []
    for ids in token_ids:
        if longest is None or len(ids) <= longest:
            kept += ids
        if limit is not None and len(kept) >= limit * length:
            break
    # A chat template may write no BOS, where the tokenizer puts one before other texts.
    return windows_of(kept, name, length, limit, first if kept[: len(first)] == [*first] else ())


def _document(row: Any, place: str, column: str | None = None) -> Document:
    """The document of a line or a row. Raises CalibrationError for one that is none."""
    name, reply = _columns(row, place, column)
    content = _content(row[name], name, place)
    beside = {key: row[key] for key in BESIDE if row.get(key) is not None}
    if isinstance(more := row.get("chat_template_kwargs"), Mapping):
        beside |= more
    if reply is None:
        return Document(content, place, beside)
    if row.get("choices") is not None:
        choices, right = _choices(row, reply, place)
        return Document(content, place, beside, right, reply in REPLIES[1:], choices)
    answer = _content(row[reply], reply, place)
    if isinstance(content, str) != isinstance(answer, str):
        raise CalibrationError(f"{place} {name!r} and {reply!r} are a text and messages; both have to be one of them.")
    return Document(content, place, beside, answer, reply in REPLIES[1:])


def _choices(row: Mapping[str, Any], reply: str, place: str) -> tuple[tuple[str, ...], str]:
    """The choices of a row, and the right one. Raises CalibrationError for choices or an answer that are none."""
    choices, right = row["choices"], row[reply]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise CalibrationError(f"{place} 'choices' is no list of two texts or more.")
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(choices):
        return tuple(choices), choices[right]
    if right not in choices:
        raise CalibrationError(
            f"{place} {reply!r} is {right!r:.60}. Possible: an index from 0 to {len(choices) - 1}, or a choice."
        )
    return tuple(choices), right


def _columns(row: Any, place: str, column: str | None) -> tuple[str, str | None]:
    """Where a row holds its text or conversation, and what follows it; raises CalibrationError as `_document` does."""
    present = [name for name in row if row[name] is not None] if isinstance(row, Mapping) else []
    reply = next((name for name in REPLIES if name in present), None)
    found = [name for name in ([column] if column else COLUMNS) if name in present]
    if reply is not None and found in (["prompt"], ["messages", "prompt"]) and not column:
        return "prompt", reply
    if len(found) == 1 and (column or found != ["prompt"]):
        return found[0], None
    raise _no_document(row, place, column)


def _no_document(row: Any, place: str, column: str | None) -> CalibrationError:
    """The error for a row that holds no document: what it has, and what is needed."""
    came = f"has {', '.join(map(str, row))[:200] or 'nothing'}" if isinstance(row, Mapping) else "is no object"
    others, after = (" or ".join(map(repr, names)) for names in (COLUMNS[:-1], REPLIES))
    wanted = repr(column) if column else f"{others}, one of them, or 'prompt' with {after}"
    return CalibrationError(f"{place} {came}; needed is {wanted}.")


def _content(value: Any, name: str, place: str) -> str | Sequence[Any]:
    """A text, or messages. Raises CalibrationError for what is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value):
        if all("role" in m for m in value):
            return value
        if all("from" in m and "value" in m for m in value):
            return [{"role": TURNS.get(str(m["from"]), m["from"]), "content": m["value"]} for m in value]
    raise CalibrationError(f"{place} {name!r} is neither text nor a list of messages with role and content.")


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
        document = _document(row, place, column or None)
        if document.content:
            yield document
