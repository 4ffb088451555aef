"""What transformers' own loader finds of a folder: known from the names of its tensors, without their values.

    name in the file  --(renamings, then mergers of transformers)-->  tensor of the class that `architectures` names

A loader makes up what it does not find, and leaves out what it does not know, with no more than a line of its log. So a
folder of which it would find less than all is refused here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch.formats.format import Folder, FolderFormat
from quark.torch.layers.online_rotation import BUFFER
from quark.torch.model.meta_model import empty_twin
from quark.torch.model.names import is_transformers_model, loaded_as, published_names
from quark.torch.model.passes import UnfusedExperts

SHOWN = 3
"""How many names an error lists."""


def check_readers(model: nn.Module, form: FolderFormat, folder: Folder, tensors: Iterable[str]) -> None:
    """Refuse a folder of which transformers would not find everything.

    Args:
        model: The quantized model, with or without weights.
        form: The format.
        folder: What is quantized.
        tensors: Names of what is stored, in the module; of these the tensors of the float model are looked for.

    Raises:
        NotSupportedError: Names tensors that would be missing, or layers that the class cannot be built with.
    """
    if not is_transformers_model(model):
        return
    twin = empty_twin(model) if form.own_loader else _as_loaded(empty_twin(model))
    _check_names(model, twin, form, tensors)
    _check_building(twin, form, folder.specs)


def _as_loaded(twin: Any) -> Any:
    """The model with experts that transformers itself takes apart before it loads a quantized folder (Llama 4)."""
    base = sys.modules.get("transformers.quantizers.base")
    patches = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    for name, module in list(twin.named_modules()):
        if (patch := patches.get(type(module).__name__)) is not None:
            with torch.device("meta"):
                twin.set_submodule(name, patch["module_name"](twin.config.get_text_config()))
    return twin


def _check_names(model: nn.Module, twin: Any, form: FolderFormat, tensors: Iterable[str]) -> None:
    """Refuse where the float tensors under their published names are not all that the class loads, and nothing else."""
    publish, own, here = published_names(model), dict(twin.state_dict()), set(model.state_dict())
    # Experts that our own hooks take apart before transformers loads them.
    apart = here if form.own_loader else set()
    inside = (
        tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, UnfusedExperts)) if form.own_loader else ()
    )
    target = loaded_as(twin, own)
    found = {name: target(name) for name in map(publish, here.intersection(tensors)) if not name.endswith(BUFFER)}
    lost = sorted(name for name, to in found.items() if to not in own and name not in apart and to not in apart)
    there = set(found.values())
    ties = getattr(twin, "all_tied_weights_keys", None) or {}
    there |= {one for pair in ties.items() if there.intersection(pair) for one in pair}
    optional = getattr(twin, "_keys_to_ignore_on_load_missing", None) or []
    missing = sorted(
        name
        for name in own
        if name not in there and not name.startswith(inside) and not any(re.search(p, name) for p in optional)
    )
    if lost or missing:
        raise NotSupportedError(
            f"transformers would not find the tensors of this {form.name} folder: {type(model).__name__} "
            f"{_listed('has no place for', lost)}{' and ' if lost and missing else ''}"
            f"{_listed('would make up', missing)}. Possible: {'' if form.own_loader else 'the quark format, or '}"
            f"to leave them in float ({_excluding(missing or lost)})."
        )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{what} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"


def _excluding(names: list[str]) -> str:
    """How to leave the modules of some tensors in float."""
    modules = dict.fromkeys(name.split(".")[-2] for name in names if "." in name)
    return " ".join(f"--exclude '*{module}*'" for module in modules) or "--exclude"


def _check_building(twin: Any, form: FolderFormat, specs: Mapping[str, LayerSpec]) -> None:
    """Refuse layers whose codes have another name than `weight`, in a model whose class reads it as it is built."""
    quantized = ((name, form.stored_name(f"{name}.weight", "", spec)) for name, spec in specs.items() if spec.weight)
    hidden = [name for name, stored in quantized if not stored.endswith(".weight")]
    if form.own_loader or not hidden:
        return
    for tensor in twin.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    modules = dict(twin.named_modules())
    for name in hidden:
        if name in modules:  # an expert is fused with others, and no module
            modules[name]._parameters.pop("weight", None)
    try:
        twin.initialize_weights()
    except AttributeError as error:
        raise NotSupportedError(
            f"transformers cannot build {type(twin).__name__} with the {form.name} format: the class reads the weight "
            f"of a layer that holds codes there ({error}). Possible: the quark format, or 8-bit weights with inputs, "
            "which are stored as `weight`."
        ) from error
