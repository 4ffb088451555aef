"""The predicted size of a quantized model folder, and what each layer would get: without reading a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from quark.core.spec import LayerSpec
from quark.torch.checkpoint.carried import CarriedLayers, carried_beside, carried_of, plan_carried
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Format
from quark.torch.layers.low_rank import branch_bytes, can_have_branch
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import prepare
from quark.torch.plan import Plan, chooser, make_plan


@dataclass(frozen=True)
class FolderPlan:
    """The plan for the layers of a folder, and how large the result is.

    Attributes:
        folder: The folder.
        config: What was asked for.
        meta: The model without weights, passes done.
        layers: The plan.
        form: A value of --export-format.
    """

    folder: OpenedFolder
    config: QConfig
    meta: Any
    layers: Plan
    form: str

    @cached_property
    def before(self) -> int:
        """Bytes of all tensors in float."""
        return float_bytes(self.folder.skeleton, self.folder)

    @cached_property
    def after(self) -> int:
        """Bytes of all tensors quantized. Raises as the format does, for what it cannot hold."""
        return quantized_bytes(self.meta, self.layers, self.config, self.form, self.folder)


def plan_of(folder: OpenedFolder, config: QConfig, form: str, dtype: torch.dtype | None = None) -> FolderPlan:
    """The plan of a config for a folder.

    Args:
        folder: Of float weights, or of such as are read as float.
        config: What is asked for.
        form: A value of --export-format.
        dtype: In which the model is loaded; None: that of the folder.
    """
    meta = folder.copy() if dtype is None else folder.copy().to(dtype)
    return FolderPlan(folder, config, meta, plan_layers(meta, config, folder), form)


def plan_layers(
    meta: Any,
    config: QConfig,
    folder: OpenedFolder | None = None,
    beside: Sequence[str] | None = None,
    data: Iterable[Any] | None = None,
) -> Plan:
    """Return the plan of all layers, those beside the model included.

    Args:
        meta: Model on the meta device; passes that the config asks for change it.
        config: What is asked for.
        folder: Where what the class of the model does not build lies; None: nowhere.
        beside: What that is; None: what the class leaves out by design.
        data: Calibration batches, where there are some.
    """
    prepare(meta, chooser(config, meta).wanted)
    carried = carried_beside(meta, folder, beside)
    elsewhere = weights_read_elsewhere(meta, data)
    return plan_carried(config, meta, make_plan(config, meta, read_elsewhere=elsewhere, beside=carried), carried)


def quantized_bytes(
    meta: Any, made: Plan, config: QConfig, form: str = "quark", folder: OpenedFolder | None = None
) -> int:
    """The bytes of all tensors.

    Args:
        meta, made, config: Model, plan and config of `plan_layers`.
        form: A value of --export-format.
        folder: As there.
    """
    # ONNX files hold codes and scales as wide as those of a quark folder.
    measured_form: Format = FORMATS["quark" if form in ("gguf", "onnx") else form]
    if form == "gguf":
        from quark.torch.writers.gguf.format import GgufFormat  # with the tables of architectures

        measured_form = GgufFormat()
    branches, beside = _branches(meta, made, config), _carried_bytes(meta, folder, made, form)
    return predicted_bytes(meta, made, measured_form) + branches + beside


def float_bytes(meta: Any, folder: OpenedFolder | None) -> int:
    """The bytes of all tensors of the float model of a folder, with what its class does not build."""
    return predicted_bytes(meta, None) + _carried_bytes(meta, folder)


def _carried_bytes(meta: Any, folder: OpenedFolder | None, made: Plan | None = None, form: str = "quark") -> int:
    """The bytes of what the folder of a model holds and its class does not build.

    Args:
        meta, folder: The model, and its folder.
        made: What layers among them get; None: all stay as they are.
        form: A value of --export-format.
    """
    if form == "onnx":
        return 0
    if form == "gguf":
        items = _further(meta, made).entries
    else:
        make = partial(FORMATS[form].make_layout, pack_method="reorder", real=True)
        items = carried_of(meta, folder, CarriedLayers(made.beside, make) if made else CarriedLayers())
    return sum(tensor.nbytes for _, _, stored in items for tensor in stored.values())


def carried_said(plan: FolderPlan) -> str | None:
    """A line about what lies beside a model; None where nothing does."""
    meta, made, form = plan.meta, plan.layers, plan.form
    size, layers = _carried_bytes(meta, plan.folder), len(carried_beside(meta, plan.folder))
    if not layers:  # such as ids of positions, which older versions of transformers wrote
        return None
    lost = form == "onnx" or (form == "gguf" and not _further(meta, made).count)
    becomes = f"the {form} file does not hold them" if lost else f"{len(made.beside)} of them quantized"
    return (
        f"of which {size / 1e6:.2f} MB lie beside the model, whose class does not build them (layers that predict "
        f"further tokens): {layers} layers, {becomes}"
    )


def _further(meta: Any, made: Plan | None) -> Any:
    """See `further_if_known`, whose file reads the tables of architectures."""
    from quark.torch.writers.gguf.further_tokens import further_if_known

    return further_if_known(meta, made)


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
