"""The tensors that transformers' own loader finds in a folder: known from their names, without their values.

    name in the file  --(renamings, then mergers of transformers)-->  tensor of the class that `architectures` names

A loader makes up what it does not find, and leaves out what it does not know, with no more than a line of its log. So a
folder of which it would find less than all is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.base.libraries.diffusers import is_network
from quark.base.libraries.transformers import (
    always_float32,
    any_of,
    conversions,
    draw_missing,
    has_values,
    is_conv1d,
    is_transformers_model,
    parts_of_codes,
    patched_experts,
    tied_weights,
)
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.goals.expert_names import expert_names
from quark.torch.formats.format import Folder, FolderFormat
from quark.torch.layers.online_rotation import BUFFER
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.meta_model import meta_copy
from quark.torch.model.names import (
    OtherForm,
    found_by,
    layers_published,
    models_of_other_classes,
    names_in,
    names_of_files,
    published_names,
)
from quark.torch.model.passes import UnfusedExperts
from quark.torch.model.tied_weights import first_names

_SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Reader -> its name in the tables of facts."""
TRANSFORMERS = "transformers"
READERS = (TRANSFORMERS, *_SERVERS)
"""Programs that a folder may be made for, where that decides what it may hold."""
WEIGHT = ".weight"
SHOWN = 3
"""How many names an error lists."""


def check_readers(
    model: nn.Module,
    form: FolderFormat,
    folder: Folder,
    tensors: Iterable[str],
    reader: str = TRANSFORMERS,
    forms: Sequence[OtherForm] = (),
) -> str | None:
    """Refuse a folder of which its reader would not find everything.

    Args:
        model: The quantized model, with or without weights.
        form: The format.
        folder: What is quantized.
        tensors: Names of what is stored, in the module; of these the tensors of the float model are looked for.
        reader: Of READERS. Those of servers take experts one by one where transformers' knows them in one tensor
            alone; where it is not known which experts they find, and of all other tensors, its rules are theirs.
        forms: What published files hold in other tensors than the model; these do where `read_forms` says so.

    Returns:
        What transformers would decode wrongly, or a server not find, a sentence; None where there is nothing.

    Raises:
        NotSupportedError: Names tensors that would be missing, or layers that the class cannot be built with.
    """
    read = read_forms(forms, form, reader)
    undecoded = _undecoded(model, form, folder, forms, reader)
    if is_network(model):
        meta = meta_copy(model)
        _check_network(model, meta, tensors)
        check_shapes(model, meta, "diffusers would not load this folder")
    if not is_transformers_model(model):
        return undecoded
    meta = meta_copy(model)
    check_shapes(model, meta, f"{_SERVERS.get(reader, TRANSFORMERS)} would not load this folder")
    publish = published_names(meta)
    of_float = [*map(publish, first_names(meta))]
    meta = _as_loaded(meta, form)
    names = _float_names(model, tensors, read)
    if reader in _SERVERS and (blocks := _of_server(model, form, _SERVERS[reader])):
        inside = tuple(f"{block}." for block in blocks)
        outside = [name for name in names if not name.startswith(inside)]
        _check_names(model, meta, form, names_of_files(model, outside, read), inside)
        return undecoded
    files = names_of_files(model, names, read)
    _check_names(model, meta, form, files, tuple(f"{n}." for n in _apart(model)) if form.own_loader else ())
    if reader not in _SERVERS and not form.own_loader:  # by the class itself
        _check_building(meta, form, folder.specs)
        _check_ties(meta, form, folder)
        _check_conversions(meta, form, folder.specs)
    for other in models_of_other_classes(model):
        if not found_by(other, of_float).missing:  # it finds all of the float folder
            _check_other(model, _as_loaded(other, form), form, files)
    return undecoded


def read_forms(forms: Sequence[OtherForm], form: FolderFormat, reader: str = TRANSFORMERS) -> list[OtherForm]:
    """The other forms that a reader of a format puts together again; what it does not is stored as the model has it."""
    return [each for each in forms if form.joins_float or reader in _SERVERS or not each.of_weights]


def _float_names(model: nn.Module, tensors: Iterable[str], forms: Sequence[OtherForm]) -> list[str]:
    """The tensors of the float model among those that are stored."""
    stored = set(tensors)
    stored.update(name for form in forms if form.members[0] in stored for name in form.members)
    return [name for name in stored.intersection(model.state_dict()) if not name.endswith(BUFFER)]


def _undecoded(
    model: nn.Module, form: FolderFormat, folder: Folder, forms: Sequence[OtherForm], reader: str
) -> str | None:
    """Return what `check_readers` does. Raises NotSupportedError for a folder that its own server does not read."""
    unread = form.unread(folder)
    if reader not in _SERVERS:
        joined = _joined_said(forms, read_forms(forms, form, reader), form)
        scales = None if form.joins_float else _scales_in_float32(model, folder)
        said = (f"{unread}." if unread else None, form.undecoded(folder), joined, scales)
        return " ".join(filter(None, said)) or None
    if unread is not None:
        raise NotSupportedError(f"This folder is for {_SERVERS[reader]}, and {unread}.")
    return None


def _scales_in_float32(model: Any, folder: Folder) -> str | None:
    """Return a sentence about scales that transformers loads in float32, as a pattern of the class is for their names.

    Its loader decodes such weights to float32, beside inputs in the type of the model.
    """
    patterns = always_float32(model)
    if not patterns or getattr(model, "dtype", None) not in (torch.float16, torch.bfloat16):
        return None
    wide = any_of(patterns)
    found = [layer for layer in folder.specs if wide.search(f"{layer}.weight_scale")]
    if not found:
        return None
    return (
        f"transformers loads the scales of {found[0]} and {len(found) - 1} more in float32, as "
        f"{type(model).__name__} asks for it by a part of their names: weights that it decodes are float32 then, and "
        "inputs are not, so that it fails. quark reads them. For transformers: the quark format."
    )


def _joined_said(forms: Sequence[OtherForm], read: Sequence[OtherForm], form: FolderFormat) -> str | None:
    """Return a sentence about float tensors that a folder holds together, and published ones apart, for servers."""
    joined = [each for each in forms if all(each is not other for other in read)] if len(read) < len(forms) else []
    if not joined:
        return None
    return (
        f"{joined[0].members[0]} and {len(joined) - 1} more are stored as transformers finds them in {form.name} "
        f"folders, and not as published ones hold them ({next(iter(joined[0].files))}), which servers look for. For "
        f"these: {' or '.join(f'--for {name} (reader={name!r})' for name in _SERVERS)}."
    )


def _apart(model: nn.Module) -> dict[str, UnfusedExperts]:
    """The blocks of experts that were taken apart."""
    return {name: module for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}


def _of_server(model: Any, form: FolderFormat, program: str) -> list[str]:
    """The blocks of experts that a server is known to read one by one from a folder, and transformers not."""
    row, publish = expert_names(str(model.config.model_type), program), layers_published(model)
    if row is None or form.own_loader or not row.other_formats:
        return []
    return [block for block, each in _apart(model).items() if row.finds(publish(f"{block}.0.{each.names[2]}"))]


def _as_loaded(meta: Any, form: FolderFormat) -> Any:
    """The model with experts that transformers itself takes apart before it loads a quantized folder (Llama 4)."""
    if form.own_loader:
        return meta
    for name, module in list(meta.named_modules()):
        if (patched := patched_experts(type(module).__name__)) is not None:
            with torch.device("meta"):
                meta.set_submodule(name, patched(meta.config.get_text_config()))
    return meta


def _check_network(model: Any, meta: Any, tensors: Iterable[str]) -> None:
    """Refuse where a network as diffusers builds it has layers that are not stored, or others: they were changed."""
    own, stored = dict(meta.state_dict(keep_vars=True)), {*tensors}
    there = {id(x) for name, x in own.items() if name in stored}
    missing = [name for name, x in own.items() if id(x) not in there]
    lost = sorted(name for name in stored.difference(own) if name.endswith((WEIGHT, ".bias")))
    inside = tuple(f"{name}." for name in _apart(model))
    for verb, names in (("would lack", missing), ("has no place for", lost)):
        names = [name for name in names if not name.startswith(inside)]
        if names:
            raise NotSupportedError(
                f"diffusers would not load this folder: {type(model).__name__}, as its config builds it, {verb} "
                f"{', '.join(names[:SHOWN])}{' ...' if names[SHOWN:] else ''}. Possible: to undo what was changed in "
                "the network since it was built (unfuse_qkv_projections, unload_lora_weights)."
            )


def check_shapes(model: nn.Module, meta: nn.Module, consequence: str) -> None:
    """Refuse a model of which a tensor has another shape than its config calls for: no class builds it again.

    Args:
        model: As it is; of quantized layers the float shapes count.
        meta: As its config builds it, without weights. Experts that were taken apart have other names there.
        consequence: The beginning of the error: who would not load what.

    Raises:
        NotSupportedError: Names a tensor and both shapes.
    """
    layers, built_as = quantized_layers(model), dict(meta.named_modules())
    turned = {f"{name}.weight" for name in layers if is_conv1d(built_as.get(name))}  # it is a linear layer here
    shapes = {name: tuple(x.shape) for name, x in model.state_dict(keep_vars=True).items()}
    for name, layer in layers.items():
        for role in ("weight", "bias"):
            if (like := getattr(layer.quantizer(role), "float_like", None)) is not None:
                shapes[f"{name}.{role}"] = tuple(like.shape)
    for name, x in meta.state_dict().items():
        built = tuple(x.shape[::-1] if name in turned else x.shape)
        if shapes.get(name, built) != built:
            raise NotSupportedError(
                f"{consequence}: {name} has shape {shapes[name]}, and {type(meta).__name__}, as "
                f"its config builds it, {built}. Possible: the number in the config that says so (after "
                "resize_token_embeddings of transformers it is there)."
            )


def _check_names(
    model: nn.Module, meta: Any, form: FolderFormat, files: Iterable[str], inside: tuple[str, ...]
) -> None:
    """Refuse where the float tensors under their names in the files are not all that the class loads, and nothing else.

    Args:
        model, meta: As it is, and as its loader begins with it.
        form: For the message.
        files: The names.
        inside: Beginnings of names of experts that are taken apart before they are loaded.
    """
    apart = set(model.state_dict()) if form.own_loader else set()
    found = found_by(meta, files)
    lost = [name for name in found.lost if name not in apart and found.places[name] not in apart]
    missing = [name for name in found.missing if not name.startswith(inside)]
    if lost or missing:
        raise _unfound(model, type(model).__name__, form, lost, missing)


def _check_other(model: nn.Module, meta: Any, form: FolderFormat, files: Iterable[str]) -> None:
    """Refuse where another class, which finds the float folder whole, would make up tensors of this one."""
    publish, find = published_names(model), names_in(meta)
    # The name of the weight of a layer of an expert, without the expert, the layer and the weight.
    blocks = _apart(model).items() if form.own_loader else ()
    inside = tuple(find(publish(f"{n}.0.{m.names[2]}.weight")).rsplit(".", 3)[0] + "." for n, m in blocks)
    missing = [name for name in found_by(meta, files).missing if not name.startswith(inside)]
    if missing:
        raise _unfound(model, type(meta).__name__, form, [], missing)


def _unfound(model: nn.Module, kind: str, form: FolderFormat, lost: list[str], missing: list[str]) -> NotSupportedError:
    other = "" if form.own_loader else "the quark format, or "
    if readers := [name for name, program in _SERVERS.items() if _of_server(model, form, program)]:
        goals = " or ".join(f"--for {name} (reader={name!r})" for name in readers)
        other = f"{goals}, which {'reads' if len(readers) == 1 else 'read'} such experts; {other}"
    modules = dict.fromkeys(name.split(".")[-2] for name in missing or lost if "." in name)
    excluding = " ".join(f"--exclude '*{module}*'" for module in modules) or "--exclude"
    return NotSupportedError(
        f"transformers would not find the tensors of this {form.name} folder: {kind} "
        f"{_listed('has no place for', lost)}{' and ' if lost and missing else ''}"
        f"{_listed('would make up', missing)}. Possible: {other}"
        f"to leave them in float ({excluding})."
    )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{what} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"


def _check_building(meta: Any, form: FolderFormat, specs: Mapping[str, LayerSpec]) -> None:
    """Refuse layers whose codes have another name than `weight`, in a model whose class reads it as it is built."""
    quantized = ((name, form.stored_name(f"{name}.weight", "", spec)) for name, spec in specs.items() if spec.weight)
    hidden = [name for name, stored in quantized if not stored.endswith(".weight")]
    if not hidden:
        return
    for tensor in meta.state_dict(keep_vars=True).values():
        has_values(tensor)
    modules = dict(meta.named_modules())
    for name in hidden:
        if name in modules:  # an expert is fused with others, and no module
            modules[name]._parameters.pop("weight", None)
    try:
        draw_missing(meta)
    except AttributeError as error:
        raise NotSupportedError(
            f"transformers cannot build {type(meta).__name__} with the {form.name} format: the class reads the weight "
            f"of a layer that holds codes there ({error}): {hidden[0]}, for one. Possible: the quark format; --for "
            "vllm (reader='vllm'), whose classes do not; for a linear layer, 8-bit weights with inputs, which are "
            "stored as `weight`."
        ) from error


def _check_ties(meta: Any, form: FolderFormat, folder: Folder) -> None:
    """Refuse layers with codes whose weights the class shares with others, as the config that is written says it to."""
    if folder.heads or folder.embeddings:
        return  # of which the config says that nothing is shared
    for name, other in tied_weights(meta).items():
        layers = (each.removesuffix(WEIGHT) for each in (name, other))
        if layer := next((each for each in layers if each in folder.specs), None):
            raise NotSupportedError(
                f"transformers would give {name} the values of {other} as it loads this {form.name} folder, where "
                f"{layer} holds codes. Possible: the quark format; to leave the layer in float (--exclude '{layer}')."
            )


def _check_conversions(meta: Any, form: FolderFormat, specs: Mapping[str, LayerSpec]) -> None:
    """Refuse where transformers parts one tensor of published files into several, and cannot for this format.

    Its loaders of codes look for a scale beside each tensor that they convert (`serialized_names`), so of one source
    they make several; a conversion has several sources or several results, and it refuses one that has both.
    """
    for conversion in conversions(meta) if len(parts_of_codes(form.name)) > 1 else ():
        sources, targets = conversion.source_patterns, conversion.target_patterns
        if len(targets) < 2 or not all(source.endswith(WEIGHT) for source in sources):
            continue
        if not any(f"{name}{WEIGHT}".endswith(targets[0]) for name in specs):
            raise NotSupportedError(
                f"transformers cannot load {type(meta).__name__} in the {form.name} format: it parts {sources[0]} of "
                f"files into {', '.join(targets)}, and cannot where there may be codes. Possible: the quark format; "
                "--for vllm (reader='vllm')."
            )
