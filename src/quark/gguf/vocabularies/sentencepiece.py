"""The changes of sentencepiece to text before it looks for tokens, read from the steps of a `tokenizer.json`."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from quark.gguf.vocabularies.description import Vocabulary

SPACE = "▁"
WHITESPACE = "\t\n\v\f\r\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
WHITESPACE += "\u202f\u205f\u3000"
"""Spaces of Unicode but the space itself, and U+0085, a control character that no table of sentencepiece has."""


@dataclass(frozen=True)
class Spaces:
    """Attributes:
    charsmap: Table of characters and what they become, in the format of sentencepiece.
    prefix: A space comes before the text.
    merged: Several spaces are one, and there is none at the end.
    words: No token goes on after a space.
    """

    charsmap: bytes = b""
    prefix: bool = False
    merged: bool = False
    words: bool = False


def spaces_of(vocabulary: Vocabulary) -> Spaces:
    """Read the steps. Raises NotSupportedError for one that sentencepiece does not have."""
    steps = vocabulary.steps("normalizer", "normalizers")
    charsmap = b""
    if steps and steps[0]["type"] == "Precompiled":
        charsmap = base64.b64decode(steps.pop(0)["precompiled_charsmap"] or "")
    effects = {_normalizes(step, vocabulary) for step in steps}
    for step in vocabulary.steps("pre_tokenizer", "pretokenizers"):
        effects |= _splits(step, vocabulary)
    if "one space" in effects and "stripped" not in effects:
        raise vocabulary.refusal("spaces become one, but stay at the end of the text")
    if "stripped" in effects and "one space" not in effects:
        raise vocabulary.refusal("spaces are taken from the end of the text alone")
    spaces = Spaces(charsmap, "prefix" in effects, "one space" in effects, "words" in effects)
    if "words by whitespace" in effects:
        _refuse_other_whitespace(vocabulary)
    if spaces.words and not spaces.merged:
        _refuse_inner_spaces(vocabulary)
    return spaces


def _refuse_inner_spaces(vocabulary: Vocabulary) -> None:
    """Raise NotSupportedError for tokens with a space inside, where text is cut into words before."""
    tokens = (entry if isinstance(entry, str) else entry[0] for entry in vocabulary.model["vocab"])
    inner = [token for token in tokens if SPACE in token[1:]]
    if inner:
        raise vocabulary.refusal(f"its {len(inner)} tokens with a space inside, such as {inner[0]!r}, are never used")


def _normalizes(step: dict[str, Any], vocabulary: Vocabulary) -> str:
    kind, pattern, content = step["type"], step.get("pattern", {}), step.get("content")
    if kind == "Prepend" and step["prepend"] == SPACE:
        return "prefix"
    if kind == "Replace" and pattern.get("String", pattern.get("Regex")) == " " and content == SPACE:
        return "escaped"
    if kind == "Replace" and pattern.get("Regex") == " {2,}" and content in (" ", SPACE):
        return "one space"
    if kind == "Strip" and step["strip_right"]:
        return "stripped"
    raise vocabulary.refusal(f"it normalizes text by {step}, and llama.cpp does not for this kind")


def _splits(step: dict[str, Any], vocabulary: Vocabulary) -> set[str]:
    kind = step["type"]
    if kind == "WhitespaceSplit":
        return {"one space", "stripped", "words", "words by whitespace"}
    if kind == "Metaspace" and step["replacement"] == SPACE:
        prefix = {"prefix"} if step.get("prepend_scheme", "always") != "never" else set()
        return prefix | ({"words"} if step.get("split", True) else set())
    if kind == "Split" and step["pattern"] == {"String": " "}:
        return set()  # Spaces have become other characters before: it finds none.
    raise vocabulary.refusal(f"text is split by {step}, for which llama.cpp has no name")


def _refuse_other_whitespace(vocabulary: Vocabulary) -> None:
    """Words end at each character that is a space to Unicode; to llama.cpp only what its table makes a space of is."""
    from tokenizers import Tokenizer

    normalizer = Tokenizer.from_str(json.dumps(vocabulary.described)).normalizer
    left = [c for c in WHITESPACE if normalizer is None or normalizer.normalize_str(f"a{c}b") not in ("a b", "ab")]
    if left:
        raise vocabulary.refusal(f"words end at {', '.join(f'U+{ord(c):04X}' for c in left)}, to llama.cpp they do not")
