"""`quark algorithms`: what --algorithm takes, for both flows."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from quark.base.command_line import new_table, results


def algorithms() -> None:
    """List the algorithms with their parameters and defaults, for --algorithm NAME:PARAMETER=VALUE.

    Example: quark algorithms
    """
    # Tables of the flows, which load neither torch nor onnx.
    from quark.onnx.config import algo_configs as of_onnx
    from quark.torch.config import named_algorithms as of_torch

    console = results()
    console.print(_table(of_torch.ALGO_CONFIGS, "Of a model folder"))
    console.print(_table(of_onnx.ALGO_CONFIGS, "Of an ONNX file"))


def _table(kinds: Any, title: str) -> Table:
    table = new_table("algorithm", "what it does", "parameters", title=title)
    for name, kind in kinds.items():
        table.add_row(name, (kind.__doc__ or "").split("\n")[0], ", ".join(_parameters(kind)))
    return table


def _parameters(kind: Any) -> list[str]:
    """The parameters that a word can give, with their defaults."""
    found = []
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        if field.name != "name" and has_default and not callable(field.default):
            found.append(f"{field.name}={field.default}")
    return found
