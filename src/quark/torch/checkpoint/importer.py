"""Reads a quantized checkpoint back into a model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import empty_of_class
from quark.errors import FormatError, QuarkError
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.float_model import load_whole
from quark.torch.checkpoint.loading import REAL_QUANTIZED, map_to_stored, mark_loaded
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.shards import read_names, read_tensors
from quark.torch.checkpoint.sources.claims import check_claim
from quark.torch.checkpoint.stored_tensors import stored_tensors
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, FolderFormat, Format, Stored
from quark.torch.formats.format import layers_in
from quark.torch.formats.gptq.auto_round import AUTO_ROUND, as_known
from quark.torch.layers import layer_class
from quark.torch.layers.replace import quantized_layers, set_submodule
from quark.torch.layers.stored_codes.layer import codes_of
from quark.torch.model.blocks.offloading import with_weights
from quark.torch.model.meta_model import fill_buffers, named_dtype
from quark.torch.model.model_folder import model_class
from quark.torch.model.names import layers_in_model
from quark.torch.model.passes.unfuse_experts import fused_blocks, layer_names
from quark.torch.model.tied_weights import tying_configs

FOREIGN = frozenset((*FORMATS, *AUTO_ROUND)) - {"quark"}
"""Values of `quant_method` for which transformers would need packages of others, or a GPU, and quark needs neither."""


@own_arithmetic()
@with_weights
def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | os.PathLike[str],
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = "eager",
    device: str | torch.device | None = None,
    multi_gpu: bool = False,
) -> nn.Module:
    """Load a checkpoint written by `export_safetensors`, or one of these formats by another program.

    The format is what its config.json names: quark, awq, gptq, fp8, compressed-tensors or auto-round.

    Args:
        model: The float model to load into (its layers are replaced in place; on any error it is as it was), or None
            to build one with transformers.
        model_dir: The folder.
        multi_device, multi_gpu: With model=None, spread the model over the devices (accelerate's "auto").
        trust_remote_code: For transformers, with model=None.
        attn_implementation: The same; None leaves it to transformers, which takes "sdpa" where the model has it.
        device: Where to; default: CUDA if there is one, else the CPU (model=None), or where the model is.

    Returns:
        The model, computing with the stored weights.

    Raises:
        FormatError: The folder is of none of these formats, or a tensor is corrupt, missing or of another shape.
    """
    folder = OpenedFolder(Path(model_dir), trust_remote_code)
    check_claim(folder.path, folder.config, folder.metas)
    stored = read_quantization_config(folder)
    form = FORMATS[stored["quant_method"]]
    if model is None and form.name == "quark":
        where = "auto" if multi_device or multi_gpu else device or ("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {"device_map": where, "attn_implementation": attn_implementation}
        loaded: nn.Module = load_whole(folder, **options)
        return loaded
    if model is None:
        with as_format_error(folder.path, trusted=folder.trust_remote_code):
            config = copy.deepcopy(folder.of_transformers)
            del config.quantization_config
            chosen = model_class(folder.path, config, folder.trust_remote_code)
            model = empty_of_class(chosen, config, config.dtype, attn_implementation=attn_implementation).eval()
    fill_from_folder(model, folder)
    return model if device is None else model.to(device)


def fill_from_folder(model: nn.Module, folder: OpenedFolder) -> nn.Module:
    """Load a quantized folder into its float model; weights stay in the files of the folder until they are used.

    Args:
        model: With or without weights; changed in place.
        folder: In the quark format, or that of another program.

    Raises:
        FormatError: As `import_model_from_safetensors`.
    """
    stored = read_quantization_config(folder)
    form = FORMATS[stored["quant_method"]]
    if any(buffer.is_meta for _, buffer in getattr(model, "named_non_persistent_buffers", list)()):
        fill_buffers(model)  # rotary tables: no checkpoint holds them
    dtype = folder.dtype if folder.is_network else named_dtype(folder.config)
    content = replace(_resolved(form, stored, [file.path for file in folder.files], model), dtype=dtype)
    tensors = ((name, file.read(name)) for file in folder.files for name in file.names)
    load_stored(model, content.form or form, content, tensors)
    return model


def _resolved(form: FolderFormat, stored: dict[str, Any], files: list[Path], model: nn.Module) -> Stored:
    """The config of a checkpoint. In formats of other programs the tensors say which layers are quantized."""
    present, find = layers_in(read_names(files), form.marker), layers_in_model(model)
    try:
        result = form.read(stored, present, model)
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, QuarkError):
            raise
        raise FormatError(f"The quantization_config ({form.name}) is damaged: {error!r:.90}.") from None
    if not form.marker:
        return result
    candidates = [name for name, module in model.named_modules() if layer_class(module)]
    for block, leaves in fused_blocks(model).items():
        candidates += layer_names(model, block, leaves)
    here = present | set(map(find, present))
    absent = [name for name in candidates if name not in here]
    return replace(result, config=replace(result.config, exclude=absent))


def read_quantization_config(folder: OpenedFolder) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint folder, as a format here calls it.

    Raises:
        FormatError: It is of another quantizer.
        NotSupportedError: It is of auto-round, in a form that is not read.
    """
    path = folder.path / "config.json"
    stored = folder.config.get("quantization_config")
    if not isinstance(stored, dict):
        raise FormatError(f"{path} has no quantization_config: the model is not quantized.")
    if stored.get("quant_method") not in (*FORMATS, *AUTO_ROUND):
        known = ", ".join((*FORMATS, AUTO_ROUND[0]))
        raise FormatError(
            f"{path} has quant_method {stored.get('quant_method')!r}, which cannot be imported. Possible: {known}."
        )
    return as_known(stored)


def load_into(model: nn.Module, config: QConfig, export: dict[str, Any], files: list[Path]) -> None:
    """Replace layers of a float model by those of the `quark` format and fill them from the files."""
    pack_method, weight_format = export.get("pack_method", "reorder"), export.get("weight_format") or REAL_QUANTIZED
    load_stored(model, FORMATS["quark"], Stored(config, pack_method, weight_format), read_tensors(files))


def load_stored(model: nn.Module, form: Format, stored: Stored, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace layers of a float model by stored ones and fill them with the tensors; on any error it is as it was.

    Args:
        model: The float model.
        form: Format that the tensors are in.
        stored: What is quantized.
        tensors: Names in the file and tensors.
    """
    config = stored.config
    originals = map_to_stored(model, config, stored.pack_method, stored.weight_format, form)
    try:
        _fill(model, form, tensors, stored)
    except BaseException:
        for name, module in originals.items():
            set_submodule(model, name, module)
        del model.quant_plan
        raise
    mark_loaded(model, config, form.name)


def _fill(model: nn.Module, form: Format, tensors: Iterable[tuple[str, torch.Tensor]], stored: Stored) -> None:
    layers = quantized_layers(model)
    own = dict(model.state_dict(keep_vars=True))
    loaded = stored_tensors(model, form, tensors, stored.dtype)
    _untie(model, own, loaded)
    for name, tensor in loaded.items():
        parent, _, leaf = name.rpartition(".")
        layer = layers.get(parent)
        # A bias that is no code is added in the dtype of the model, as any float tensor.
        quantized = layer is not None and not (leaf == "bias" and layer.spec.bias is None)
        _assign(model.get_submodule(parent), leaf, tensor, quantized)


def _untie(model: nn.Module, own: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """Give parameters that share memory, and differ in the checkpoint (a rotated head), memory of their own."""
    first: dict[int, torch.Tensor] = {}
    for name in (name for name in loaded if own[name].numel() and not own[name].is_meta):
        before = first.setdefault(own[name].data_ptr(), loaded[name])
        if before is not loaded[name] and not torch.equal(before.float(), loaded[name].float()):
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(own[name].detach().clone(), own[name].requires_grad)
                for config in tying_configs(model):
                    config.tie_word_embeddings = False


def _assign(module: nn.Module, leaf: str, tensor: torch.Tensor, quantized: bool) -> None:
    present = codes_of(module, leaf)
    device = tensor.device if present.is_meta else present.device
    stays = tensor.dtype if quantized or not tensor.is_floating_point() else present.dtype
    tensor = tensor.to(device, stays)
    # Nothing can be written into values that are one in memory (`expand`), or that belong to inference mode.
    fixed = present.is_inference() or any(
        s == 0 and n > 1 for s, n in zip(present.stride(), present.shape, strict=True)
    )
    if leaf in module._parameters and (present.is_meta or quantized or fixed):
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    elif leaf in module._buffers and (present.is_meta or fixed or leaf in ("scale", "zero_point")):
        module._buffers[leaf] = tensor
    else:
        # In place, so that a tied weight stays tied.
        with torch.no_grad():
            present.copy_(tensor)
