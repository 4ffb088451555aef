"""The ratios of the last release, in ratios.json beside this file, and what is worse now.

Only ratios: seconds say as much about a machine as about a program, and are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import FIGURES, Figure

FILE = Path(__file__).parent / "ratios.json"
TOLERANCE = 1.05


@dataclass(frozen=True)
class Worse:
    """A figure that has grown.

    Attributes:
        figure: Which one.
        now: Its value; infinite where its case failed.
        before: Its value at the last release.
    """

    figure: Figure
    now: float
    before: float


def load(file: Path = FILE) -> dict[str, float]:
    """Key -> ratio; empty before the first release."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def store(figures: Sequence[Figure], results: Mapping[str, dict[str, Any] | None], file: Path = FILE) -> None:
    """Keep the ratios of some figures; those of others stay, and those that no longer exist go."""
    found = {figure.key: figure.value(results[figure.case]) for figure in figures if figure.is_ratio}
    ratios = load(file) | {key: float(f"{value:.4g}") for key, value in found.items() if value is not None}
    known = {figure.key for figure in FIGURES}
    file.write_text(json.dumps({key: ratios[key] for key in sorted(ratios) if key in known}, indent=1) + "\n")


def worse(
    figures: Sequence[Figure], results: Mapping[str, dict[str, Any] | None], before: Mapping[str, float]
) -> list[Worse]:
    """What has grown by more than TOLERANCE, the worst first."""
    found = []
    for figure in figures:
        if figure.is_ratio and figure.key in before:
            now = figure.value(results[figure.case])
            now = float("inf") if now is None else now
            if now > before[figure.key] * TOLERANCE:
                found.append(Worse(figure, now, before[figure.key]))
    return sorted(found, key=lambda each: each.before / each.now)
