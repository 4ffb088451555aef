"""A tokenizer as `tokenizer.json` describes it, and its tokens as a GGUF file lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark.errors import NotSupportedError


@dataclass(frozen=True)
class Vocabulary:
    """All tokens by id.

    Attributes:
        described: The contents of `tokenizer.json`.
        tokens: The token of each row of the embedding.
        kinds: gguf.TokenType of each token.
        folder: Where it comes from, for messages.
    """

    described: dict[str, Any]
    tokens: list[str]
    kinds: list[int]
    folder: str

    @property
    def model(self) -> dict[str, Any]:
        """Its algorithm: type, vocabulary, merges."""
        model: dict[str, Any] = self.described["model"]
        return model

    def steps(self, part: str, entries: str) -> list[dict[str, Any]]:
        """The steps of a normalizer or pre-tokenizer in order, sequences opened."""
        return _opened(self.described.get(part), entries)

    def refusal(self, reason: str) -> NotSupportedError:
        """The error that says what readers of GGUF cannot do of this tokenizer."""
        return NotSupportedError(f"{self.folder}: no GGUF file can hold this tokenizer: {reason}.")


def _opened(step: dict[str, Any] | None, entries: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for entry in step[entries] for inner in _opened(entry, entries)]
