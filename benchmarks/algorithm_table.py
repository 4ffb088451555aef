"""The rows of cases/onnx_algorithms.py, ours beside the peer's."""

from __future__ import annotations

from typing import Any

from rich.table import Table

COLUMNS = ("SQNR before", "after", "CPU s", "MB")


def algorithm_table(ours: dict[str, Any], theirs: dict[str, Any] | None) -> Table:
    """A row for each model, scheme and algorithm; what failed is a dash."""
    sides = [("", ours), *([("peer: ", theirs)] if theirs else [])]
    header = [f"{side}{column}" for side, _ in sides for column in COLUMNS]
    table = Table(
        "model", "scheme", "algorithm", *header, title="ONNX algorithms: output SQNR in dB on held-out samples"
    )
    for model, schemes in ours.items():
        for scheme, rows in schemes.items() if isinstance(schemes, dict) else ():
            for algorithm in rows:
                found = [result.get(model, {}).get(scheme, {}) for _, result in sides]
                cells = [cell for rows in found for cell in _cells(rows, algorithm)]
                if algorithm != "none":
                    table.add_row(model, scheme, algorithm, *cells)
    return table


def _cells(rows: dict[str, dict[str, float]], algorithm: str) -> list[str]:
    """What COLUMNS name, of one side."""
    before, after = rows.get("none", {}), rows.get(algorithm, {})
    values = (before.get("sqnr"), after.get("sqnr"), after.get("cpu_seconds"), after.get("peak_mb"))
    formats = (".2f", ".2f", ".1f", ".0f")
    return ["-" if v is None else format(v, f) for v, f in zip(values, formats, strict=True)]
