"""Linear layers and embeddings that a server builds without a quantization: it has a place for float weights.

    name of a layer, without numbers = ... . module . layer     a row is the end of it: `indexer.wk`, or `eh_proj`

A folder that holds them quantized is refused, or its scales are passed over. The rows are data, float_layers.tsv, which
`python -m benchmarks.facts --source` reads anew from the source of the program.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("float_layers.tsv")
ANY = "*"
"""In the place of architectures: all of them."""


@dataclass(frozen=True)
class FloatLayer:
    """One row.

    Attributes:
        program, version: Who builds the layer.
        layer: Its last name, or those of its module and of it.
        architectures: As config.json names them; ANY alone: of all.
        source: Files that say so.
    """

    program: str
    version: str
    layer: str
    architectures: tuple[str, ...]
    source: str

    def is_of(self, known: Collection[str]) -> bool:
        """Return True where the row holds for a model of these architectures."""
        return ANY in self.architectures or not set(self.architectures).isdisjoint(known)


def _row(row: dict[str, str]) -> FloatLayer:
    return FloatLayer(**{**row, "architectures": tuple(row["architectures"].split())})  # type: ignore[arg-type]


with TABLE.open(encoding="utf-8", newline="") as _file:
    FLOAT_LAYERS: tuple[FloatLayer, ...] = tuple(map(_row, csv.DictReader(_file, delimiter="\t")))


def float_layers(program: str, architectures: Collection[str], layers: Iterable[str]) -> dict[str, FloatLayer]:
    """Those of some layers that a program builds in float, each with its row.

    Args:
        program: As the rows name it.
        architectures: Of the model.
        layers: Full names.
    """
    rows = {row.layer: row for row in FLOAT_LAYERS if row.program == program and row.is_of(architectures)}
    found = {}
    for layer in layers:
        names = [name for name in layer.split(".") if not name.isdigit()]
        row = rows.get(".".join(names[-2:])) or rows.get(names[-1])
        if row is not None:
            found[layer] = row
    return found
