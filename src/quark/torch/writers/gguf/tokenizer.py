"""The tokenizer of a folder as GGUF metadata.

byte-level BPE       tokenizer.ggml.model "gpt2", merges, and the name of the rule that splits text into words
sentencepiece BPE    tokenizer.ggml.model "llama", a score for each token: the earlier its merge, the higher
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from quark.errors import FormatError, NotSupportedError
from quark.torch.model.model_folder import as_format_error

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {rf"{WORDS}|\p{{N}}{{1,3}}|{REST}": "llama-bpe", rf"{WORDS}|\p{{N}}|{REST}": "qwen2"}
"""Regular expression of a pre-tokenizer -> its name in llama.cpp."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def write_tokenizer(writer: Any, folder: str | os.PathLike[str], vocabulary: int) -> None:
    """Add the tokenizer of a folder.

    Args:
        writer: A gguf.GGUFWriter.
        folder: Holds the tokenizer's files.
        vocabulary: Rows of the embedding; tokens that the tokenizer lacks are filled up.

    Raises:
        FormatError: The folder has no tokenizer, or one with more tokens than the model.
        NotSupportedError: A kind of tokenizer that GGUF has no name for.
    """
    tokenizer = _load(folder)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise NotSupportedError(f"{folder}: a {model['type']} tokenizer. Possible in GGUF: BPE, byte-level or not.")
    tokens, kinds = _tokens(tokenizer, described, vocabulary)
    if len(tokens) > vocabulary:
        raise FormatError(f"The tokenizer of {folder} has {len(tokens)} tokens; the model has {vocabulary}.")
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        ranks = {left + right: -float(rank) for rank, (left, right) in reversed(list(enumerate(merges, 1)))}
        writer.add_token_scores([ranks.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(_adds_space(described))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(described.get("pre_tokenizer"), folder))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _write_special(writer, tokenizer)


def _load(folder: str | os.PathLike[str]) -> Any:
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
        else:
            byte = described["model"].get("byte_fallback") and BYTE.fullmatch(token)
            kind = TokenType.BYTE if byte else TokenType.NORMAL
        tokens.append(token)
        kinds.append(int(kind))
    return tokens, kinds


def _split_name(pre: dict[str, Any] | None, folder: str | os.PathLike[str]) -> str:
    """Name of the rule that splits text before the merges."""
    steps = (pre or {}).get("pretokenizers", [pre] if pre else [])
    shape = [step["type"] for step in steps]
    byte_level = bool(steps) and shape[-1] == "ByteLevel"
    if byte_level and shape == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if byte_level and shape == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "starcoder"
    if byte_level and shape == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        name = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if name:
            return name
    known = ", ".join(["gpt-2", "starcoder", *SPLITS.values()])
    raise NotSupportedError(
        f"{folder}: a tokenizer that splits text by {pre} has no name in GGUF here; known: {known}."
    )


def _adds_space(described: dict[str, Any]) -> bool:
    """Whether a sentencepiece tokenizer puts a space before the text."""
    normalizer, pre = json.dumps(described.get("normalizer")), described.get("pre_tokenizer") or {}
    return "Prepend" in normalizer or pre.get("prepend_scheme") in ("first", "always")


def _write_special(writer: Any, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    plain, marked = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    writer.add_add_bos_token(marked[:1] == [tokenizer.bos_token_id] != plain[:1])
    writer.add_add_eos_token(marked[-1:] == [tokenizer.eos_token_id] != plain[-1:])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
