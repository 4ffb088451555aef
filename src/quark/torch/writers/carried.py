"""Layers that the class of a model does not build (MTP), of a folder that stores them in codes: a model of their own.

So they are read, decoded and stored in another format by the code that does it for the layers of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import FormatError, QuarkError
from quark.torch.checkpoint.carried import CarriedLayers, carried_modules, carried_of, refuse_carried
from quark.torch.checkpoint.dequantize import dequantize
from quark.torch.checkpoint.importer import load_stored, read_quantization_config
from quark.torch.checkpoint.loading import stored_like
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.shards import Entry, entries
from quark.torch.checkpoint.sources.methods import READ
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Format, Stored
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.formats.gptq.auto_round import AUTO_ROUND
from quark.torch.formats.layout import Layout
from quark.torch.layers.replace import quantized_layers, set_submodule
from quark.torch.model.names import dropped_names
from quark.torch.plan import Plan, chooser


@dataclass(frozen=True)
class Carried:
    """Tensors that are written beside those of a model.

    Attributes:
        entries: The tensors.
        plan: That of the model, with what the layers among them have.
        modules: Those of these layers by their full names.
    """

    entries: list[Entry]
    plan: Plan
    modules: dict[str, nn.Module]


def carried_beside_model(
    model: Any, config: QConfig, plan: Plan, folder: OpenedFolder | None, form: Format, pack_method: str, real: bool
) -> Carried:
    """Return the tensors of the folder that a model was loaded from which the model's class does not build.

    Layers in codes keep them where the layers of the model do, and are float where a model was made float again.

    Args:
        model: A quantized model.
        config, plan: Under which it was quantized.
        folder: That it was loaded from; None: it is not known.
        form, pack_method, real: What is written; see `entries`.
    """
    loaded = hasattr(model, "quant_format")
    # What is read as float is so beside a float model, too.
    as_float = not loaded and folder is not None and folder.method in READ
    coded = None if as_float else _carried_in_codes(model, folder)
    apart = list(quantized_layers(coded)) if coded is not None else []
    made: list[Entry] = []
    if coded is not None:
        coded = coded if loaded else dequantize(coded)
        made = list(entries(coded, pack_method, real, form))
        kept = {name: layer.spec for name, layer in quantized_layers(coded).items()}
        plan = replace(plan, beside={**plan.beside, **kept})
    rounded = {name: spec for name, spec in plan.beside.items() if name not in apart}
    groups = sibling_groups(model, config.shared_scale_groups) if rounded else ()
    layers = CarriedLayers(rounded, partial(form.make_layout, pack_method=pack_method, real=real), groups)
    modules: dict[str, nn.Module] = carried_modules(model, folder, rounded)
    refuse_carried(form, modules, rounded)
    if coded is not None:
        modules |= {name: coded.get_submodule(name) for name in apart}
    return Carried([*made, *carried_of(model, folder, layers, apart)], plan, modules)


SCALE = "weight_scale"
"""Leaf, as quark folders have it, that only a layer in codes has."""


def _carried_in_codes(model: Any, folder: OpenedFolder | None) -> nn.Module | None:
    """The layers in codes beside a model in the folder that it was loaded from, under their full names.

    Args:
        model: Of transformers.
        folder: In one of `FORMATS`; None where it is not known.

    Returns:
        A module of quantized layers, its `quant_plan` what they have; None where there are none.

    Raises:
        FormatError: A tensor of such a layer is corrupt, missing, or of a shape that fits no weight.
    """
    if folder is None or folder.method not in (*FORMATS, *AUTO_ROUND) or not any(folder.path.glob("*.safetensors")):
        return None
    files = _Files(model, folder)
    stored = read_quantization_config(folder)
    form: Format = FORMATS[stored["quant_method"]]
    layers = {parent: parts for parent, parts in files.by_layer(form).items() if SCALE in parts}
    if not layers:
        return None
    module = nn.Module()
    for name in layers:
        _put(module, name, nn.Linear(1, 1, bias=False, device="meta"))
    content: Stored = FORMATS[stored["quant_method"]].read(stored, set(layers), module)
    form, choice = content.form or form, chooser(content.config, module)
    layers = {parent: parts for parent, parts in files.by_layer(form).items() if SCALE in parts}
    real = content.weight_format == "real_quantized"
    for name, parts in layers.items():
        spec = choice.spec(name, nn.Linear)
        if spec.weight is None:
            raise FormatError(f"{name} is stored as codes, but the config of {folder.path} does not give their type.")
        layout = form.make_layout(spec.weight, spec, model.dtype, content.pack_method, real)
        rows, columns = _float_shape(name, parts, spec, layout)
        bias = "bias" in parts
        set_submodule(module, name, nn.Linear(columns, rows, bias=bias, device="meta", dtype=model.dtype))
    load_stored(module, form, replace(content, dtype=model.dtype), files.tensors(layers))
    return module


class _Files:
    """The tensors that a folder holds and a model's class does not build."""

    def __init__(self, model: Any, folder: OpenedFolder) -> None:
        stored = {name: file for file in folder.files for name in file.names}
        self.dropped = {name: stored[name] for name in dropped_names(model, stored)}

    def by_layer(self, form: Format) -> dict[str, dict[str, torch.Tensor]]:
        """Layer -> leaf, as quark folders have it -> what is stored there, on the meta device."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, file in self.dropped.items():
            named = form.received(name, file.meta(name))
            if named is not None:
                parent, _, leaf = named[0].rpartition(".")
                found.setdefault(parent, {})[leaf] = named[1]
        return found

    def tensors(self, layers: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name in the file, and tensor, of everything that belongs to these layers."""
        for name, file in self.dropped.items():
            if name.rpartition(".")[0] in layers:
                yield name, file.read(name)


def _float_shape(name: str, parts: Mapping[str, torch.Tensor], spec: LayerSpec, layout: Layout) -> tuple[int, int]:
    """The shape of the weight of which a layout stores tensors of just these shapes."""
    stored = {suffix: parts[leaf].shape for leaf, suffix in _SUFFIXES.items() if leaf in parts}
    assert spec.weight is not None
    rows, columns = parts["weight"].shape
    per_code = parts["weight"].dtype.itemsize * 8 / spec.weight.dtype.bits
    sides = [(rows, columns), (rows, int(columns * per_code)), (int(rows * per_code), columns)]
    for shape in dict.fromkeys((*sides, *(side[::-1] for side in sides))):
        try:
            made = stored_like(layout, spec.weight, torch.empty(shape, dtype=layout.model_dtype, device="meta"))
        except (RuntimeError, ValueError, QuarkError):  # groups or words do not divide it
            continue
        same = all(suffix in made and made[suffix].numel() == size.numel() for suffix, size in stored.items())
        if same and made[""].shape == stored[""]:
            return shape
    raise FormatError(f"{name}: the stored weight of shape {tuple(parts['weight'].shape)} fits no shape of a layer.")


_SUFFIXES = {"weight": "", SCALE: "scale", "weight_zero_point": "zero_point", "weight_scale_2": "scale_2"}
"""Leaf -> suffix in what a layout stores."""


def _put(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer into a tree of modules, under its full name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(leaf, layer)
