"""WordPiece: tokenizer.ggml.model "bert". A word is the longest tokens that it begins with, one after the other.

Where `tokenizer.json` marks tokens that go on with a word (##ing), a GGUF file marks those that begin one (▁run).
"""

from __future__ import annotations

from typing import Any

from quark.gguf.vocabularies.description import Vocabulary
from quark.gguf.vocabularies.sentencepiece import SPACE


def add_wordpiece(writer: Any, vocabulary: Vocabulary) -> list[str]:
    """Add the kind. Raises NotSupportedError for text that is prepared otherwise than by BERT without capitals.

    Returns:
        The tokens as a GGUF file spells them.
    """
    from gguf import TokenType

    steps = vocabulary.steps("normalizer", "normalizers")
    splits = [step["type"] for step in vocabulary.steps("pre_tokenizer", "pretokenizers")]
    if [step["type"] for step in steps] != ["BertNormalizer"] or splits != ["BertPreTokenizer"]:
        raise vocabulary.refusal("llama.cpp normalizes and splits text before WordPiece as BERT does, in no other way")
    (asked,) = steps
    if not asked["lowercase"] or asked["strip_accents"] is False:
        raise vocabulary.refusal("llama.cpp makes letters of WordPiece small and drops accents; this one keeps them")
    if not (asked["clean_text"] and asked["handle_chinese_chars"]):
        raise vocabulary.refusal("llama.cpp drops control characters and parts Chinese ones; this one does not")
    prefix = vocabulary.model["continuing_subword_prefix"]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    return [
        (token.removeprefix(prefix) if token.startswith(prefix) else SPACE + token)
        if kind == TokenType.NORMAL
        else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
