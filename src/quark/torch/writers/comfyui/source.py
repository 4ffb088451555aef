"""The source of a file for ComfyUI: a folder of diffusers, a pipeline with one denoiser, or one safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from quark.base.files import require_regular
from quark.base.log import logger
from quark.errors import FormatError, NotSupportedError
from quark.torch.checkpoint.float_model import check_network
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.diffusion.component import CLASS
from quark.torch.model.folder_files import PIPELINE, components
from quark.torch.writers.comfyui.names import (
    DenoiserKind,
    OriginalTensor,
    kind_of_class,
    kind_of_file,
    original_tensors,
    without_prefix,
)

CONFIG = "config.json"
DENOISERS = ("transformer", "unet")
"""Beginnings of the names of the folders of a pipeline that hold a denoiser."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DenoiserSource:
    """The tensors of a denoiser under the names of its authors. Headers are read; values when asked for.

    Attributes:
        kind: Its architecture.
        tensors: In the order of the source.
        places: Name of a part -> the file that holds it, and its name there.
        folder: Of diffusers, that names its class; None for a file.
    """

    kind: DenoiserKind
    tensors: Sequence[OriginalTensor]
    places: dict[str, tuple[TensorFile, str]]
    folder: Path | None = None

    def like(self, tensor: OriginalTensor) -> torch.Tensor:
        """Shape and dtype, on the meta device."""
        return tensor.like({part: self.places[part][0].meta(self.places[part][1]) for part in tensor.parts})

    def read(self, tensor: OriginalTensor) -> torch.Tensor:
        """The values."""
        return tensor.of([file.read(name) for file, name in (self.places[part] for part in tensor.parts)])

    def release(self, tensor: OriginalTensor) -> None:
        """Give back the memory of what was read."""
        for file, name in (self.places[part] for part in tensor.parts):
            file.release(name)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        likes = (self.like(tensor) for tensor in self.tensors)
        return sum(like.numel() * like.dtype.itemsize for like in likes)


def open_denoiser(path: Path) -> DenoiserSource:
    """The denoiser at a path.

    Raises:
        FormatError: There is none, or its files cannot be read.
        NotSupportedError: Its architecture or a tensor has no name in ComfyUI that is known here, it is quantized
            already, or a pipeline has several.
    """
    folder = OpenedFolder(_component(path)) if path.is_dir() else None
    if folder is not None:
        folder.check()
        class_name = str(folder.config.get(CLASS))
        places = {name: (file, name) for file in folder.files for name in file.names}
        kind = kind_of_class(class_name, places)
        if find_spec("diffusers") is None:
            logger.info("%s is not compared with its class, as diffusers is not installed.", folder.path)
        else:
            check_network(folder.path, folder.skeleton, folder.metas)
        tensors = original_tensors(kind, places)
    else:
        require_regular(path)
        file = TensorFile(path)
        own = without_prefix(file.names)
        places = {name: (file, stored) for name, stored in own.items()}
        kind = kind_of_file(own)
        tensors = [OriginalTensor(name, (name,)) for name in own]
    source = DenoiserSource(kind, tensors, places, None if folder is None else folder.path)
    for tensor in tensors:
        like = source.like(tensor)
        if like.ndim > 1 and like.dtype not in FLOATS:
            raise NotSupportedError(
                f"{path}: {tensor.name} is {like.dtype}, so the model is quantized already. Possible: the float model."
            )
    return source


def _component(path: Path) -> Path:
    """The folder of the one denoiser of a pipeline, or the folder itself."""
    if not (path / PIPELINE).is_file():
        return path
    named = [name for name in components(path) if name.startswith(DENOISERS)]
    found = [name for name in named if (path / name / CONFIG).is_file()]
    if len(found) != 1:
        what = f"has {len(found)} denoisers" if found else "has no denoiser"
        possible = ", ".join(str(path / name) for name in found) or "a folder with model_index.json and transformer/"
        raise FormatError(f"{path} {what}; a file for ComfyUI holds one. Possible: {possible}.")
    return path / found[0]
