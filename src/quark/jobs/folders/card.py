"""The figures of a model card: those of held-out data, which no scale and no algorithm has seen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from quark.base.files import check_file
from quark.errors import ConfigError, visible
from quark.goals.efforts import DEFAULT_TEXT, HELD_OUT_TEXT

if TYPE_CHECKING:
    from quark.jobs.folders.compared.measure import FolderComparison, MeasuredFolders
    from quark.torch.writers.model_card import Figures

_OF_PACKAGE = {
    DEFAULT_TEXT: "text of the package openquark",
    HELD_OUT_TEXT: "held-out text of the package openquark",
}
"""The names of texts of the package in a card."""
KINDS = {".json": "json", ".jsonl": "json", ".npz": "numpy"}
"""Suffix of data -> their type in a model-index; of others "text", and of folders "folder"."""
_WRITES_TEXT = "text-generation"
"""The task of a model that is measured by what it says of a next token."""


def check_card(quantized: Path) -> None:
    """Find what would keep figures out of the card of a quantized folder.

    Args:
        quantized: The folder.

    Raises:
        ConfigError: It is a file.
        FormatError: It has no card, or one that cannot be read.
        OutputError: The card cannot be written.
    """
    from quark.torch.writers.model_card import CARD, read_card  # imports torch

    if quantized.is_file():
        raise ConfigError(f"--card: {quantized} is a file, which has no model card. Possible: a folder, or no --card.")
    read_card(quantized)
    check_file(quantized / CARD, overwrite=True)


def figures_of(measured: MeasuredFolders, data: Path, length: int) -> Figures:
    """The figures of a measurement, for the card.

    Args:
        measured: What was measured.
        data: The held-out data.
        length: Tokens in a window.
    """
    return figures_from(measured.comparison, len(measured.batches), data, length)


def figures_from(comparison: FolderComparison, samples: int, data: Path, length: int) -> Figures:
    """The figures of running both models on held-out data, for the card.

    Args:
        comparison: What it showed.
        samples: How many were run.
        data, length: As for `figures_of`.
    """
    from quark.torch.writers.model_card import Figures

    metrics: list[tuple[str, str, float]] = []
    lines: dict[str, str] = {}
    if comparison.perplexity is not None:
        before, after = comparison.perplexity
        metrics.append(("perplexity", "Perplexity", after))
        lines["Perplexity, float and quantized"] = f"{before:.3f}, {after:.3f} ({after / before - 1:+.2%})"
    if comparison.kl is not None:
        metrics.append(
            ("kl_divergence", "Mean KL divergence of a next token from the float model, nats", comparison.kl)
        )
        lines["Mean KL divergence of a next token"] = f"{comparison.kl:.4g} nats"
    for name, output in comparison.outputs.items():
        sqnr = output.comparison.sqnr
        metrics.append((f"sqnr_{name}", f"SQNR of {name} to the float model, dB", sqnr))
        lines[f"SQNR of {name}"] = f"{sqnr:.2f} dB"
    text = comparison.perplexity is not None
    return Figures(
        _OF_PACKAGE.get(data, visible(data.name)),
        KINDS.get(data.suffix, "folder" if data.is_dir() else "text"),
        {"samples": samples, **({"tokens": length} if text else {})},
        _WRITES_TEXT if text else None,
        [(kind, name, float(f"{value:.6g}")) for kind, name, value in metrics if math.isfinite(value)],
        lines,
    )
