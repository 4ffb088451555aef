"""The functions that transformers' quark integration calls before it loads a checkpoint.

The model may be of another class than the folder was saved from: the text model of a composite, or one without head.

    layer of the file  --(renamings of transformers)-->  layer of the model

What a config says by the name in the file is said by the name in the model, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.json_objects import plain_json
from quark.base.libraries.transformers import (
    APART,
    conversions,
    file_in_cache,
    has_values,
    let_adapters_train,
    merged_as,
    mergers,
    revision_of,
    set_tied_weights,
    tied_weights,
    transformers_version,
)
from quark.core.names.patterns import first_match, matches_any
from quark.errors import FormatError, NotSupportedError
from quark.torch.checkpoint.loading import REAL_QUANTIZED, map_to_stored, mark_loaded
from quark.torch.checkpoint.shards import read_names, read_tensors
from quark.torch.checkpoint.stored_tensors import stored_tensors
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS
from quark.torch.layers import ROLES, QuantLayer
from quark.torch.layers.base import EXTRA_SUFFIXES
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.folder_files import regular_file, shard_files
from quark.torch.model.meta_model import named_dtype
from quark.torch.model.model_folder import read_config
from quark.torch.model.names import layers_in_model, merged_names, names_in
from quark.torch.model.passes import UnfusedExperts


def _map_to_quark(
    model: nn.Module, quantization_config: QConfig, pack_method: str = "reorder", custom_mode: str = "quark"
) -> nn.Module:
    """Replace layers of a (meta) model by the modules that hold the checkpoint's tensors.

    The name is the one that transformers imports.
    """
    if custom_mode != "quark":
        raise NotSupportedError(f"custom_mode={custom_mode!r} checkpoints are loaded by transformers' own quantizers.")
    folder = _folder_of(model)
    files = shard_files(folder)
    find = names_in(model)
    stored = {find(name): name for name in read_names(files)}
    config = _config_for(model, quantization_config, stored.values())
    _refuse_scales(model, stored)
    map_to_stored(model, config, pack_method, config.weight_format or REAL_QUANTIZED)
    mark_loaded(model, config, "quark")
    let_adapters_train()
    # Their tensors are in the files; of a part on the disk transformers would draw codes. Buffers that are in no file,
    # as the factor of a table, their class computes.
    for layer in quantized_layers(model).values():
        has_values(layer, not layer._non_persistent_buffers_set)
    _untie(model)
    # transformers makes up what is missing, and casts what is of another dtype: all is checked before it loads.
    stored_tensors(model, FORMATS["quark"], read_tensors(files), named_dtype(read_config(folder)), partial=True)
    # A place for what the loader merges of the experts of each block.
    blocks = {f"{n}.0.{m.names[2]}.weight": m for n, m in model.named_modules() if isinstance(m, UnfusedExperts)}
    merged, rules = merged_names(model, blocks, stored), mergers(conversions(model))
    for name, block in blocks.items():
        kinds = [kind for kind in KINDS if merged_as(f"{name}{kind}", rules)[1] is not None]
        ReceivingExperts.stack(block, [kind for kind in kinds if kind or name in merged])
    keep_from_drawing(model, [name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)])
    return model


def keep_from_drawing(model: nn.Module, blocks: Iterable[str]) -> None:
    """Let transformers pass over the modules around unfused experts when it draws what files lack.

    Qwen 3 Omni would draw the merged weights from there, which are not in them.
    """
    for name in blocks:
        around: Any = model.get_submodule(name.rpartition(".")[0])
        if not any(True for _ in around.parameters(recurse=False)):
            has_values(around)


def _refuse_scales(model: Any, stored: Mapping[str, str]) -> None:
    """Refuse a class that has another name for a float tensor that is called like the scale of a quantized layer.

    Of Gemma 3n the text model has `correct_output_scale`. transformers takes the end of such a name for that of a
    quantizer unless the file has the name of the class, and would make the tensor up.
    """
    ends = tuple(f"{role}_{kind}" for role in ROLES for kind in ("scale", "zero_point"))
    own = model.state_dict()
    for name, file in stored.items():
        if name.endswith(ends) and name in own and file not in own:
            raise FormatError(
                f"{type(model).__name__} calls {file} {name}, and transformers would take the name in the file for a "
                f"scale. Possible: the class of the folder ({', '.join(model.config.architectures or ())}), or "
                "import_model_from_safetensors with the float model."
            )


def _untie(model: Any) -> None:
    """Let weights that quantized layers hold be their own, where the float model has one for two blocks.

    Each was quantized for the inputs of its block and is in the files; tied, one would get the codes of the other.
    """
    ties = tied_weights(model)
    if ties:
        codes = {f"{name}.weight" for name in quantized_layers(model)}
        merged = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, UnfusedExperts))
        kept = {name: other for name, other in ties.items() if name not in codes and not name.startswith(merged)}
        set_tied_weights(model, kept)


def _folder_of(model: Any) -> Path:
    """The folder that transformers is about to load: the one that was named, or a snapshot in its cache."""
    name = model.name_or_path
    if name and not Path(name).is_dir():
        found = file_in_cache(name, "config.json", revision_of(model.config))
        name = str(Path(found).parent) if found else ""
    if not name:
        raise FormatError(
            f"The files of {model.name_or_path or 'this checkpoint'} were not found under its name, so they cannot be "
            "checked before they are loaded. Possible: from_pretrained with the path of their folder."
        )
    return _with_subfolder(Path(name))


def _with_subfolder(folder: Path) -> Path:
    """The folder itself, or the one of its folders that quark quantized: `subfolder=` is not told to quantizers."""
    if (folder / "config.json").is_file():
        return folder
    found = [path.parent for path in sorted(folder.glob("*/config.json")) if _is_quantized(path)]
    if len(found) > 1:
        raise FormatError(
            f"{folder} has several quantized models: {', '.join(path.name for path in found)}. Possible: "
            "from_pretrained with the path of one of them, without subfolder."
        )
    return found[0] if found else folder


def _is_quantized(config: Path) -> bool:
    found = plain_json(regular_file(config).read_text(encoding="utf-8"))
    return isinstance(found, dict) and "model_type" in found and bool(found.get("quantization_config"))


_MERGED = ("gate_up_proj", "up_proj", "down_proj")
"""The names of transformers for the merged weights."""
KINDS = ("", "_scale", "_zero_point", *(f"_{suffix}" for suffix in EXTRA_SUFFIXES))
"""Ends of the names of what is stored of a weight. Before 5.21 transformers merges all of it as it does the weights."""


class ReceivingExperts(UnfusedExperts):
    """Unfused experts that take stored tensors from transformers' loader, which merges those of all experts.

    `gate_up_proj` holds the stored rows of gate and up of each expert, `down_proj` those of down, `down_proj_scale` the
    scales of these: whatever their encoding, merging stacks and concatenates rows. What arrives is handed out to the
    experts as views.
    """

    @classmethod
    def stack(cls, experts: UnfusedExperts, kinds: Iterable[str]) -> None:
        """Turn experts on the meta device into receiving ones.

        Args:
            experts: Of a block.
            kinds: Of KINDS, what arrives merged; the rest has a place of its own.

        Raises:
            NotSupportedError: The experts are stored in several ways, so that they cannot be merged.
        """
        for kind in kinds:
            experts.__class__ = cls
            for target, leaves in {experts.first: experts.names[:2], "down_proj": experts.names[2:]}.items():
                names = [f"{index}.{leaf}" for index in range(experts.count) for leaf in leaves if leaf]
                places = [_place(experts, name, kind) for name in names]
                tensors = [table.pop(name) for table, name in places if table.get(name) is not None]
                if tensors:
                    shape = _merged_shape(experts, target + kind, tensors, len(names))
                    merged = torch.empty(shape, dtype=tensors[0].dtype, device="meta")
                    experts.register_parameter(target + kind, nn.Parameter(merged, requires_grad=False))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        target = next((each for each in _MERGED if name.startswith(each)), "")
        if target and isinstance(value, nn.Parameter) and not value.is_meta:
            self._hand_out(target, name.removeprefix(target), value)

    def _hand_out(self, target: str, kind: str, merged: nn.Parameter) -> None:
        leaves = [leaf for leaf in (self.names[2:] if target == "down_proj" else self.names[:2]) if leaf]
        for index, rows in enumerate(merged.detach()):
            for leaf, part in zip(leaves, rows.chunk(len(leaves)) if len(leaves) > 1 else (rows,), strict=True):
                stored = part if kind else nn.Parameter(part, requires_grad=False)
                has_values(stored)
                table, name = _place(self, f"{index}.{leaf}", kind)
                table[name] = stored
        del self._parameters[target + kind]
        if not self._parameters:
            self.__class__ = UnfusedExperts  # type: ignore[assignment]


def _place(experts: UnfusedExperts, name: str, kind: str) -> tuple[dict[str, Any], str]:
    """The table that holds a stored tensor of an expert's layer, and its name there; a float layer has the weight."""
    layer = experts.get_submodule(name)
    if not kind:
        return layer._parameters, "weight"
    if kind.removeprefix("_") in EXTRA_SUFFIXES or not isinstance(layer, QuantLayer):
        return layer._buffers, f"weight{kind}"
    return layer.get_submodule("weight_quantizer")._buffers, kind.removeprefix("_")


def _merged_shape(experts: UnfusedExperts, name: str, tensors: list[torch.Tensor], layers: int) -> tuple[int, ...]:
    """The shape of what transformers makes of tensors of all experts: stacked, and joined along their first axis.

    Raises NotSupportedError where they differ, where not all of so many layers have one, or where they have no axis.
    """
    stored, each = {(tuple(x.shape), x.dtype) for x in tensors}, layers // experts.count
    if len(stored) > 1 or len(tensors) < layers:
        raise NotSupportedError(
            f"transformers merges the experts of this model when it loads them, but they differ in shape or "
            f"type: {sorted(map(str, stored))}. Possible: import_model_from_safetensors with the float model."
        )
    ((shape, _),) = stored
    if not shape and each > 1:
        raise NotSupportedError(
            f"transformers {transformers_version()} merges what is stored of the experts of this model, and cannot "
            f"join single numbers ({name}). Possible: transformers {APART} or newer, or "
            "import_model_from_safetensors with the float model."
        )
    return (experts.count, shape[0] * each, *shape[1:]) if shape else (experts.count,)


# A model of another class ---------------------------------------------------------------------------------------------


def _config_for(model: Any, config: QConfig, stored: Iterable[str]) -> QConfig:
    """The config of a folder for a model, which may be of another class than that of the folder.

    Args:
        model: On the meta device; its `config` is that of the folder, or of a part of it.
        config: As stored; its excludes are resolved names.
        stored: Names of the tensors in the files.
    """
    if type(model).__name__ in (getattr(model.config, "architectures", None) or ()):
        return config
    other = {layer: name for layer, name in _layers(model, stored) if layer != name}
    excluded = [name for layer, name in other.items() if _excludes(config.exclude, layer)]
    named = {}
    for layer, name in other.items():
        found = first_match(layer, config.layer_quant_config)
        if found is not None and first_match(name, config.layer_quant_config) is not found:
            named[name] = found
    return replace(
        config,
        exclude=list(dict.fromkeys((*config.exclude, *excluded))),
        layer_quant_config=_first(named, config.layer_quant_config),
    )


def _layers(model: Any, stored: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each layer of the files, and its name in the model."""
    find = layers_in_model(model)
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in stored):
        yield layer, find(layer)


def _excludes(exclude: Iterable[str], layer: str) -> bool:
    literal = {name for name in exclude if not re.search(r"[*?\[]|^re:", name)}
    return layer in literal or matches_any(layer, [name for name in exclude if name not in literal])


def _first(named: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Rules, of which the first that matches counts, after those for single layers."""
    return {**named, **{key: value for key, value in rules.items() if key not in named}}
