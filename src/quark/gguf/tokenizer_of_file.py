"""The tokenizer of a GGUF file as the files of a model folder: the way back from tokenizer.py and vocabularies/.

Text becomes the tokens that llama.cpp makes of it: rules that split text by their names, merges of sentencepiece by the
scores of what they make. What a file does not say has the value that llama.cpp (llama-vocab.cpp) takes then.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import FormatError, NotSupportedError
from quark.gguf.tokenizer import PARTS, PHI_3, PHI_3_NOT, STRIPS
from quark.gguf.vocabularies.byte_level import GPT2, PRE_TOKENIZERS, PreTokenizer
from quark.gguf.vocabularies.sentencepiece import SPACE
from quark.gguf.vocabularies.sentencepiece_bpe import BYTE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Kinds of tokens (gguf.TokenType)."""
OTHER_NAMES = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "dbrx": ("smaug-bpe", "chatglm-bpe", "glm4"),
    "gpt-2": ("phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum"),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    "qwen2": ("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
    "gpt-4o": ("llama4", "minimax-m2"),
    "deepseek-v3": ("hunyuan-dense",),
}
"""Name in `PRE_TOKENIZERS` -> other names by which llama.cpp splits the same way."""
_BEGIN = ("llama-bpe", "tekken")
"""Rules under which texts begin with a token where a file does not say whether."""
_FILLED = re.compile(r"\[PAD\d+\]")
"""Tokens that fill up a vocabulary, and stand in no text."""


@dataclass(frozen=True)
class StoredVocabulary:
    """The tokens of a file.

    Attributes:
        values: Key without "tokenizer.ggml." -> value.
        tokens, kinds: By id.
        name: Of the model.
    """

    values: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    name: str

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id, without those that fill up. Raises FormatError where two are one."""
        ids = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if not (kind == UNUSED and _FILLED.fullmatch(token))
        }
        left = sum(
            kind == UNUSED and bool(_FILLED.fullmatch(t)) for t, kind in zip(self.tokens, self.kinds, strict=True)
        )
        if len(ids) + left != len(self.tokens):
            raise FormatError("It lists a token twice.")
        return ids

    def scores(self) -> list[float]:
        """The score of each token. Raises FormatError where there are others than tokens."""
        scores = self.values.get("scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise FormatError("It has no score for each of its tokens.")
        return [float(score) for score in scores]

    def special(self, key: str) -> str | None:
        """The token that a file has for something; None where it has none. Raises FormatError for an id of none."""
        index = self.values.get(f"{key}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise FormatError(f"tokenizer.ggml.{key}_token_id is {index!r}, of {len(self.tokens)} tokens.")
        return self.tokens[index]


def _vocabulary_of(reader: Any) -> StoredVocabulary:
    """Read the tokens of a file. Raises FormatError where there are no tokens, or too few kinds."""
    start = "tokenizer.ggml."
    values = {key.removeprefix(start): f.contents() for key, f in reader.fields.items() if key.startswith(start)}
    tokens, name = values.pop("tokens", None), reader.get_field("general.name")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise FormatError("It has no tokens.")
    kinds = values.get("token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise FormatError("It does not say of each of its tokens of which kind it is.")
    return StoredVocabulary(values, tokens, kinds, "" if name is None else str(name.contents()))


def write_tokenizer_files(reader: Any, folder: Path, rows: int, longest: int | None) -> None:
    """Write the tokenizer of a file into a folder.

    Args:
        reader: Of the file.
        folder: Where.
        rows: Of the embedding: there are no more tokens.
        longest: Tokens of the longest text; None: there is no longest.

    Raises:
        FormatError: The vocabulary contradicts itself.
        NotSupportedError: A kind of vocabulary, or a rule that splits text, that is not known.
    """
    from tokenizers import Tokenizer  # with transformers: imported when a file is really read
    from transformers import PreTrainedTokenizerFast

    vocabulary = _vocabulary_of(reader)
    if len(vocabulary.tokens) > rows:
        raise FormatError(f"Its tokenizer has {len(vocabulary.tokens)} tokens; its embedding has {rows} rows.")
    kind = str(vocabulary.values.get("model"))
    if kind not in KINDS:
        raise NotSupportedError(
            f"tokenizer.ggml.model is {kind!r}, a vocabulary that is not read. Possible: {', '.join(KINDS)}."
        )
    described = KINDS[kind](vocabulary)
    begins = described.pop("begins")
    described |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(vocabulary)}
    described["post_processor"] = _frame(vocabulary, begins)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # noqa: BLE001 - of a library in another language, for any contradiction
        raise FormatError(f"Its vocabulary is none: {error}.") from None
    for token, index in vocabulary.ids.items():
        if tokenizer.token_to_id(token) != index:
            raise FormatError(f"Its token {token!r:.60} cannot have the id {index} beside the others.")
    named = {f"{parts[0]}_token": vocabulary.special(KEYS.get(key, key)) for key, parts in PARTS.items()}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    wrapped.model_max_length = longest or wrapped.model_max_length
    wrapped.chat_template = _templates(reader)
    wrapped.save_pretrained(folder)


KEYS = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Special token -> what its key is called in a file, where that is another word."""


def _added(vocabulary: StoredVocabulary) -> list[dict[str, Any]]:
    """The tokens that are looked for in a text before it is split, as `tokenizer.json` has them."""
    strips = STRIPS.search(vocabulary.name) is not None and {PHI_3, *PHI_3_NOT} <= set(vocabulary.tokens)
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            special = kind != USER_DEFINED
            rstrip = strips and (special or token == PHI_3) and token not in PHI_3_NOT
            flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False, "special": special}
            added.append({"id": index, "content": token, **flags})
    return added


def _frame(vocabulary: StoredVocabulary, begins: bool) -> dict[str, Any] | None:
    """The step that puts tokens before and after texts, as `tokenizer.json` has it; None where there are none.

    Args:
        vocabulary: Of the file.
        begins: Whether a token comes first where the file does not say it.
    """
    asked = {"bos": vocabulary.values.get("add_bos_token", begins), "eos": vocabulary.values.get("add_eos_token")}
    tokens = {key: token for key, adds in asked.items() if adds and (token := vocabulary.special(key)) is not None}
    if not tokens:
        return None

    def around(text: str, kind: int) -> list[dict[str, Any]]:
        inner: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": kind}}]
        before, after = (
            [{"SpecialToken": {"id": tokens[key], "type_id": kind}}] if key in tokens else [] for key in ("bos", "eos")
        )
        return [*before, *inner, *after]

    ids = {token: vocabulary.tokens.index(token) for token in tokens.values()}
    special = {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in ids.items()}
    pair = [*around("A", 0), *around("B", 1)]
    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": special}


def _templates(reader: Any) -> str | dict[str, str] | None:
    """The templates of chats: the one that there is, or several by name."""
    start = "tokenizer.chat_template"
    found = {
        key.removeprefix(start).lstrip(".") or "default": str(field.contents())
        for key, field in reader.fields.items()
        if key == start or key.startswith(f"{start}.")
    }
    return found["default"] if [*found] == ["default"] else found or None


# Kinds of vocabularies. ---------------------------------------------------------------------------------------------


def _byte_level(vocabulary: StoredVocabulary) -> dict[str, Any]:
    rule = _rule(vocabulary)
    model = {
        "type": "BPE",
        "vocab": vocabulary.ids,
        "merges": _merges(vocabulary),
        "ignore_merges": rule.ignore_merges,
        "byte_fallback": False,
        "fuse_unk": False,
    }
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in rule.expressions
        if expression != GPT2
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(last | {"use_regex": GPT2 in rule.expressions})
    return {
        "model": model,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": last | {"add_prefix_space": True, "use_regex": True},
        "begins": rule.name in _BEGIN,
    }


def _rule(vocabulary: StoredVocabulary) -> PreTokenizer:
    """How text is split. Raises NotSupportedError for a name that is not known, or none."""
    name = vocabulary.values.get("pre")
    known = {other: rule for rule, others in OTHER_NAMES.items() for other in (rule, *others)}
    rules = {rule.name: rule for rule in PRE_TOKENIZERS}
    found = rules.get(known.get(str(name), str(name)))
    if found is None:
        raise NotSupportedError(
            f"tokenizer.ggml.pre is {name!r}, a rule that splits text and is not known. Possible: "
            f"{', '.join(sorted({*rules, *known}))}."
        )
    return found


def _merges(vocabulary: StoredVocabulary) -> list[tuple[str, str]]:
    """The pairs that merge, the first of them first. Raises FormatError for what is none."""
    merges = vocabulary.values.get("merges")
    if not isinstance(merges, list):
        raise FormatError("It has no merges.")
    pairs = []
    for merge in merges:
        left, space, right = str(merge)[:1], *str(merge)[1:].partition(" ")[1:]
        left += str(merge)[1:].partition(" ")[0]
        if not space or not right:
            raise FormatError(f"Its merge {merge!r:.60} is not one of two tokens.")
        pairs.append((left, right))
    return pairs


def _sentencepiece_bpe(vocabulary: StoredVocabulary) -> dict[str, Any]:
    scores, ids = vocabulary.scores(), vocabulary.ids
    pieces = {
        token: scores[index]
        for token, index in ids.items()
        if vocabulary.kinds[index] == NORMAL and not BYTE.fullmatch(token)
    }
    merges = [
        (score, ids[token], token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1], ids[merge[2]], ids[merge[3]]))
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == UNKNOWN), None)
    prefix = vocabulary.values.get("add_space_prefix", True)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, escape] if prefix else [escape]
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [merge[2:] for merge in merges],
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*back, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
        },
        "begins": True,
    }


def _unigram(vocabulary: StoredVocabulary) -> dict[str, Any]:
    if len(vocabulary.ids) != len(vocabulary.tokens):
        filled = next(index for index, token in enumerate(vocabulary.tokens) if token not in vocabulary.ids)
        tokens = vocabulary.tokens[:filled]  # those that fill up come last
    else:
        tokens = vocabulary.tokens
    charsmap = vocabulary.values.get("precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if charsmap:
        coded = base64.b64encode(bytes(charsmap)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": coded})
    if vocabulary.values.get("remove_extra_whitespaces"):
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE})
    prefix = "always" if vocabulary.values.get("add_space_prefix", True) else "never"
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prefix, "split": False}
    unknown = vocabulary.special("unknown")
    return {
        "model": {
            "type": "Unigram",
            "vocab": [*zip(tokens, vocabulary.scores(), strict=False)],
            "unk_id": None if unknown is None else vocabulary.tokens.index(unknown),
            "byte_fallback": False,
        },
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "begins": False,
    }


KINDS: Mapping[str, Callable[[StoredVocabulary], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece_bpe,
    "t5": _unigram,
}
"""tokenizer.ggml.model -> the parts of a `tokenizer.json`, and under "begins" whether texts begin with a token."""
