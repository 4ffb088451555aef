"""The tokenizer of a folder as GGUF metadata: its kind of vocabulary, its tokens, special ones, chat templates."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import require_readable_tokenizer
from quark.errors import FormatError, NotSupportedError
from quark.gguf.vocabularies.byte_level import add_byte_level
from quark.gguf.vocabularies.description import Vocabulary
from quark.gguf.vocabularies.sentencepiece_bpe import BYTE, add_sentencepiece_bpe
from quark.gguf.vocabularies.unigram import add_unigram
from quark.gguf.vocabularies.wordpiece import add_wordpiece

ENDS = ("eot", "eom")
"""Keys of tokens that end a text beside `eos`: of a turn, and of a message."""
PARTS = {"bos": ("bos", "cls"), "eos": ("eos",), "unk": ("unk",), "sep": ("sep",), "pad": ("pad",), "mask": ("mask",)}
"""Key in the file -> which special tokens of transformers it may be, the first that is there."""


STRIPS = re.compile("(phi)-?(3)", re.IGNORECASE)
"""Names of models in whose files llama.cpp (llama-vocab.cpp) lets tokens take the spaces after them along: PHI_3."""
PHI_3 = "</s>"
PHI_3_NOT = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""That token and all that are special do, these do not; it loads no such file that lacks one of the four."""


def write_tokenizer(
    writer: Any, folder: str | os.PathLike[str], vocabulary: int, stops: Iterable[int] = (), name: str = ""
) -> None:
    """Add the tokenizer of a folder, and the name of the model.

    Args:
        writer: A gguf.GGUFWriter.
        folder: Holds the tokenizer's files.
        vocabulary: Rows of the embedding; tokens that the tokenizer lacks are filled up.
        stops: Tokens that end a generated text; those beside the tokenizer's own go into the file too.
        name: Of the model.

    Raises:
        FormatError: The folder has no tokenizer, or one with more tokens than the model.
        NotSupportedError: A tokenizer that readers of GGUF would read as another one.
    """
    tokenizer = _load(folder)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, kinds = _tokens(tokenizer, described, vocabulary)
    if len(tokens) > vocabulary:
        raise FormatError(f"The tokenizer of {folder} has {len(tokens)} tokens; the model has {vocabulary}.")
    found = Vocabulary(described, tokens, kinds, str(folder))
    if fitting := _fitting_name(found, name):
        writer.add_name(fitting)
    writer.add_token_list(_add_kind(writer, found))
    writer.add_token_types(kinds)
    _write_special(writer, tokenizer, found, list(stops))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _load(folder: str | os.PathLike[str]) -> Any:
    require_readable_tokenizer(folder)
    from transformers import AutoTokenizer  # costs seconds: imported when a file is really written

    with as_format_error(Path(folder), "holds no tokenizer that transformers loads"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise NotSupportedError(f"{folder}: {type(tokenizer).__name__} has no tokenizer.json to read from.")
    return tokenizer


def _tokens(tokenizer: Any, described: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """All tokens by id, and the kind of each."""
    from gguf import TokenType

    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in described["added_tokens"]}
    tokens, kinds = [], []
    for index in range(max(vocabulary, max(by_id) + 1)):
        token = by_id.get(index)
        if token is None:
            token, kind = f"[PAD{index}]", TokenType.UNUSED
        elif index in added:
            kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        elif described["model"].get("byte_fallback") and BYTE.fullmatch(token):
            kind = TokenType.BYTE
        else:
            unknown = described["model"].get("unk_token"), described["model"].get("unk_id")
            kind = TokenType.UNKNOWN if token == unknown[0] or index == unknown[1] else TokenType.NORMAL
        tokens.append(token)
        kinds.append(int(kind))
    return tokens, kinds


def _fitting_name(vocabulary: Vocabulary, name: str) -> str:
    """The name, spelled so that llama.cpp strips spaces where this tokenizer does: GGUF has no other place to say it.

    Raises:
        NotSupportedError: Other tokens take spaces around them along, or stand at words only.
    """
    from gguf import TokenType

    added = vocabulary.described["added_tokens"]
    stripping = {entry["content"] for entry in added if entry["rstrip"]}
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    special = {token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in kinds}
    fits = {PHI_3, *PHI_3_NOT} <= set(vocabulary.tokens) and stripping == (special | {PHI_3}) - PHI_3_NOT
    for entry in added:
        for flag in ("lstrip", "single_word", *(() if fits else ("rstrip",))):
            if entry[flag]:
                raise vocabulary.refusal(f"its token {entry['content']!r} has {flag}, for which there is no place")
    if fits:
        return name if STRIPS.search(name) else f"{name} (phi-3)".lstrip()
    return STRIPS.sub(r"\1 \2", name)


def _add_kind(writer: Any, vocabulary: Vocabulary) -> list[str]:
    """Add what the kind of vocabulary needs; returns the tokens as that kind spells them."""
    kind = vocabulary.model["type"]
    steps = [step["type"] for step in vocabulary.steps("pre_tokenizer", "pretokenizers")]
    if kind == "WordPiece":
        return add_wordpiece(writer, vocabulary)
    if kind == "Unigram":
        add_unigram(writer, vocabulary)
    elif kind == "BPE" and "ByteLevel" in steps:
        add_byte_level(writer, vocabulary)
    elif kind == "BPE":
        add_sentencepiece_bpe(writer, vocabulary)
    else:
        raise vocabulary.refusal(f"it is a {kind} tokenizer; possible: BPE, Unigram, WordPiece")
    return vocabulary.tokens


def _write_special(writer: Any, tokenizer: Any, vocabulary: Vocabulary, stops: list[int]) -> None:
    before, after = _frame(tokenizer, vocabulary)
    wordpiece = vocabulary.model["type"] == "WordPiece"
    ids = _special_ids(tokenizer)
    ids |= {"bos": before[0]} if before else {}
    if ids["eos"] is None and not wordpiece:
        ids["eos"] = next(iter([*after, *stops]), None)
    _refuse_ends(vocabulary, ids, before, after)
    others = [stop for stop in dict.fromkeys(stops) if stop != ids["eos"]]
    if len(others) > len(ENDS):
        raise vocabulary.refusal(f"{len(others) + 1} tokens end a text, and there is place for {len(ENDS) + 1}")
    for key, index in [*ids.items(), *zip(ENDS, others, strict=False)]:
        if index is not None:
            getattr(writer, f"add_{key}_token_id")(index)
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after) and not wordpiece)
    if wordpiece:
        writer.add_add_sep_token(True)


def _special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Key in the file -> the token that transformers has for it; None where it has none."""
    ids: dict[str, int | None] = {}
    for key, names in PARTS.items():
        known = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
        ids[key] = next((index for index in known if index is not None), None)
    return ids


def _refuse_ends(vocabulary: Vocabulary, ids: Mapping[str, int | None], before: list[int], after: list[int]) -> None:
    """Raise NotSupportedError where llama.cpp would begin or end a text with other tokens than the tokenizer does.

    Args:
        vocabulary: Of the tokenizer.
        ids: Key in the file -> token.
        before, after: Special tokens before and after a text.
    """
    kind = vocabulary.model["type"]
    if ids["eos"] is None and kind == "BPE":
        raise vocabulary.refusal("no token ends a text, and llama.cpp then takes a token of its own choice (2 or 11)")
    if after and after[0] != ids["sep" if kind == "WordPiece" else "eos"]:
        raise vocabulary.refusal(f"text ends with token {after[0]}, and GGUF has a place for the last one of all only")
    if kind == "WordPiece" and not (before and after):
        raise vocabulary.refusal("llama.cpp puts text between two special tokens for WordPiece, and this one does not")


def _frame(tokenizer: Any, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text: at most one each."""
    plain, marked = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    for begins in (0, 1):
        after = marked[begins + len(plain) :]
        if marked[begins : begins + len(plain)] == plain and len(after) < 2:
            return marked[:begins], after
    raise vocabulary.refusal(f"text comes between the tokens {marked}, which are more than its first and last one")
