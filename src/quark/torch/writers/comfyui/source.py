"""The source of a file for ComfyUI: a folder of diffusers, a pipeline with one denoiser, or one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from quark.torch.writers.comfyui.fp8_tensors import Fp8Tensor, fp8_tensors
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
VECTORS = (".weight", ".bias", ".scale")
"""Ends of the names of tensors that are floats."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DenoiserSource:
    """The tensors of a denoiser under the names of its authors. Headers are read; values when asked for.

    Attributes:
        kind: Its architecture.
        tensors: In the order of the source.
        places: Name of a part -> the file that holds it, and its name there.
        folder: Of diffusers, that names its class; None for a file.
        decoded: Name of a part -> how it is decoded, of those that the file holds in FP8.
    """

    kind: DenoiserKind
    tensors: Sequence[OriginalTensor]
    places: dict[str, tuple[TensorFile, str]]
    folder: Path | None = None
    decoded: Mapping[str, Fp8Tensor] = field(default_factory=dict)

    def like(self, tensor: OriginalTensor) -> torch.Tensor:
        """Shape and dtype, on the meta device."""
        return tensor.like({part: self._meta(part) for part in tensor.parts})

    def _meta(self, part: str) -> torch.Tensor:
        file, name = self.places[part]
        return file.meta(name) if part not in self.decoded else file.meta(name).to(self.decoded[part].dtype)

    def read(self, tensor: OriginalTensor) -> torch.Tensor:
        """The values."""
        return tensor.of([self._read(part) for part in tensor.parts])

    def _read(self, part: str) -> torch.Tensor:
        file, name = self.places[part]
        return file.read(name) if part not in self.decoded else self.decoded[part].decode(file, name)

    def release(self, tensor: OriginalTensor) -> None:
        """Give back the memory of what was read."""
        for file, name in (self.places[part] for part in tensor.parts):
            file.release(name)

    @property
    def bytes(self) -> int:
        """Of all tensors, as they are stored."""
        parts = (self.places[part] for tensor in self.tensors for part in tensor.parts)
        return sum(file.meta(name).nbytes for file, name in parts)


def open_denoiser(path: Path) -> DenoiserSource:
    """The denoiser at a path.

    Raises:
        FormatError: There is none, or its files cannot be read.
        NotSupportedError: Its architecture or a tensor has no name in ComfyUI that is known here, it is quantized
            already, or a pipeline has several.
    """
    folder = OpenedFolder(_component(path)) if path.is_dir() else None
    decoded: Mapping[str, Fp8Tensor] = {}
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
        own, decoded = fp8_tensors(file, without_prefix(file.names))
        places = {name: (file, stored) for name, stored in own.items()}
        kind = kind_of_file(own)
        tensors = [OriginalTensor(name, (name,)) for name in own]
    source = DenoiserSource(kind, tensors, places, None if folder is None else folder.path, decoded)
    for tensor in tensors:
        like = source.like(tensor)
        if like.ndim > 1 and like.dtype not in FLOATS:
            raise NotSupportedError(
                f"{path}: {tensor.name} is {like.dtype}, so the model is quantized already. Possible: the float model, "
                "or a file in FP8 with one scale for each tensor, or none."
            )
        if like.ndim == 1 and tensor.name.endswith(VECTORS) and not like.dtype.is_floating_point:
            raise FormatError(f"{path}: {tensor.name} is {like.dtype}, and such tensors of a denoiser are floats.")
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
