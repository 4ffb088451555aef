"""Unigram: tokenizer.ggml.model "t5", the logarithm of each token's probability, and a table of characters.

The tokens of a text are those with the greatest sum. A character without a token costs 10 more than the rarest.
"""

from __future__ import annotations

from typing import Any

from quark.gguf.vocabularies.description import Vocabulary
from quark.gguf.vocabularies.sentencepiece import spaces_of


def add_unigram(writer: Any, vocabulary: Vocabulary) -> None:
    """Add scores, the table of characters, and what happens to spaces.

    Scores are float32, as in sentencepiece. Raises NotSupportedError for steps that llama.cpp does not have.
    """
    model, spaces = vocabulary.model, spaces_of(vocabulary)
    if model.get("byte_fallback"):
        raise vocabulary.refusal("unknown characters become bytes, which llama.cpp does for BPE only")
    if model.get("unk_id") is None:
        raise vocabulary.refusal("it has no unknown token, which llama.cpp needs for this kind")
    scores = {token: float(score) for token, score in model["vocab"]}
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, 0.0) for token in vocabulary.tokens])
    writer.add_add_space_prefix(spaces.prefix)
    writer.add_remove_extra_whitespaces(spaces.merged)
    if spaces.charsmap:
        writer.add_precompiled_charsmap(spaces.charsmap)
