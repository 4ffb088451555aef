"""Byte-level BPE: tokenizer.ggml.model "gpt2", the merges, and the name of the rule that splits text before them.

A rule is a list of regular expressions, each of which cuts what the one before left: matches and what lies between them
are pieces. llama.cpp knows rules by name only; the name is found from the expressions of `tokenizer.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quark.gguf.vocabularies.description import Vocabulary

SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*")
_CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class PreTokenizer:
    """How llama.cpp splits text under a name, and whether a piece that is a token stays whole whatever its merges."""

    name: str
    expressions: tuple[str, ...]
    ignore_merges: bool = False


PRE_TOKENIZERS = (
    PreTokenizer("gpt-2", (GPT2,)),
    PreTokenizer("starcoder", (r"\p{N}", GPT2)),
    PreTokenizer("llama-bpe", (rf"{WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{SPACES}",), ignore_merges=True),
    PreTokenizer("dbrx", (rf"{WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{SPACES}",)),
    PreTokenizer("qwen2", (rf"{WORDS}|\p{{N}}|{_SIGNS}|{SPACES}",)),
    PreTokenizer(
        "qwen35",
        (rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",),
    ),
    PreTokenizer("tekken", (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_SIGNS}|{SPACES}",), ignore_merges=True),
    PreTokenizer(
        "gpt-4o",
        (rf"{_CASED[0]}{SUFFIXES}?|{_CASED[1]}{SUFFIXES}?|\p{{N}}{{1,3}}|{_CASED_SIGNS}|{SPACES}",),
    ),
    PreTokenizer(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ\u30a0-ヿ]+",
            rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
        ),
    ),
    PreTokenizer("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    PreTokenizer("seed-coder", (rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",)),
)
"""From llama.cpp's llama-vocab.cpp, expressions as the `tokenizer.json` files of these models spell them."""
SPELLINGS = (
    ("\r", r"\r"),
    ("\n", r"\n"),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", SUFFIXES),
    (r"'(?i:[sdmt]|ll|ve|re)", SUFFIXES),
    # Nothing that these take could be matched by what follows them, so that giving back changes nothing.
    ("?+", "?"),
    ("++", "+"),
    ("*+", "*"),
    # The spaces before take all but the last line break, whatever follows.
    (r"|\s*[\r\n]|", r"|\s*[\r\n]+|"),
    (r"\p{N}{1}|", r"\p{N}|"),
)
"""Other spellings of parts of an expression that match the same text."""
_COMPLETE = SPACES.rpartition("|")[2]
"""How an expression ends that leaves nothing between its matches."""


def add_byte_level(writer: Any, vocabulary: Vocabulary) -> None:
    """Add the merges and the rule that splits text. Raises NotSupportedError for what llama.cpp has no name for."""
    model = vocabulary.model
    for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(part):
            raise vocabulary.refusal(f"its BPE has a {part.replace('_', ' ')}, which llama.cpp does not know")
    for step in vocabulary.steps("normalizer", "normalizers"):
        # Composed characters are what nearly all text has; llama.cpp leaves others as they are, for all its models.
        if step["type"] != "NFC":
            raise vocabulary.refusal(f"it normalizes text by {step['type']}, and llama.cpp does not for this kind")
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = set(ByteLevel.alphabet()) - model["vocab"].keys()
    if alphabet and model.get("unk_token"):
        raise vocabulary.refusal(f"{len(alphabet)} bytes have no token, and llama.cpp leaves those out")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_rule(vocabulary).name)
    writer.add_token_merges([" ".join(merge) for merge in merges_of(model)])


def merges_of(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs that merge, the first of them first."""
    found = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return [(left, right) for left, right in found]


def _rule(vocabulary: Vocabulary) -> PreTokenizer:
    """The rule that splits as the tokenizer does."""
    found = _expressions(vocabulary)
    rules = [
        rule for rule in PRE_TOKENIZERS if [_canonical(e) for e in rule.expressions] == [_canonical(e) for e in found]
    ]
    if not rules:
        names = ", ".join(rule.name for rule in PRE_TOKENIZERS)
        raise vocabulary.refusal(f"text is split by {found}, which has no name in llama.cpp; known: {names}")
    ignores = bool(vocabulary.model.get("ignore_merges"))
    for rule in rules:
        if rule.ignore_merges == ignores:
            return rule
    lost = _without_merges(vocabulary.described)
    if lost:
        raise vocabulary.refusal(
            f"of {rules[0].name} llama.cpp takes ignore_merges={rules[0].ignore_merges}, here it is {ignores}, "
            f"and merges do not lead to {len(lost)} tokens, such as {lost[0]!r}"
        )
    return rules[0]


def _expressions(vocabulary: Vocabulary) -> list[str]:
    """The regular expressions by which a byte-level tokenizer splits text."""
    *steps, last = vocabulary.steps("pre_tokenizer", "pretokenizers")
    if last["type"] != "ByteLevel" or any(step["type"] == "ByteLevel" for step in steps):
        raise vocabulary.refusal("text is split after it became bytes, which llama.cpp never does")
    if last["add_prefix_space"]:
        raise vocabulary.refusal("a space is put before the text, which llama.cpp does not do for byte-level BPE")
    return [_expression(step, vocabulary) for step in steps] + ([GPT2] if last["use_regex"] else [])


def _expression(step: dict[str, Any], vocabulary: Vocabulary) -> str:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        expression = str(step["pattern"]["Regex"])
        cuts = step["behavior"] == "Isolated" and not step["invert"]
        # Only matches are kept, but there is nothing else.
        keeps = step["behavior"] == "Removed" and step["invert"] and expression.endswith(_COMPLETE)
        if cuts or keeps:
            return expression
    raise vocabulary.refusal(
        f"text is split by {json.dumps(step, ensure_ascii=False)}, for which llama.cpp has no name"
    )


def _canonical(expression: str) -> str:
    for spelling, ours in SPELLINGS:
        expression = expression.replace(spelling, ours)
    return expression


def _without_merges(described: dict[str, Any]) -> list[str]:
    """Tokens that no merges lead to."""
    from tokenizers import Tokenizer

    plain = described | {"model": described["model"] | {"ignore_merges": False}}
    model = Tokenizer.from_str(json.dumps(plain)).model
    added = {token["content"] for token in described["added_tokens"]}
    return [token for token in described["model"]["vocab"] if token not in added and len(model.tokenize(token)) > 1]
