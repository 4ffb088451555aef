"""Adapters of PEFT (LoRA and its like): merged into their base model, which is what is quantized then.

adapter_config.json          {"base_model_name_or_path": "../llama", "peft_type": "LORA", "r": 16, ...}
adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.files import temporary_folder
from quark.base.json_objects import plain_json
from quark.base.libraries.huggingface_hub import offline
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.errors import FormatError, NotSupportedError, require_packages
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.checkpoint.sources.encoded import dtype_name
from quark.torch.checkpoint.sources.methods import AS_FLOAT
from quark.torch.model.adapter_config import require_local, with_names
from quark.torch.model.folder_files import file_of, side_files
from quark.torch.model.tied_weights import tying_configs
from quark.torch.writers.adapters import adapted_layers
from quark.torch.writers.model_card import CACHE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def base_of(folder: Path) -> OpenedFolder:
    """The folder of the model that an adapter was trained for: as its config says, from here or from the adapter.

    The header of the adapter's weights is read, too, so that a plan finds what is damaged.

    Raises:
        FormatError: The config or the weights are none, or no model is there.
        NotSupportedError: The base is quantized: its weights, which the adapter would be added to, are codes. Or the
            adapter is of a kind of which PEFT would load more than its folder holds.
    """
    path, said = folder / CONFIG, _config_of(folder)
    name = said["base_model_name_or_path"]
    require_local(path, said)
    places = () if "\0" in name else (Path(name), Path(os.path.realpath(folder / name)))
    found = next((base for base in places if (base / "config.json").is_file()), None)
    if found is None:
        raise FormatError(
            f"{folder} is an adapter of {name}, and no model folder is there. Possible: `hf download {name} "
            f"--local-dir DIR`, and DIR as base_model_name_or_path in {path}."
        )
    base = OpenedFolder(found)
    if base.config.get("quantization_config") and base.method not in AS_FLOAT:
        raise NotSupportedError(
            f"{folder} is an adapter of {found}, which is quantized: an adapter is added to float weights. Possible: "
            f"the float model as base_model_name_or_path in {path}."
        )
    base.check()
    TensorFile(file_of(folder, WEIGHTS))
    return base


def _config_of(folder: Path) -> dict[str, Any]:
    """The config of an adapter, which names its base model. Raises FormatError where it is none."""
    path = folder / CONFIG
    try:
        said = plain_json(file_of(folder, CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is not JSON: {error}.") from None
    name = said.get("base_model_name_or_path") if isinstance(said, dict) else None
    if not isinstance(name, str) or not name:
        raise FormatError(f"{path} names no base model: base_model_name_or_path is {name!r}.")
    found: dict[str, Any] = said
    return found


@contextmanager
def merged(folder: Path, output: Path) -> Iterator[Path]:
    """Yield the folder of base and adapter in one, beside an output; it is gone when the body ends.

    Its files of a tokenizer are the adapter's where it has them, else the base's.

    Args:
        folder: The adapter.
        output: What is made of it.

    Raises:
        FormatError, NotSupportedError: See `base_of`; the adapter is of another model, or of a kind that cannot be
            merged.
        MissingDependencyError: PEFT is not installed.
    """
    require_packages("An adapter", "peft", "peft")
    base = base_of(folder)
    file = TensorFile(file_of(folder, WEIGHTS))
    for tensor in file.names:
        dtype = file.meta(tensor).dtype
        if not dtype.is_floating_point and "indices" not in tensor:  # PEFT would add them to the weights
            raise FormatError(f"{file.path}: {tensor} has the type {dtype_name(dtype)}, and an adapter holds floats.")
    stored = set(file.names)
    with temporary_folder(output.absolute()) as scratch:
        place = folder.resolve()
        # In huggingface's cache the name is a hash, and the model card looks for that of the hub above it.
        of_hub = [part for part in place.parts if CACHE.fullmatch(part)][:1]
        whole = scratch.joinpath(*of_hub, place.name)
        whole.mkdir(parents=True)
        for source in (base.path, folder):
            for name in side_files(source):
                if name.suffix != ".md" and name.name not in (CONFIG, WEIGHTS):
                    (whole / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, whole / name)
        _merged_model(folder, base, stored).save_pretrained(whole)
        logger.info("Merged the adapter %s into its base model %s.", folder, base.path)
        yield whole


def _merged_model(folder: Path, base: OpenedFolder, stored: set[str]) -> Any:
    """The base model with what the adapter adds, in the dtype of the base."""
    import peft  # of an extra: only where an adapter is read

    import_transformers().utils.logging.disable_progress_bar()
    model = load_float_model(base)
    said = _config_of(folder)
    changed = with_names(folder / CONFIG, said, [name for name, _ in model.named_modules()])
    with as_format_error(folder, f"is no adapter that fits {base.path}"), offline(), warnings.catch_warnings():
        # PEFT asks transformers by a name that is old there, and warns of tensors that are compared below.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`|Found missing adapter keys")
        config = peft.PeftConfig.from_pretrained(str(folder), local_files_only=True)
        for field, value in changed.items():
            setattr(config, field, value)
        config.inference_mode = True
        model = peft.PeftModel.from_pretrained(model, str(folder), config=config, local_files_only=True)
    model.peft_config[model.active_adapter].base_model_name_or_path = str(base.path)  # which is read for its vocabulary
    used = set(peft.get_peft_model_state_dict(model))
    if used != stored:
        odd = sorted(used ^ stored)
        raise FormatError(
            f"{folder / WEIGHTS} does not fit {base.path}: {len(odd)} tensors are in only one of the two, such as "
            f"{odd[0]}."
        )
    if not hasattr(model, "merge_and_unload") or not getattr(model.base_model, "merge_and_unload", None):
        raise NotSupportedError(f"{folder}: an adapter of the kind {model.peft_type} cannot be merged into its base.")
    untied = _untie_adapted(model)
    with as_format_error(folder, f"cannot be merged into {base.path}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        whole = model.merge_and_unload(safe_merge=True)
    _tie_equals(whole, untied)
    return whole


def _untie_adapted(model: Any) -> list[list[str]]:
    """Give each layer its own weight where layers share one to which an adapter of one of them would be added.

    Args:
        model: With the adapter in it, of PEFT.

    Returns:
        Names in the model without it of parameters that were one.
    """
    owners: dict[int, list[tuple[str, Any, str]]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module, leaf))
    adapted = {id(layer): name for name, (_, layer) in adapted_layers(model).items()}
    untied = []
    for shared in owners.values():
        if len(shared) > 1 and any(id(module) in adapted for _, module, _ in shared):
            places = [(adapted.get(id(module), name), leaf) for name, module, leaf in shared]
            untied.append([f"{name}.{leaf}".removeprefix("base_model.model.") for name, leaf in places])
            for _, module, leaf in shared[1:]:
                module._parameters[leaf] = nn.Parameter(module._parameters[leaf].detach().clone(), requires_grad=False)
    return untied


def _tie_equals(whole: Any, untied: list[list[str]]) -> None:
    """Let parameters be one again that an adapter left equal, and say of the others in the config that they are not.

    Args:
        whole: The merged model.
        untied: Names of parameters that were one before.
    """
    for names in untied:
        first, *others = (whole.get_parameter(name) for name in names)
        tied = all(torch.equal(first, other) for other in others)
        for name in names[1:] if tied else ():
            parent, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(parent), leaf, first)
        for config in tying_configs(whole):
            config.tie_word_embeddings = tied
        if not tied:
            logger.info("The adapter makes two weights of one, which was that of %s.", " and ".join(names))
