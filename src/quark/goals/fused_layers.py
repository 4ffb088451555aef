"""Fused layers: what a server makes one matrix of, one row for each set of layers that its source names.

A matrix has one scheme: vLLM refuses a folder that gives its parts different ones ("requires all to use the same
scheme"). And where a scheme has a scale for a whole weight (NVFP4), the matrix has one of them, the largest of its
parts, under which the codes of the others decode to something else. SGLang has copies of the same loaders, and rows of
its own. A mixture of experts has one scheme, too ("All MoE projections need to have same quantization scheme").

The rows are data, fused_layers.tsv: of `packed_modules_mapping`, `stacked_params_mapping` and `orig_to_new_stacked` of
models. `python -m benchmarks.facts --source` looks whether the source of a program still says so.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("fused_layers.tsv")
VLLM = "vLLM"
"""The one program that makes one matrix, too, of layers that no row knows and that read one tensor: so it does with
models that it takes from transformers."""


@dataclass(frozen=True)
class FusedLayers:
    """One row. A layer belongs to the first row of a program that matches, so what is more exact comes first.

    Attributes:
        program, version: Who makes one matrix of the layers.
        fused: What the matrix is called there; empty: layers that read one tensor, and are kept apart there.
        members: Last names of the layers in the model of transformers, with that of their module before it where it
            counts (`encoder_attn.k_proj`). Two of them are enough, as one may be missing: a value that is the key.
        whole: Whether all members have to be there.
        only, but: Architectures, as config.json names them: the row is for these only, or for all but these.
        source: Files of the program that say so, or some of them, or folders of such.
        note: What else the files say.
    """

    program: str
    version: str
    fused: str
    members: tuple[str, ...]
    whole: bool
    only: tuple[str, ...]
    but: tuple[str, ...]
    source: tuple[str, ...]
    note: str

    def is_of(self, architectures: Collection[str]) -> bool:
        """Return True where the row holds for a model of these architectures."""
        return not set(self.but).intersection(architectures) and (
            not self.only or not set(self.only).isdisjoint(architectures)
        )

    def among(self, module: str, leaves: Collection[str]) -> list[str]:
        """Those of the layers of a module, by their last names, that are members; none where the row does not match.

        Args:
            module: Last name of the module.
            leaves: Last names of its linear layers.
        """
        found = []
        for member in self.members:
            place, _, leaf = member.rpartition(".")
            if leaf in leaves and place in ("", module):
                found.append(leaf)
        return found if len(found) >= (len(self.members) if self.whole else 2) else []


def _row(row: dict[str, str]) -> FusedLayers:
    lists = {name: tuple(row[name].split()) for name in ("members", "only", "but", "source")}
    return FusedLayers(**{**row, **lists, "whole": row["whole"] == "yes"})  # type: ignore[arg-type]


with TABLE.open(encoding="utf-8", newline="") as _file:
    FUSED_LAYERS: tuple[FusedLayers, ...] = tuple(map(_row, csv.DictReader(_file, delimiter="\t")))
PROGRAMS = tuple(dict.fromkeys(row.program for row in FUSED_LAYERS))
"""Who has rows."""


def fused_siblings(
    module: str, leaves: Sequence[str], architectures: Iterable[str], program: str
) -> list[tuple[FusedLayers, list[str]]] | None:
    """The rows that match the linear layers of one module, each with its members; None where none does.

    Args:
        module: Last name of the module.
        leaves: Last names of its linear layers.
        architectures: Of the model.
        program: Whose rows.

    Returns:
        Every layer in one row at most; layers in none are no part of a fused matrix.
    """
    known, free, found = set(architectures), list(leaves), []
    for row in FUSED_LAYERS:
        members = row.among(module, free) if row.program == program and row.is_of(known) else []
        if members:
            found.append((row, members))
            free = [leaf for leaf in free if leaf not in members]
    return found or None
