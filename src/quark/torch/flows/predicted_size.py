"""The predicted size of a quantized model folder, and what each layer would get: without reading a weight."""

from __future__ import annotations

from typing import Any

from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import prepare
from quark.torch.plan import Plan, chooser, make_plan


def planned(meta: Any, config: Any, form: str = "quark") -> tuple[Plan, int]:
    """What each layer gets, and the bytes of all tensors.

    Args:
        meta: Model on the meta device; passes that the config asks for change it.
        config: A QConfig.
        form: A value of --export-format.
    """
    from quark.torch.formats import FORMATS, Format
    from quark.torch.writers.gguf.blocks import GgufFormat

    prepare(meta, chooser(config, meta).wanted)
    made = make_plan(config, meta, read_elsewhere=weights_read_elsewhere(meta))
    # ONNX files hold codes and scales as wide as those of a quark folder.
    held: Format = GgufFormat() if form == "gguf" else FORMATS["quark" if form == "onnx" else form]
    return made, predicted_bytes(meta, made, held)
