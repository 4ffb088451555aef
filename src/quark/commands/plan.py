"""`quark plan`: which layer would get what, and how large the result would be, without loading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.command_line import results
from quark.files import require_config


def plan(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face model (config.json is enough).")],
    scheme: Annotated[str, typer.Option(help="Name of a scheme; `quark schemes` lists them.")],
    exclude: Annotated[list[str] | None, typer.Option(help="Pattern of layers to keep in float; repeatable.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="PATTERN=SCHEME for some layers; repeatable.")] = None,
) -> None:
    """Show what a scheme would do to a model, and the size it would have.

    Example: quark plan ./llama --scheme mxfp4
    """
    # Before the libraries load: a wrong path is answered at once.
    require_config(model)
    # The flow imports torch: after the arguments are parsed, so that --help is instant.
    from quark.commands.models import load_meta_model
    from quark.commands.quantize_torch import scheme_config
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.model.outside_reads import weights_read_elsewhere
    from quark.torch.model.passes import prepare
    from quark.torch.plan import chooser, make_plan

    config = scheme_config(scheme, exclude, layer)
    meta = load_meta_model(model)
    before = predicted_bytes(meta, None)
    prepare(meta, chooser(config, meta).wanted)
    made = make_plan(config, meta, read_elsewhere=weights_read_elsewhere(meta))
    console = results()
    console.print(made.table(meta))
    after = predicted_bytes(meta, made)
    console.print(f"size: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})", highlight=False)
