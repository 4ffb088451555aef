"""The tables of layers against the source of vLLM: which rows it confirms, and those of layers in float anew."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from benchmarks.facts.float_layers import pairs_in, rows
from benchmarks.facts.source_tree import SourceTree
from quark.goals.float_layers import FLOAT_LAYERS, TABLE
from quark.goals.fused_layers import FUSED_LAYERS


def read_source(folder: Path, write: bool) -> int:
    """Print what differs, and write the rows of layers in float anew; 1 where a row is not confirmed."""
    tree = SourceTree(folder.resolve())
    version = _version(folder)
    print(f"vLLM {version}")
    missing = unconfirmed(tree)
    for name in missing:
        print(f"fused_layers: {name} is not in its tables any more")
    print(f"fused_layers: {sum(bool(row.fused) for row in FUSED_LAYERS) - len(missing)} rows confirmed")
    found = rows(tree)
    known = {row.layer: row for row in FLOAT_LAYERS if row.program == "vLLM"}
    changed = [
        layer for layer, (models, _) in found.items() if layer not in known or known[layer].architectures != models
    ]
    gone = [layer for layer in known if layer not in found]
    for layer in (*changed, *gone):
        print(f"float_layers: {layer}: {'gone' if layer in gone else 'new, or of other models'}")
    print(f"float_layers: {len(found) - len(changed)} rows confirmed")
    if write:
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["program", "version", "layer", "architectures", "source"])
            for layer, (models, files) in found.items():
                writer.writerow(["vLLM", version, layer, " ".join(models), " ".join(files)])
    return 1 if missing or changed or gone else 0


def unconfirmed(tree: SourceTree) -> list[str]:
    """The fused layers of the table of which no file of the models says that all members are loaded into them."""
    of_files = []
    for file in tree.below("model_executor/models", "models"):
        members: dict[str, set[str]] = {}
        for whole, member in pairs_in(file):
            members.setdefault(_last(whole), set()).add(_last(member))
        of_files.append(members)
    missing = []
    for row in FUSED_LAYERS:
        wanted = {_last(member) for member in row.members}
        fused = _last(row.fused)
        least = max(2, len(wanted) - 1) if row.whole else 2  # one may have another name there (Beam's gate)
        if row.fused and not any(len(wanted & members.get(fused, set())) >= least for members in of_files):
            missing.append(row.fused)
    return missing


def _last(name: str) -> str:
    return name.strip(".").rpartition(".")[2]


def _version(folder: Path) -> str:
    text = (folder / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"^(?:__version__|version) *=.*?['\"]([^'\"]+)['\"]", text, re.M)
    return found[1] if found else "unknown"
