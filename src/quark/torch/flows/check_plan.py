"""What a format or its readers cannot hold of a plan: said before the first forward, from a model without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quark.torch.checkpoint.quantization_config import folder_of
from quark.torch.checkpoint.shards import entries
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Folder, FolderFormat, Format
from quark.torch.formats.readers import check_readers
from quark.torch.plan import Plan
from quark.torch.replace import replaced
from quark.torch.writers.gguf.blocks import GgufFormat


def check_plan(meta: Any, config: QConfig, made: Plan, form: str) -> None:
    """Raise NotSupportedError or ShapeError for a plan whose result the format could not hold, or nobody would find.

    Args:
        meta: Model on the meta device, as `planned` leaves it; its layers are replaced.
        config: What was asked for.
        made: The plan of both.
        form: A value of --export-format; "onnx" holds what the plan holds.
    """
    if form == "onnx":
        return
    held: Format = GgufFormat() if form == "gguf" else FORMATS[form]
    with replaced(meta, made):
        layers, content = dict(meta.named_modules()), _with_algorithms(folder_of(meta, config, made), config)
        held.check(layers, content)
        if isinstance(held, FolderFormat):
            check_readers(meta, held, content, (name for name, _, _ in entries(meta, "reorder", True, held)))


def _with_algorithms(content: Folder, config: QConfig) -> Folder:
    """What the folder will hold beside the layers, as far as the algorithms say it before they run."""
    algorithms, first = config.algo_config or [], next(iter(content.specs), "")
    branched = (first,) if any(isinstance(each, SVDQuantConfig) for each in algorithms) else ()
    return replace(content, branched=branched)
