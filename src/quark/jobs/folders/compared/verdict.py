"""The verdict on a quantized model: figures of it and of the float model on the same data, and a word for them.

    word                                           unnoticeable    small    noticeable    large    ruined
    mean KL divergence of a next token, nats        up to 0.02      0.1        0.4         1        above
    other models: SQNR of the worst output, dB      from 25         18         12          8        below

The bounds are those at which the accuracy of a real model on tasks moves; `docs/reference/verdict.md` has the tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quark.errors import ConfigError, DamageError

if TYPE_CHECKING:
    from quark.jobs.folders.compared.measure import FolderComparison

WORDS = UNNOTICEABLE, SMALL, NOTICEABLE, LARGE, RUINED = "unnoticeable", "small", "noticeable", "large", "ruined"
KL_BOUNDS = (0.02, 0.1, 0.4, 1.0)
"""Nats, the largest of each word but the last."""
SQNR_BOUNDS = (25.0, 18.0, 12.0, 8.0)
"""dB, the smallest of each word but the last."""


def word_of_kl(kl: float) -> str:
    """The word for a mean KL divergence in nats; NaN is the last one."""
    return next((word for word, bound in zip(WORDS, KL_BOUNDS, strict=False) if kl <= bound), RUINED)


def word_of_sqnr(sqnr: float) -> str:
    """The word for an SQNR in dB; NaN is the last one."""
    return next((word for word, bound in zip(WORDS, SQNR_BOUNDS, strict=False) if sqnr >= bound), RUINED)


@dataclass(frozen=True)
class ModelVerdict:
    """The cost of a quantization, in figures and a word.

    Attributes:
        kl: Mean KL divergence of the next token from the float model, in nats; None of other models.
        perplexity: Of the float and of the quantized model; None of other models.
        agreement: Share of rows of logits whose largest is the same; None without logits.
        sqnr: Of the worst output, in dB.
        data: On which data, in words.
        held_out: Whether nothing that made the model has read them.
        seconds: What it took.
        comparison: What both models gave.
        path: Of the data.
        samples: How many of them.
    """

    kl: float | None
    perplexity: tuple[float, float] | None
    agreement: float | None
    sqnr: float
    data: str = ""
    held_out: bool = True
    seconds: float = 0.0
    comparison: FolderComparison | None = field(default=None, repr=False, compare=False)
    path: Path | None = None
    samples: int = 0

    @classmethod
    def of(cls, comparison: FolderComparison, **rest: Any) -> ModelVerdict:
        """The verdict on what running both models showed; `rest` are other attributes."""
        outputs = comparison.outputs.values()
        rows = [(output.agreed, output.rows) for output in outputs if output.rows]
        agreement = sum(agreed for agreed, _ in rows) / sum(count for _, count in rows) if rows else None
        sqnr = min((output.comparison.sqnr for output in outputs), default=math.nan)
        return cls(comparison.kl, comparison.perplexity, agreement, sqnr, comparison=comparison, **rest)

    @property
    def word(self) -> str:
        """One of WORDS."""
        return word_of_sqnr(self.sqnr) if self.kl is None else word_of_kl(self.kl)

    @property
    def is_good(self) -> bool:
        """True where there is nothing to be done."""
        return self.word in (UNNOTICEABLE, SMALL)

    @property
    def measured(self) -> str:
        """The figures in words."""
        parts = [f"KL divergence {self.kl:.3g} nats"] if self.kl is not None else [f"SQNR {self.sqnr:.1f} dB"]
        if self.perplexity is not None:
            before, after = self.perplexity
            change = round(after / before - 1, 3) + 0.0  # no minus before zero
            parts.append(f"perplexity {before:.2f} -> {after:.2f} ({change:+.1%})")
        if self.agreement is not None:
            parts.append(f"{self.agreement:.1%} same first choices")
        return ", ".join(parts)

    def __str__(self) -> str:
        time = f", in {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.word} loss: {self.measured}; on {self.data}{time}."


class Bounded(Protocol):
    """A request with bounds on what a quantization may cost; see `FolderRequest`."""

    @property
    def max_kl(self) -> float | None: ...

    @property
    def max_perplexity(self) -> float | None: ...

    @property
    def min_agreement(self) -> float | None: ...


@dataclass(frozen=True)
class Gates:
    """Bounds on the cost of a quantization.

    Attributes:
        kl: Largest mean KL divergence of the next token, in nats; None: any. Of what follows likewise.
        perplexity: Largest rise, in percent.
        agreement: Smallest share of equal first choices, in percent.
    """

    kl: float | None = None
    perplexity: float | None = None
    agreement: float | None = None

    @classmethod
    def of(cls, request: Bounded) -> Gates:
        """Read a request, in which an agreement up to 1 is a share. Raises ConfigError for a share of more than all."""
        agreement = request.min_agreement
        if agreement is not None and agreement > 100:
            raise ConfigError(f"--min-agreement {agreement:g} is no share. Possible: 0.9, or 90 for 90 %.")
        percent = None if agreement is None else agreement * (100 if agreement <= 1 else 1)
        return cls(request.max_kl, request.max_perplexity, percent)

    def __bool__(self) -> bool:
        return self != Gates()

    def require(self, gives_tokens: bool, name: str) -> None:
        """Raise ConfigError for bounds on what a model does not give.

        Args:
            gives_tokens: Whether it gives the next token.
            name: Of its class.
        """
        if self and not gives_tokens:
            raise ConfigError(
                f"--max-kl, --max-perplexity and --min-agreement are for causal language models, and {name} is none. "
                "Possible: none of them, and `quark evaluate`, which shows how near its outputs are."
            )

    def broken(self, kl: float | None, perplexity: tuple[float, float] | None, agreement: float | None) -> str:
        """List the bounds that figures are outside of, in words; empty where there are none. NaN is outside of each.

        Args:
            kl, perplexity, agreement: As in `ModelVerdict`.
        """
        rise = None if perplexity is None else 100 * (perplexity[1] / perplexity[0] - 1)
        rows = (
            ("--max-kl", self.kl, kl, 1, "nats"),
            ("--max-perplexity", self.perplexity, rise, 1, "%"),
            ("--min-agreement", self.agreement, None if agreement is None else 100 * agreement, -1, "%"),
        )
        return ", ".join(
            f"{flag} {bound:g} ({value:.4g} {unit})"
            for flag, bound, value, sign, unit in rows
            if bound is not None and value is not None and not sign * value <= sign * bound
        )

    def check(self, verdict: ModelVerdict, then: str = "Nothing was written. Possible: --keep-anyway.") -> None:
        """Raise DamageError where a model is outside of what is allowed.

        Args:
            verdict: On the model.
            then: What became of it.
        """
        if broken := self.broken(verdict.kl, verdict.perplexity, verdict.agreement):
            raise DamageError(
                f"The quantized model is outside of {broken}: {verdict.measured}, on {verdict.data}. {then}".strip()
            )
