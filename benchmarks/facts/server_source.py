"""The tables of layers against the source of a server: which rows it confirms, and those of layers in float anew."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.facts.confirmed import confirms_experts, confirms_fused
from benchmarks.facts.float_layers import rows
from benchmarks.facts.source_tree import SourceTree
from quark.goals import expert_names, fused_layers
from quark.goals.float_layers import FLOAT_LAYERS, TABLE, FloatLayer

PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Name of a package -> what the rows call the program."""


def read_source(folder: Path, write: bool) -> int:
    """Print what differs, and write what the source says; 1 where a row is not confirmed.

    Args:
        folder: Of a package, or that holds one.
        write: Rows that are confirmed get the version; those of layers in float become what the source says.
    """
    package = next((each for name in PROGRAMS for each in (folder, folder / name) if _is_package(each, name)), None)
    if package is None:
        print(f"{folder}: not the folder of a package {' or '.join(PROGRAMS)}, with its _version.py")
        return 1
    tree, program, version = SourceTree(package.resolve()), PROGRAMS[package.resolve().name], _version(package)
    print(f"{program} {version}")
    missing = _table(
        fused_layers, fused_layers.FUSED_LAYERS, program, version, write, lambda row: confirms_fused(tree, row)
    )
    missing += _table(
        expert_names, expert_names.EXPERT_NAMES, program, version, write, lambda row: confirms_experts(tree, row)
    )
    return 1 if _float_layers(tree, program, version, write) + missing else 0


def _table(
    home: Any, known: Sequence[Any], program: str, version: str, write: bool, confirms: Callable[[Any], bool]
) -> int:
    """How many rows of a program the source does not confirm; prints them, and writes the version into the others."""
    name = home.__name__.rpartition(".")[2]
    of_program = [row for row in known if row.program == program]
    wrong = [row for row in of_program if not confirms(row)]
    for row in wrong:
        print(f"{name}: its source does not say so any more: {' '.join(_cells(row))}")
    print(f"{name}: {len(of_program) - len(wrong)} rows confirmed")
    if write:
        seen = [replace(row, version=version) if row in of_program and row not in wrong else row for row in known]
        _write(home.TABLE, seen)
    return len(wrong)


def _float_layers(tree: SourceTree, program: str, version: str, write: bool) -> int:
    """How many rows of layers in float are gone, new, or of other models; prints them, and writes them anew."""
    found = rows(tree)
    known = {row.layer: row for row in FLOAT_LAYERS if row.program == program}
    changed = [
        layer for layer, (models, _) in found.items() if layer not in known or known[layer].architectures != models
    ]
    gone = [layer for layer in known if layer not in found]
    for layer in (*changed, *gone):
        print(f"float_layers: {layer}: {'gone' if layer in gone else 'new, or of other models'}")
    print(f"float_layers: {len(found) - len(changed)} rows confirmed")
    if write:
        others = [row for row in FLOAT_LAYERS if row.program != program]
        new = [FloatLayer(program, version, layer, *parts) for layer, parts in found.items()]
        _write(TABLE, sorted([*others, *new], key=lambda row: (row.program.lower(), row.layer)))
    return len(changed) + len(gone)


def _write(table: Path, known: Sequence[Any]) -> None:
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(vars(known[0]))
        writer.writerows(map(_cells, known))


def _cells(row: Any) -> list[str]:
    """The cells of a row: lists of words, and "yes" or nothing."""
    return [
        " ".join(value) if isinstance(value, tuple) else ("yes" if value else "") if isinstance(value, bool) else value
        for value in vars(row).values()
    ]


def _is_package(folder: Path, name: str) -> bool:
    return folder.resolve().name == name and (folder / "_version.py").is_file()


def _version(folder: Path) -> str:
    text = (folder / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"^(?:__version__|version) *=.*?['\"]([^'\"]+)['\"]", text, re.M)
    return found[1] if found else "unknown"
