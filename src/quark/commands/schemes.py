"""`quark schemes`: the named schemes of both flows."""

from __future__ import annotations

from typing import Annotated

import typer

from quark.base.command_line import Results, new_table, results
from quark.commands.results.tables import facts_table
from quark.core.schemes import SCHEMES
from quark.errors import MissingDependencyError
from quark.goals import GOALS
from quark.jobs.words import usage


def schemes(
    goal: Annotated[
        str | None, typer.Option("--for", help=f"Only what this program loads: {', '.join(GOALS)}.")
    ] = None,
) -> None:
    """List the schemes of model folders, the mixes of GGUF files, and the configurations of ONNX files.

    Example: quark schemes --for vllm
    """
    console = results()
    if goal is not None:
        with usage():
            row = GOALS[goal]
        for onnx in (False, True):
            if row.defaults(onnx) is not None:
                console.print(facts_table(goal, onnx))
        return
    _print_schemes(console)
    _print_configurations(console)


def _print_schemes(console: Results) -> None:
    """Print the values of --scheme, from a table of the PyTorch flow, which does not load torch."""
    try:
        from quark.gguf import MIXES
    except MissingDependencyError as error:
        console.print(f"Schemes of model folders are not listed: {error}", highlight=False, soft_wrap=True)
        return
    table = new_table("scheme", "weight", "input activation", title="Of a model folder: --scheme")
    for name, layer in SCHEMES.items():
        table.add_row(name, str(layer.weight), str(layer.input or "float"))
    for name, mix in MIXES.items():
        table.add_row(name, f"GGUF: {mix.base}, wider where it matters" if mix.wider else f"GGUF: {mix.base}", "float")
    console.print(table)


def _print_configurations(console: Results) -> None:
    """Print the values of --config, from a table of the ONNX flow, which does not load onnx."""
    try:
        from quark.onnx.config.preset_rows import QROWS, ROWS
    except MissingDependencyError as error:
        console.print(f"Configurations of ONNX files are not listed: {error}", highlight=False, soft_wrap=True)
        return
    configurations = new_table("configuration", "weight", "activation", "ranges", title="Of an ONNX file: --config")
    for name, preset in ROWS.items():
        fields = preset.fields
        kinds = [str(fields.get(kind, "")).rpartition(".")[2] for kind in ("weight_type", "activation_type")]
        method = fields.get("calibrate_method")
        live = "of each input" if fields.get("use_dynamic_quant") else getattr(method, "name", "")
        configurations.add_row(name, *kinds, live)
    for name, newer in QROWS.items():
        configurations.add_row(name, newer.weight.__name__, newer.activation.__name__, "")
    console.print(configurations)
