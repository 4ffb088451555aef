"""Loads the float model of a folder: of the class that config.json names, with every tensor that its files hold.

transformers fills what a checkpoint lacks with random numbers, drops what the class does not know, and reports both to
a log. Here each is an error.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from quark.errors import FormatError
from quark.torch.checkpoint.source import Source, check_finite
from quark.torch.model.folder_files import INDEX, shard_files
from quark.torch.model.meta_model import build_skeleton
from quark.torch.model.model_folder import (
    as_format_error,
    check_sizes,
    load_config,
    model_class,
    read_config,
)
from quark.torch.model.published_names import merged_names, source_names

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What folders held before safetensors; torch reads tensors from it and runs nothing."""


def load_float_model(
    folder: Path,
    dtype: torch.dtype | str = "auto",
    *,
    trust_remote_code: bool = False,
    keep_unexpected: bool = False,
    **options: Any,
) -> Any:
    """The model of a folder, in evaluation mode, on the CPU. One that quark quantized is loaded as it computes.

    Args:
        folder: With config.json and weights.
        dtype: To load in; "auto": as config.json says, else as stored.
        trust_remote_code: Run the code that `auto_map` names.
        keep_unexpected: Accept tensors that the class has no place for; a checkpoint that is made of the model holds
            them as they are.
        options: For `from_pretrained`.

    Raises:
        FormatError: The folder is incomplete or corrupt, its config calls for other shapes than its files have, or
            tensors are missing, unexpected or of another shape; names them.
    """
    stored = read_config(folder)
    tensors = stored_metas(folder)
    shapes = shapes_of(tensors)
    check_sizes(folder, stored, shapes)
    if not stored.get("quantization_config"):
        check_metas(folder, build_skeleton(folder, shapes=shapes, trust_remote_code=trust_remote_code), tensors)
    model = load_whole(
        folder, trust_remote_code=trust_remote_code, keep_unexpected=keep_unexpected, dtype=dtype, **options
    )
    return model.eval()


def load_whole(folder: Path, *, trust_remote_code: bool = False, keep_unexpected: bool = False, **options: Any) -> Any:
    """What `from_pretrained` of the class that config.json names gives, where it found a place for every tensor.

    Args:
        folder, trust_remote_code, keep_unexpected: See `load_float_model`.
        options: For `from_pretrained`.

    Raises:
        FormatError: See `load_float_model`.
    """
    chosen = model_class(folder, load_config(folder, trust_remote_code), trust_remote_code)
    with as_format_error(folder):
        model, report = chosen.from_pretrained(
            folder,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    unexpected = sorted(report["unexpected_keys"])
    if keep_unexpected and unexpected:
        # What the class leaves out by design is named so; writers store it as it was.
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *(f"^{re.escape(name)}$" for name in unexpected)}
        unexpected = []
    _refuse(folder, chosen, "has no", sorted(report["missing_keys"]), "its weights would be random")
    _refuse(folder, chosen, "holds, and the class has no place for,", unexpected, "--keep-unexpected copies them")
    _refuse(folder, chosen, "has in another shape", sorted(map(str, report["mismatched_keys"])), "")
    for name, tensor in model.named_parameters():
        check_finite(name, tensor)
    return model


def _refuse(folder: Path, chosen: type, what: str, names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise FormatError(
            f"{folder} is not the model that its config.json names ({chosen.__name__}): it {what} "
            f"{', '.join(names[:5])}{more}{f' ({why})' if why else ''}."
        )


def stored_metas(folder: Path) -> dict[str, torch.Tensor]:
    """Dtype and shape of the tensors in the weight files, on the meta device. Raises FormatError."""
    plain = any((folder / name).exists() for name in ("model.safetensors", INDEX))
    if not plain and any((folder / name).is_file() for name in PICKLED):
        return {name: tensor for file in _pickled(folder) for name, tensor in file.items()}
    return Source(shard_files(folder)).metas()


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _pickled(folder: Path) -> Iterable[dict[str, torch.Tensor]]:
    for path in sorted(folder.glob("pytorch_model*.bin")):
        with as_format_error(path):
            try:
                # Files from before torch 1.6 are no archives, and cannot be mapped.
                yield torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
            except UnpicklingError:  # torch answers in a page
                raise FormatError(
                    f"{path} is a pickle of more than tensors, or damaged; reading it could run code. Possible: "
                    "model.safetensors, which save_pretrained writes."
                ) from None


def check_metas(folder: Path, model: Any, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise FormatError where the tensor in the files cannot be the parameter of its name.

    It has another shape, or it holds integers where the model has floats: codes, or bytes that were mislabelled.

    Args:
        folder: For the message.
        model: A skeleton of the float model.
        stored: From `stored_metas`. What transformers merges when it loads has no shape to compare.
    """
    own = model.state_dict()
    sources = source_names(model, stored)
    merged = merged_names(model, own)
    for name, source in sources.items():
        if name not in own:
            continue
        there, needed = stored[source], own[name]
        if name not in merged and there.shape != needed.shape:
            raise FormatError(
                f"{folder}: {source} has shape {tuple(there.shape)} in the files, and config.json calls for "
                f"{tuple(needed.shape)}."
            )
        if needed.dtype.is_floating_point and not there.dtype.is_floating_point:
            raise FormatError(
                f"{folder}: {source} holds {str(there.dtype).removeprefix('torch.')} in the files, and config.json, "
                "which names no quantization, calls for float numbers."
            )
