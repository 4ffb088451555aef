"""The ratios of the last release, in ratios.json beside this file, and what is worse now.

Only ratios: seconds say as much about a machine as about a program, and are not stored. A ratio too is one of a kind of
machine: where the processor multiplies tiles of bfloat16 and int8 (AMX), the float side of it is another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import FIGURES, Figure

FILE = Path(__file__).parent / "ratios.json"
KINDS = "AMX", "no AMX"
"""Kinds of machine: with the tiles of AMX, and without."""
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


def kind_of_machine(flags: str | None = None) -> str:
    """One of KINDS.

    Args:
        flags: What the processor can do, in the words of /proc/cpuinfo; None reads that file, which only Linux has.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if flags is None:
        flags = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return KINDS[0] if {"amx_tile", "amx_bf16", "amx_int8"} <= {*flags.split()} else KINDS[1]


def load(file: Path = FILE, kind: str | None = None) -> dict[str, float]:
    """Key -> ratio on a kind of machine, this one by default; empty before the first release on such a machine."""
    return dict(_all(file).get(kind or kind_of_machine(), {}))


def store(figures: Sequence[Figure], results: Mapping[str, dict[str, Any] | None], file: Path = FILE) -> None:
    """Keep the ratios of some figures on this kind of machine; others stay, and those that no longer exist go."""
    found = {figure.key: figure.value(results[figure.case]) for figure in figures if figure.is_ratio}
    measured = {key: float(f"{value:.4g}") for key, value in found.items() if value is not None}
    kept, known, here = _all(file), {figure.key for figure in FIGURES}, kind_of_machine()
    kept[here] = kept.get(here, {}) | measured
    kept = {kind: {key: ratios[key] for key in sorted(ratios) if key in known} for kind, ratios in sorted(kept.items())}
    file.write_text(json.dumps(kept, indent=1) + "\n")


def _all(file: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


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
