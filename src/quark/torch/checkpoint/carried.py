"""Tensors of a folder that the class of its model does not build, such as layers that predict further tokens (MTP).

It is carried whole: in the type that it is stored in, or decoded to the type of the model where it is stored in codes.
Layers of it that a config names are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.core.checks import naming
from quark.core.names.patterns import first_match, matches
from quark.core.spec import LayerSpec
from quark.errors import ConfigError, FormatError
from quark.torch.calibration.calibrate import qparams_under, sharing_scales, tensor_qparams
from quark.torch.checkpoint.loading import stored_like
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.shards import Entry, MakeLayout
from quark.torch.checkpoint.sources.source import Source
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_layer
from quark.torch.config.selectors import output_head, routers
from quark.torch.formats import Format
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.layers import layer_class
from quark.torch.layers.shapes import check_shapes
from quark.torch.plan import Plan, chooser


@dataclass(frozen=True)
class CarriedLayers:
    """How layers that are carried are quantized.

    Attributes:
        specs: By their full names.
        make_layout: Of the format.
        groups: Last names of siblings that share a second-level scale.
    """

    specs: Mapping[str, LayerSpec] = field(default_factory=dict)
    make_layout: MakeLayout | None = None
    groups: Sequence[Sequence[str]] = ()


def carried_of(
    model: Any, folder: OpenedFolder | None, layers: CarriedLayers = CarriedLayers(), apart: Collection[str] = ()
) -> list[Entry]:
    """Entries of what the folder that a model was loaded from holds beside it, but for that of the layers `apart`."""
    source = None if folder is None else folder.source_if_any
    if folder is None or source is None:
        return []
    names = [name for name in folder.dropped(model) if name.rpartition(".")[0] not in apart]
    return carried_entries(source, names, model.dtype, layers)


def carried_beside(
    model: Any, folder: OpenedFolder | None, names: Iterable[str] | None = None
) -> dict[str, tuple[int, ...]]:
    """The `carried_layers` of the folder that a model was loaded from; among these names where they are given."""
    source = None if folder is None else folder.source_if_any
    if folder is None or source is None:
        return {}
    return carried_layers(model, source, folder.dropped(model) if names is None else names)


def carried_modules(model: Any, folder: OpenedFolder | None, names: Collection[str]) -> dict[str, nn.Module]:
    """Carried layers as modules without weights. Raises FormatError where they are not in the folder any more."""
    found = carried_beside(model, folder) if names else {}
    if gone := sorted({*names} - found.keys()):
        raise FormatError(f"{gone[0]} is to be quantized, and is not in the folder that the model was loaded from.")
    return as_modules({name: found[name] for name in names}, model.dtype)


def as_modules(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, nn.Module]:
    """Layers without weights, by the shapes that these have."""
    return {
        name: nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
        for name, (rows, columns) in shapes.items()
    }


def refuse_carried(form: Format, modules: Mapping[str, nn.Module], specs: Mapping[str, LayerSpec]) -> None:
    """Raise NotSupportedError, naming the layer, for a carried one that a format cannot hold."""
    for name, spec in specs.items():
        form.refuse_layer(name, modules[name], spec)


def carried_layers(model: nn.Module, source: Source, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weight of what are linear layers among carried tensors.

    Matrices, but for tables as large as the model's embeddings (and heads) and what is named as its routers are.
    """
    linear = _leaves(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    linear -= _leaves(output_head(model))
    tables = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    apart = _leaves(routers(model))
    apart |= _leaves(name for name, module in model.named_modules() if type(module).__name__.endswith("Router"))
    found = dict[str, tuple[int, ...]]()
    for layer, shape in _weights(source, names).items():
        leaf = layer.rpartition(".")[2]
        if len(shape) == 2 and leaf not in apart and (shape not in tables or leaf in linear):
            found[layer] = shape
    return found


def _weights(source: Source, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Name of a layer -> shape of its weight."""
    # Codes of a folder in a form that is not read as float are no weights here; see writers/carried.py.
    found = [name for name in names if name.endswith(".weight") and (source.is_coded(name) or source.is_wide(name))]
    return {name.removesuffix(".weight"): source.shape(name) for name in found}


def _leaves(names: Iterable[str]) -> set[str]:
    """The last parts of names."""
    return {name.rpartition(".")[2] for name in names}


def plan_carried(config: QConfig, model: nn.Module, plan: Plan, carried: Mapping[str, tuple[int, ...]]) -> Plan:
    """A plan with what carried layers get: those that a pattern names which no layer of the model meets.

    Args:
        config, model, plan: What was asked for, of what, and what that gave.
        carried: From `carried_layers`.

    Raises:
        ConfigError: A static scale: no data run through these layers.
        ShapeError: A granularity does not fit a weight; names the layer.
    """
    rules, choice = config.layer_quant_config if carried else {}, chooser(config, model)
    candidates = [name for name, module in model.named_modules() if layer_class(module)]
    own = {pattern: rule for pattern, rule in rules.items() if not any(matches(name, pattern) for name in candidates)}
    found = {}
    for name, shape in carried.items():
        spec = lower_layer(None if choice.excludes(name) else first_match(name, own), per_token=True)
        if spec == LayerSpec():
            continue
        _refuse_data(name, spec)
        check_shapes(name, "Linear", shape, shape[1], spec)
        found[name] = replace(spec, bias=None)
    if found and config.algo_config:
        names = ", ".join(type(algorithm).__name__ for algorithm in config.algo_config)
        first = next(iter(found))
        logger.info(
            "%d layers are rounded to nearest, as no data run through them for %s: %s.", len(found), names, first
        )
    return replace(plan, beside=found) if found else plan


def carried_entries(
    source: Source, names: Collection[str], dtype: torch.dtype, layers: CarriedLayers = CarriedLayers()
) -> list[Entry]:
    """Entries of tensors as they are, and of the weights of layers that are quantized.

    Args:
        source: The folder's tensors.
        names: Of float tensors.
        dtype: Of the model.
        layers: What is quantized.
    """
    weights = {f"{name}.weight": spec for name, spec in layers.specs.items()}
    specs = {name: spec.weight for name, spec in layers.specs.items() if spec.weight is not None}
    family = {name: members for members in sharing_scales(specs, layers.groups) for name in members}
    out: list[Entry] = []
    for name in names:
        shape = source.shape(name)
        if name not in weights:
            kept = dtype if source.is_coded(name) else source.meta(name).dtype
            like = torch.empty(shape, dtype=kept, device="meta")
            out.append((name, partial(_as_it_is, source, name, kept), {"": like}))
            continue
        layer, spec = name.removesuffix(".weight"), weights[name]
        assert spec.weight is not None and layers.make_layout is not None
        layout = layers.make_layout(spec.weight, spec, dtype)
        make = partial(_rounded, source, layer, family.get(layer, [layer]), layout, dtype)
        out.append((name, make, stored_like(layout, spec.weight, torch.empty(shape, dtype=dtype, device="meta"))))
    return out


def _as_it_is(source: Source, name: str, dtype: torch.dtype) -> Tensors:
    return {"": source.read(name, dtype, source.shape(name)) if source.is_coded(name) else source.stored(name)}


def _rounded(source: Source, layer: str, family: Sequence[str], layout: Layout, dtype: torch.dtype) -> Tensors:
    """A weight, rounded to nearest, under the largest of the second-level scales of its family."""
    spec = layout.spec

    def weight(name: str) -> torch.Tensor:
        return source.read(f"{name}.weight", dtype, source.shape(f"{name}.weight"))

    with naming(f"{layer}.weight"):
        x = weight(layer)
        if spec.is_cast:
            return layout.store(x, None)
        if len(family) < 2:
            return layout.store(x, tensor_qparams(x, spec))
        seconds = [tensor_qparams(weight(name), spec).second for name in family]
        largest = torch.stack([second.scale for second in seconds if second is not None]).amax(0)
        return layout.store(x, qparams_under(largest, x, spec))


def _refuse_data(name: str, spec: LayerSpec) -> None:
    """Raise ConfigError for what a carried layer cannot have."""
    if spec.needs_data or spec.output is not None or spec.weight is None:
        raise ConfigError(
            f"{name} is not built by the model's class, so that no calibration data run through it. Possible: a "
            "scheme of weights, or one with dynamic activations."
        )
