"""Layers that predict further tokens (MTP) as blocks of a GGUF file, after the n of the model.

    model.layers.{n + i}.*                     ->  blk.{n + i}.*, and blk.{n + i}.nextn.* what joins them to the model
    mtp.layers.{i}.*, mtp.fc, mtp.norm, ...    ->  the same

llama.cpp counts them in block_count and says how many they are (nextn_predict_layers). Its architectures have names for
them or have not; where one of their tensors has none, none of them is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quark.core.spec import TensorSpec
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.table import ARCHITECTURES
from quark.gguf.names import IN_LAYERS
from quark.torch.checkpoint.carried import CarriedLayers, carried_beside, carried_of
from quark.torch.checkpoint.opened import opened_from
from quark.torch.checkpoint.shards import Entry
from quark.torch.plan import Plan
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.of_model import tensor_names

_IN_MTP = re.compile(r"^(?:model\.)?mtp\.layers\.([0-9]{1,4})\.")
"""The number of a layer that is not numbered on after those of the model."""
JOINS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""Names of EXAONE and Qwen for the parts that join one further layer to the model -> those of DeepSeek and GLM."""
NEEDED = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight", "attn_norm.weight")
"""Without these a block is no such layer."""


@dataclass(frozen=True)
class FurtherLayers:
    """Layers beside a model that are written as blocks of the file.

    Attributes:
        entries: The tensors, under the names that a layer of the model with the number of the block would have.
        specs: Name of a layer, so -> how its weight is quantized.
        shapes: Name of a layer, so -> the shape of its weight.
        count: How many blocks they are.
        left: Names of tensors that have no place in the file.
    """

    entries: list[Entry]
    specs: Mapping[str, TensorSpec]
    shapes: Mapping[str, tuple[int, ...]]
    count: int = 0
    left: tuple[str, ...] = ()


def further_layers(model: Any, architecture: Architecture, plan: Plan | None = None) -> FurtherLayers:
    """The layers that lie beside a model in the folder that it was loaded from.

    Args:
        model: Of transformers.
        architecture: Of the file.
        plan: What layers among them get.
    """
    folder, form, beside = opened_from(model), GgufFormat(), plan.beside if plan else {}

    def make_layout(spec: Any, layer: Any, dtype: Any) -> Any:
        return form.make_layout(spec, layer, dtype, "reorder", True)

    carried = carried_of(model, folder, CarriedLayers(beside, make_layout))
    layers = model.config.num_hidden_layers
    named = {name: _in_block(name, layers) for name, _, _ in carried}
    blocks = _blocks(named.values())
    if not carried or not _have_places(model, architecture, named.values(), blocks):
        return FurtherLayers([], {}, {}, left=tuple(named))
    shapes = {_layer(f"{name}.weight", layers): shape for name, shape in carried_beside(model, folder).items()}
    specs = {_layer(f"{name}.weight", layers): spec.weight for name, spec in beside.items() if spec.weight}
    entries = [(str(named[name]), make, stored) for name, make, stored in carried]
    return FurtherLayers(entries, specs, shapes, len(blocks))


def _blocks(names: Iterable[str | None]) -> set[int]:
    """The numbers of the blocks that tensors are in."""
    return {int(match[1]) for name in names if name and (match := IN_LAYERS.search(name))}


def _have_places(model: Any, architecture: Architecture, names: Iterable[str | None], blocks: set[int]) -> bool:
    """Return True where all tensors have names in a file, and are whole blocks that follow those of the model."""
    layers = model.config.num_hidden_layers
    name_of = tensor_names(model, architecture, len(blocks))
    in_file = {name_of(name) if name else None for name in names}
    needed = {f"blk.{block}.{leaf}" for block in blocks for leaf in NEEDED}
    return blocks == {*range(layers, layers + len(blocks))} and None not in in_file and needed <= in_file


def _layer(weight: str, layers: int) -> str:
    return (_in_block(weight, layers) or weight).removesuffix(".weight")


def _in_block(name: str, layers: int) -> str | None:
    """The name that a tensor would have in a layer of the model of its number; None where it is in none."""
    if _IN_MTP.match(name):
        return _IN_MTP.sub(lambda found: f"model.layers.{layers + int(found[1])}.", name)
    joins, _, kind = name.removeprefix("model.").removeprefix("mtp.").rpartition(".")
    if joins in JOINS and name.startswith(("mtp.", "model.mtp.")):
        return f"model.layers.{layers}.{JOINS[joins]}.{kind}"
    found = IN_LAYERS.search(name)
    return name if found and int(found[1]) >= layers else None


def further_if_known(model: Any, plan: Plan | None) -> FurtherLayers:
    """The layers that predict further tokens; none of a model that GGUF files are not written of."""
    kind = str(model.config.model_type)
    return further_layers(model, ARCHITECTURES[kind], plan) if kind in ARCHITECTURES else FurtherLayers([], {}, {})
