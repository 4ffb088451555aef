"""`quark plan`: which layer would get what, and how large the result would be, without loading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.command_line import results
from quark.commands.bit_budget import (
    BITS_HELP,
    CANDIDATES_HELP,
    SENSITIVITY_HELP,
    SIZE_HELP,
    asked_budget,
    choice_table,
    choose_for_budget,
)
from quark.commands.kinds import require
from quark.errors import ConfigError
from quark.files import require_config


def plan(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face model (config.json is enough).")],
    scheme: Annotated[str | None, typer.Option(help="Name of a scheme; `quark schemes` lists them.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Pattern of layers to keep in float; repeatable.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="PATTERN=SCHEME for some layers; repeatable.")] = None,
    bits: Annotated[float | None, typer.Option(min=0, help=BITS_HELP)] = None,
    size: Annotated[str | None, typer.Option(help=SIZE_HELP)] = None,
    candidates: Annotated[list[str] | None, typer.Option(help=CANDIDATES_HELP)] = None,
    sensitivity: Annotated[Path | None, typer.Option(help=SENSITIVITY_HELP)] = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration data for --bits and --size.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Most samples of --calib. Default 128.")] = None,
    device: Annotated[str, typer.Option(help="Where --bits and --size measure: cpu, cuda ...")] = "cpu",
) -> None:
    """Show what a scheme, or a budget, would do to a model, and the size it would have.

    With --bits or --size the weights are read, and calibration data or a file of sensitivities are needed.

    Example: quark plan ./llama --scheme mxfp4

    Example: quark plan ./llama --bits 4.25 --calib heldout.txt --sensitivity llama.json
    """
    # Before the libraries load: a wrong path is answered at once.
    require_config(model)
    # The flow imports torch: after the arguments are parsed, so that --help is instant.
    from quark.commands.models import load_meta_model
    from quark.commands.quantize_torch import any_scheme, scheme_config
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.model.outside_reads import weights_read_elsewhere
    from quark.torch.model.passes import prepare
    from quark.torch.plan import chooser, make_plan

    budget = asked_budget(scheme, bits, size, candidates, sensitivity)
    if budget is None and calib is not None:
        raise ConfigError("--calib belongs to --bits or --size, which are not given.")
    config = scheme_config(any_scheme() if budget else require(scheme, "--scheme", model), exclude, layer)
    console = results()
    if budget is not None:
        table, choice = choose_for_budget(model, budget, config, calib, samples, device)
        config = table.config(choice, config)
        console.print(choice_table(table, choice))
    meta = load_meta_model(model)
    before = predicted_bytes(meta, None)
    prepare(meta, chooser(config, meta).wanted)
    made = make_plan(config, meta, read_elsewhere=weights_read_elsewhere(meta))
    console.print(made.table(meta))
    after = predicted_bytes(meta, made)
    console.print(f"size: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})", highlight=False)
