"""The `compressed-tensors` format: the folder that transformers (with the package of that name) and vLLM read.

`config_groups` has one entry for each distinct scheme; the only one targets "Linear", several name their layers.
Each says how weights and inputs are quantized (bits, type, strategy) and how the weights lie in the file:

    pack-quantized         integer weights, float inputs   int-quantized      integer weights and inputs
    float-quantized        float8 weights and inputs       naive-quantized    float8 weights alone
    mxfp4-pack-quantized   mxfp6-pack-quantized   mxfp8-quantized   nvfp4-pack-quantized
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.base.libraries.compressed_tensors import MXFP6, THREE_BITS, TILES, undecoded_before, unread_caches
from quark.base.libraries.transformers import is_conv1d
from quark.core.granularity import PerBlock
from quark.core.names.patterns import matches_any
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import FormatError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.compressed_tensors.args import CACHE, FORMATS_OF_FLOATS, read_args, refuse_args, write_args
from quark.torch.formats.compressed_tensors.embeddings import (
    ONLY_TARGET,
    check_embeddings,
    refuse_embedding,
)
from quark.torch.formats.compressed_tensors.experts import (
    check_experts,
    group_targets,
    ignored_experts,
    undecoded_experts,
)
from quark.torch.formats.compressed_tensors.layout import CompressedTensorsLayout, signed
from quark.torch.formats.compressed_tensors.transforms import (
    STORED,
    read_transforms,
    received_rotation,
    refuse_rotations,
    write_transforms,
)
from quark.torch.formats.format import (
    POST_ROPE,
    Folder,
    FolderFormat,
    Named,
    Stored,
    kv_name,
    kv_source,
    require,
    require_whole_groups,
    with_cache,
)
from quark.torch.formats.layout import Layout
from quark.torch.layers.online_rotation import BUFFER
from quark.torch.model.names import layers_in_model

_SHAPE = "weight_shape"
_GLOBAL_SCALES = {"weight_scale_2": "weight_global_scale", "input_scale_2": "input_global_scale"}
FORMS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "nvfp4-pack-quantized", "mixed-precision"),
)
"""Forms of tensors that are read; the last says that each group has its own."""
PACKED = ("pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "nvfp4-pack-quantized")


def young_kind(spec: LayerSpec) -> str | None:
    """Return the key of `SINCE` for a layer that only newer compressed-tensors decode; None where all do."""
    assert spec.weight is not None
    if spec.weight.dtype.name == "int3":
        return THREE_BITS
    if isinstance(spec.weight.granularity, PerBlock):
        return TILES
    return MXFP6 if any(each and each.dtype.name.startswith("fp6") for each in (spec.weight, spec.input)) else None


class CompressedTensorsFormat(FolderFormat):
    """Folders with `quant_method` "compressed-tensors"."""

    name = "compressed-tensors"
    layout = CompressedTensorsLayout
    cache = ("fp8_e4m3", "int8")
    cache_heads = True
    cache_apart = True
    marker = (".weight_scale",)
    # Its source (5.23, CompressedTensorsDequantize): of what a conversion collects it keeps what is packed alone.
    joins_float = False

    def refusal(self, spec: LayerSpec) -> str | None:
        if spec.weight is None:
            return "layers whose weights stay in float"
        if spec.bias or spec.output:
            return "quantized biases or outputs"
        reason = refuse_args(spec.weight, "weight") or (refuse_args(spec.input, "input") if spec.input else None)
        return reason or (None if _compression(spec) else f"{spec}")

    def refuse_layer(self, name: str, layer: nn.Module, spec: LayerSpec) -> None:
        """Embeddings are refused where vLLM would not read them."""
        if isinstance(layer, nn.Embedding) and self.refusal(spec) is None:
            refuse_embedding(name, layer, spec)
        else:
            super().refuse_layer(name, layer, spec)

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        super().check(layers, folder)
        check_embeddings(folder)
        check_experts(folder)
        for name, spec in folder.specs.items():
            require_whole_groups(self.name, name, layers[name], spec)

    def undecoded(self, folder: Folder) -> str | None:
        kinds = {kind for spec in folder.specs.values() if (kind := young_kind(spec)) is not None}
        caches = unread_caches() if folder.cache_specs else None
        return " ".join(filter(None, (undecoded_experts(folder), undecoded_before(kinds), caches))) or None

    def check_rotations(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        refuse_rotations(layers, folder.rotated)

    def make_layout(
        self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype, pack_method: str, real: bool
    ) -> Layout:
        return CompressedTensorsLayout(spec, dtype, packed=layer.weight is not None and _compression(layer) in PACKED)

    def describe(self, folder: Folder) -> dict[str, Any]:
        groups: dict[LayerSpec, list[str]] = {}
        for name, spec in folder.specs.items():
            if name not in folder.embeddings:
                groups.setdefault(spec, []).append(name)
        every = ["Linear", *folder.forms(folder.heads)]  # vLLM does not take an output head for a Linear
        found = [_group(s, every if len(groups) == 1 else group_targets(names, folder)) for s, names in groups.items()]
        found += [_group(folder.specs[name], [ONLY_TARGET]) for name in folder.embeddings[:1]]
        entries = {f"group_{i}": entry for i, entry in enumerate(found)}
        kinds = {entry["format"] for entry in entries.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": entries,
            "ignore": [
                *folder.ignored_layers,
                *ignored_experts(folder),
                *(folder.float_embeddings if folder.embeddings else ()),
            ],
            "kv_cache_scheme": write_args(folder.cache, "output") if folder.cache else None,
            "global_compression_ratio": None,
            **write_transforms(folder.rotated, folder.names),
            **({"export": {POST_ROPE: folder.config.kv_cache_post_rope}} if folder.cache else {}),
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        groups = require(stored, "config_groups", self.name)
        _refuse_other_forms(stored, groups)
        configs = {key: config_of_layer(_read_group(key, group, stored)) for key, group in groups.items()}
        modules = dict(model.named_modules())
        # An expert that is still fused with others in the model has no module of its own.
        kinds = {name: _kind(modules.get(name)) for name in sorted(quantized)}
        chosen = {name: _group_of(name, kind, groups) for name, kind in kinds.items()}
        for name, kind in kinds.items():
            if matches_any(name, ignored := stored.get("ignore") or []) or matches_any(kind, ignored):
                raise FormatError(f"The layer {name!r} is quantized in the files, and `ignore` of the config names it.")
        used = sorted(set(chosen.values()))
        if len(used) == 1 and ONLY_TARGET not in kinds.values():
            config = QConfig(global_quant_config=configs[used[0]])
        else:
            find = layers_in_model(model)
            by_name = {find(name): configs[key] for name, key in chosen.items()}
            config = QConfig(global_quant_config=config_of_layer(LayerSpec()), layer_quant_config=by_name)
        linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        rotation = read_transforms(stored, linear)
        config = replace(config, algo_config=[rotation] if rotation else None)
        cache = stored.get("kv_cache_scheme")
        return Stored(with_cache(config, read_args(cache, CACHE) if cache else None, stored, model))

    def stored_name(self, source: str, suffix: str, spec: LayerSpec | None) -> str:
        name = super().stored_name(source, suffix, spec)
        parent, _, leaf = name.rpartition(".")
        if leaf == BUFFER:
            return f"{parent}{STORED}"
        if spec is None or leaf not in ("weight", *_GLOBAL_SCALES):
            return kv_name(source, suffix) or name
        packed = leaf == "weight" and _compression(spec) in PACKED
        return f"{parent}.weight_packed" if packed else f"{parent}.{_GLOBAL_SCALES.get(leaf, leaf)}"

    def received(self, stored: str, tensor: torch.Tensor) -> Named | None:
        parent, _, leaf = stored.rpartition(".")
        if leaf == _SHAPE:
            return None
        if rotation := received_rotation(stored, tensor):
            return rotation
        if leaf == "weight_packed":
            return f"{parent}.weight", tensor
        if leaf == "input_global_scale":
            # Live inputs are quantized with the scale itself; a weight's layout divides when it decodes.
            return f"{parent}.input_scale_2", 1.0 / tensor.float().reshape(())
        if leaf == "weight_global_scale":
            return f"{parent}.weight_scale_2", tensor
        return kv_source(stored) or stored, tensor

    def said_shape(self, stored: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
        parent, _, leaf = stored.rpartition(".")
        return (f"{parent}.weight", tuple(tensor.flatten().tolist())) if leaf == _SHAPE else None


def _compression(spec: LayerSpec) -> str | None:
    """How the weights of a layer lie in the file; None where there is no such way."""
    assert spec.weight is not None
    if not spec.weight.dtype.is_float:
        # FP8 inputs (W4AFP8) beside words of codes, as kernels take them.
        words = spec.input is None or spec.input.dtype.is_float
        return "pack-quantized" if words else "int-quantized" if spec.weight.dtype.bits <= 8 else None
    if spec.weight.dtype.bits == 8 and not spec.weight.is_block:
        return "naive-quantized" if spec.input is None else "float-quantized"
    return FORMATS_OF_FLOATS.get((spec.weight.dtype.name, spec.weight.scale_spec is not None))


def _group(spec: LayerSpec, targets: list[str]) -> dict[str, Any]:
    assert spec.weight is not None
    return {
        "targets": targets,
        "weights": write_args(spec.weight, "weight"),
        "input_activations": write_args(spec.input, "input") if spec.input else None,
        "output_activations": None,
        "format": _compression(spec),
    }


def _refuse_other_forms(stored: dict[str, Any], groups: dict[str, Any]) -> None:
    """Raise FormatError for tensors that lie in another way than any that is read here, sparse ones among them."""
    for place in (stored, *groups.values()):
        form = place.get("format")
        if form is not None and form not in FORMS:
            raise FormatError(
                f"The compressed-tensors format {form!r} cannot be imported; possible: {', '.join(FORMS)}."
            )
    sparse = (stored.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise FormatError(f"Weights that are sparse ({sparse!r}) cannot be imported; possible: dense ones.")


def _read_group(key: str, group: dict[str, Any], stored: dict[str, Any]) -> LayerSpec:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not weights or group.get("output_activations"):
        raise FormatError(f"{key}: a group without weights, or with quantized outputs, cannot be imported.")
    spec = LayerSpec(weight=signed(read_args(weights, key)), input=read_args(inputs, key) if inputs else None)
    form = group.get("format") or stored.get("format")
    known = _compression(spec)
    # float-quantized and naive-quantized are the same tensors.
    if known is None or (form in PACKED) != (known in PACKED):
        raise FormatError(f"{key}: {spec} in the form {form!r} cannot be imported.")
    return spec


def _kind(module: nn.Module | None) -> str:
    """The class that a group names: subclasses of Linear and GPT-2's Conv1D are written as the Linear they are."""
    if isinstance(module, nn.Embedding):
        return ONLY_TARGET
    linear = module is None or isinstance(module, nn.Linear) or is_conv1d(module)
    return "Linear" if linear else type(module).__name__


def _group_of(name: str, kind: str, groups: dict[str, Any]) -> str:
    """The group that a layer of a class belongs to: by its name, else by its class."""
    for candidate in (name, kind):
        for key, group in groups.items():
            if matches_any(candidate, group.get("targets", [])):
                return key
    raise FormatError(f"The layer {name!r} ({kind}) is quantized but in no group of the quantization_config.")
