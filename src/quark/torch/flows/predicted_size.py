"""The predicted size of a quantized model folder, and what each layer would get: without reading a weight."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from quark.core.spec import LayerSpec
from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.checkpoint.sources.carried import CarriedLayers, carried_beside, carried_of, plan_carried
from quark.torch.checkpoint.stored_types import source_folder
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.formats import FORMATS, Format
from quark.torch.layers.low_rank import branch_bytes, can_have_branch
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import prepare
from quark.torch.plan import Plan, chooser, make_plan
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.further_tokens import further_if_known


def planned(meta: Any, config: Any, form: str = "quark") -> tuple[Plan, int]:
    """What each layer gets, and the bytes of all tensors.

    Args:
        meta: Model on the meta device; passes that the config asks for change it.
        config: A QConfig.
        form: A value of --export-format.
    """
    prepare(meta, chooser(config, meta).wanted)
    beside = carried_beside(meta, source_folder(meta))
    made = make_plan(config, meta, read_elsewhere=weights_read_elsewhere(meta), beside=beside)
    made = plan_carried(config, meta, made, beside)
    # ONNX files hold codes and scales as wide as those of a quark folder.
    held: Format = GgufFormat() if form == "gguf" else FORMATS["quark" if form == "onnx" else form]
    return made, predicted_bytes(meta, made, held) + _branches(meta, made, config) + carried_bytes(meta, made, form)


def float_bytes(meta: Any) -> int:
    """The bytes of all tensors of the float model of a folder, with what its class does not build."""
    return predicted_bytes(meta, None) + carried_bytes(meta)


def carried_bytes(meta: Any, made: Plan | None = None, form: str = "quark") -> int:
    """The bytes of what the folder of a model holds and its class does not build.

    Args:
        meta: The model.
        made: What layers among them get; None: all stay as they are.
        form: A value of --export-format.
    """
    if form == "onnx":
        return 0
    if form == "gguf":
        items = further_if_known(meta, made).entries
    else:
        make = partial(FORMATS[form].make_layout, pack_method="reorder", real=True)
        items = carried_of(meta, source_folder(meta), CarriedLayers(made.beside, make) if made else CarriedLayers())
    return sum(tensor.nbytes for _, _, stored in items for tensor in stored.values())


def carried_said(meta: Any, made: Plan, form: str) -> str | None:
    """A line about what lies beside a model; None where nothing does.

    Args:
        meta, made, form: As for `carried_bytes`.
    """
    size, layers = carried_bytes(meta), len(carried_beside(meta, source_folder(meta)))
    if not size:
        return None
    lost = form == "onnx" or (form == "gguf" and not further_if_known(meta, made).count)
    becomes = f"the {form} file does not hold them" if lost else f"{len(made.beside)} of them quantized"
    return (
        f"of which {size / 1e6:.2f} MB lie beside the model, whose class does not build them (layers that predict "
        f"further tokens): {layers} layers, {becomes}"
    )


def _branches(meta: nn.Module, made: Plan, config: Any) -> int:
    """Bytes of SVDQuant's branches: of all layers that may have one, unless the config lists those that do."""
    total = 0
    for algo in config.algo_config or []:
        if isinstance(algo, SVDQuantConfig):
            for name, layer in meta.named_modules():
                spec = made.layers.get(name, LayerSpec()).weight
                listed = algo.correction_layers is None or name in algo.correction_layers
                if listed and isinstance(layer, nn.Linear) and can_have_branch(algo, name, layer, spec):
                    total += branch_bytes(algo, layer)
    return total
