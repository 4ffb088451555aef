"""Writes a GGUF file: what its header says, then its tensors, of which one is in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from quark.base.files import atomic_file
from quark.base.libraries.transformers import folder_of
from quark.base.progress import progress
from quark.core.array import to_numpy
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.metadata import write_hyperparameters
from quark.gguf.mixes import MIXES, Mix, role_of
from quark.gguf.names import block_of, import_gguf
from quark.gguf.tokenizer import write_tokenizer

OTHER_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
"""Type of most values in the matrices of the blocks -> general.file_type, where it is not MOSTLY_ and the type."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: name, type, shape in values, and how its bytes are made."""

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Its bytes."""
        gguf = import_gguf()
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return int(np.prod(self.shape)) // int(values) * int(size)

    def data(self) -> np.ndarray[Any, Any]:
        """Its bytes, or float32 values."""
        tensor = self.make().detach().cpu()
        if self.kind == "F32":
            return to_numpy(tensor.float().contiguous())
        if self.kind == "BF16":
            tensor = tensor.contiguous().view(torch.uint8)
        return to_numpy(tensor.contiguous())


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors.

    Attributes:
        config: Of the transformers model.
        architecture: Of the model in llama.cpp.
        tokenizer: Folder that holds the tokenizer.
        stops: Tokens that end a generated text.
    """

    config: Any
    architecture: Architecture
    tokenizer: Path
    stops: Sequence[int]

    @property
    def arch(self) -> str:
        """The name of the architecture in the file."""
        return self.architecture.arch

    def write(self, writer: Any, tensors: Sequence[GgufTensor]) -> None:
        """Write it, with the names, types and shapes of the tensors, by a gguf.GGUFWriter."""
        gguf, config = import_gguf(), self.config
        writer.add_file_type(int(getattr(gguf.LlamaFileType, _file_type(tensors, config))))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        blocks = {block for tensor in tensors if (block := block_of(tensor.name)) is not None}
        write_hyperparameters(
            writer, self.architecture, config, sum(block >= config.num_hidden_layers for block in blocks)
        )
        write_tokenizer(writer, self.tokenizer, config.vocab_size, self.stops, self._name())
        write_infos(writer, tensors)

    def _name(self) -> str:
        """What a reader shows: the name of the folder or of the repository that the model came from."""
        source = folder_of(self.config) or str(self.tokenizer.resolve())
        return source.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class DenoiserHeader:
    """What a file of a denoiser says before its tensors, as ComfyUI-GGUF reads it.

    Attributes:
        arch: The name of the architecture.
        mix: Which mix of block types the file is.
        shapes: Name of a tensor -> its shape, where it lies in the file as a matrix.
    """

    arch: str
    mix: Mix
    shapes: Mapping[str, tuple[int, ...]]

    def write(self, writer: Any, tensors: Sequence[GgufTensor]) -> None:
        """As `Header.write`."""
        gguf = import_gguf()
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(int(getattr(gguf.LlamaFileType, f"MOSTLY_{self.mix.file_type}")))
        for name, shape in self.shapes.items():
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
        write_infos(writer, tensors)


def write_infos(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write the header by a gguf.GGUFWriter, with the names, types and shapes of the tensors."""
    gguf = import_gguf()
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def write_file(
    file: Path, header: Header | DenoiserHeader, tensors: Sequence[GgufTensor], overwrite: bool = False
) -> None:
    """Write a file; it appears when all of it is written.

    Args:
        file: The file to make.
        header: What it says before its tensors.
        tensors: These.
        overwrite: Replace the file if it is there.
    """
    with atomic_file(file, overwrite) as temporary:
        writer = import_gguf().GGUFWriter(temporary, header.arch)
        try:
            header.write(writer, tensors)
            for tensor in progress(tensors, "write", total=len(tensors)):
                writer.write_tensor_data(tensor.data())
        finally:
            writer.close()


def bytes_before(header: Header, tensors: Sequence[GgufTensor]) -> int:
    """Bytes of a file beside those of its tensors, at most: reads no value."""
    gguf = import_gguf()
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "header.gguf", header.architecture.arch)
        try:
            header.write(writer, tensors)
        finally:
            writer.close()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    # Each tensor begins at a multiple of the alignment, and so does the first.
    return int(size + gguf.GGUF_DEFAULT_ALIGNMENT * (len(tensors) + 1))


def _file_type(tensors: Sequence[GgufTensor], config: Any) -> str:
    """The name in gguf.LlamaFileType: of the mix whose rules give these types, or of the main type."""
    main = _main_type(tensors)
    if main in OTHER_FILE_TYPES:
        return OTHER_FILE_TYPES[main]
    # Mixes of one base differ in what they make wider; the file has the name of the one that it is nearest to.
    mixes = [mix for mix in MIXES.values() if mix.base.upper() == main]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    roles = [(role_of(matrix.name, matrix.shape[-1], config), matrix.kind) for matrix in matrices]

    def strange(mix: Mix) -> int:
        return sum((mix.type_of(role) or kind).upper() != kind for role, kind in roles)

    return f"MOSTLY_{min(mixes, key=strange).file_type if mixes else main}"


def _main_type(tensors: Sequence[GgufTensor]) -> str:
    """The type of most values in the matrices of the blocks."""
    counts = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.name.startswith("blk."):
            counts[tensor.kind] += int(np.prod(tensor.shape))
    return max(counts, key=lambda kind: counts[kind])
