"""Names of experts: under which a server looks for the layers of experts in a quantized folder, one after the other.

    model.layers.3.mlp.experts.5.gate_proj.weight = prefix of the block, place, number, leaf, tensor

What has another name it passes over, or stops at. The names are those of folders, before `hf_to_vllm_mapper`. The rows
are data, expert_names.tsv: of `ckpt_names` of FusedMoEFactory and `make_expert_params_mapping` of models, and of the
attribute of a block that holds the experts. `python -m benchmarks.facts --source` looks whether the source still says
so.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("expert_names.tsv")
VLLM = "vLLM"
"""Whose rows hold where no program is named: folders can be written for it."""


@dataclass(frozen=True)
class ExpertNames:
    """One row.

    Attributes:
        program, version: Who looks for them.
        model_types: Of config.json.
        place: The experts within a block.
        leaves: Last names of the layers of an expert.
        source: File of the program.
        quark: Element types of weights whose experts it loads from `quark` folders; empty: all that it has kernels for.
        other_formats: Whether it is known to look for them so in folders of other formats, too.
        note: What else the file says.
    """

    program: str
    version: str
    model_types: tuple[str, ...]
    place: str
    leaves: tuple[str, ...]
    source: str
    quark: tuple[str, ...]
    other_formats: bool
    note: str

    def finds(self, layer: str) -> bool:
        """Return True where the program has a place for a layer of an expert, by its name in the folder."""
        leaves = "|".join(map(re.escape, self.leaves))
        return re.search(rf"\.{re.escape(self.place)}\.\d+\.({leaves})$", layer) is not None


def _row(row: dict[str, str]) -> ExpertNames:
    lists = {name: tuple(row[name].split()) for name in ("model_types", "leaves", "quark")}
    return ExpertNames(**{**row, **lists, "other_formats": row["other_formats"] == "yes"})  # type: ignore[arg-type]


with TABLE.open(encoding="utf-8", newline="") as _file:
    EXPERT_NAMES: tuple[ExpertNames, ...] = tuple(map(_row, csv.DictReader(_file, delimiter="\t")))


def expert_names(model_type: str, program: str = VLLM) -> ExpertNames | None:
    """The row of a type of models; None where that of the program is not known."""
    return next((row for row in EXPERT_NAMES if row.program == program and model_type in row.model_types), None)


def unread_experts(model_type: str, layers: Iterable[str], program: str = VLLM) -> list[str]:
    """The layers of experts that a server is known to pass over.

    Args:
        model_type: Of config.json.
        layers: Names of layers of experts in the folder.
        program: The server.
    """
    row = expert_names(model_type, program)
    return [] if row is None else [layer for layer in layers if not row.finds(layer)]
