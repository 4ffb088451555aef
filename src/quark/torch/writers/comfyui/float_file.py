"""A safetensors file whose weights are in FP8, as a file of the float values that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quark.base.files import atomic_file, require_regular
from quark.base.progress import progress
from quark.errors import NotSupportedError
from quark.torch.checkpoint.safetensors_file import TensorFile, create_file, write_tensor
from quark.torch.writers.comfyui.fp8_tensors import BESIDE, Fp8Tensor, fp8_tensors


def write_float(source: Path, file: Path, overwrite: bool, dtype: torch.dtype | None) -> tuple[int, str]:
    """Write the float values of a file, a tensor at a time, under its names; what describes FP8 is left out.

    Args:
        source: The file in FP8: of a denoiser, a text encoder or several parts.
        file: The file to make.
        overwrite: Replace the file if it is there.
        dtype: Of the weights that are decoded; None: that of most float tensors beside them. Others stay as they are.

    Returns:
        Bytes of its tensors, and the type that products of codes and scales were rounded to; "" where none was.

    Raises:
        FormatError: The source is no safetensors file.
        NotSupportedError: It has no weight in FP8, or other scales than one for each tensor.
    """
    require_regular(source)
    opened = TensorFile(source)
    own, decoded = fp8_tensors(opened, {name: name for name in opened.names})
    _check(source, own, decoded)
    if dtype is not None:
        decoded = {name: replace(each, dtype=dtype) for name, each in decoded.items()}
    likes = {name: opened.meta(name) for name in own}
    likes |= {name: likes[name].to(each.dtype) for name, each in decoded.items()}
    with atomic_file(file, overwrite) as temporary:
        places = create_file(temporary, likes)
        for name in progress(own, "tensors", total=len(own)):
            value = decoded[name].decode(opened, name) if name in decoded else opened.read(name)
            write_tensor(value, places[name])
            opened.release(name)
    rounded = {each.dtype for each in decoded.values() if each.scale is not None} - {torch.float32}
    names = (str(each).removeprefix("torch.") for each in rounded)  # all have one
    return sum(like.nbytes for like in likes.values()), next(names, "")


def _check(source: Path, own: Iterable[str], decoded: Mapping[str, Fp8Tensor]) -> None:
    """Raise NotSupportedError for a file with nothing to decode, or with what describes other codes."""
    described = [name for name in own if name.rpartition(".")[2] in BESIDE]
    if described or not decoded:
        what = f"{described[0]} describes a weight that is not in FP8" if described else "no weight is in FP8"
        raise NotSupportedError(
            f"{source}: {what}. Possible: a file in FP8 with one scale for each tensor, or none, which becomes one of "
            "float values."
        )
