"""BPE as sentencepiece has it: tokenizer.ggml.model "llama", and a score for each token.

Of all neighbours that are a token together, llama.cpp merges those with the highest score, the first of equal ones. So
scores stand for merges where tokens of earlier merges have the higher score, and each way to cut a token in two tokens
is a merge.
"""

from __future__ import annotations

import re
from typing import Any

from quark.gguf.vocabularies.byte_level import merges_of
from quark.gguf.vocabularies.description import Vocabulary
from quark.gguf.vocabularies.sentencepiece import spaces_of

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_sentencepiece_bpe(writer: Any, vocabulary: Vocabulary) -> None:
    """Add scores. Raises NotSupportedError where they cannot stand for the merges."""
    spaces = spaces_of(vocabulary)
    if spaces.charsmap or spaces.merged:
        raise vocabulary.refusal("it normalizes text, and llama.cpp does not for BPE of sentencepiece")
    if len([token for token in vocabulary.tokens if BYTE.fullmatch(token)]) < 256:
        raise vocabulary.refusal(
            "not each byte has a token (<0x00> to <0xFF>), and llama.cpp has no unknown token here"
        )
    scores = _scores(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, 0.0) for token in vocabulary.tokens])
    writer.add_add_space_prefix(spaces.prefix)


def _scores(vocabulary: Vocabulary) -> dict[str, float]:
    """Merged token -> its score, minus the rank of its first merge."""
    merges = merges_of(vocabulary.model)
    scores: dict[str, float] = {}
    last = None
    for rank, (left, right) in enumerate(merges, 1):
        token = left + right
        if token in scores and token != last:
            raise vocabulary.refusal(f"merges to {token!r} stand before and after others, and it can have one score")
        scores.setdefault(token, -float(rank))
        last = token
    pairs, pieces = set(merges), vocabulary.model["vocab"].keys()
    added = {token["content"] for token in vocabulary.described["added_tokens"]}
    for token in pieces - added:
        if BYTE.fullmatch(token):
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair not in pairs and pair[0] in pieces and pair[1] in pieces:
                raise vocabulary.refusal(f"{pair[0]!r} and {pair[1]!r} do not merge, to llama.cpp they do")
    return scores
