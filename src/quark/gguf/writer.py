"""Writes a GGUF file: its header, and room for its tensors, whose places follow from types and shapes.

    header, metadata, names, types, shapes and offsets of the tensors
    data     each tensor from a multiple of the alignment on, in the order of the header

So a file is made with its full size, and its tensors are written in any order, by any process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quark.base.libraries.transformers import folder_of
from quark.errors import FormatError
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.metadata import write_hyperparameters
from quark.gguf.mixes import MIXES, Mix, role_of
from quark.gguf.names import block_of, import_gguf
from quark.gguf.tokenizer import write_tokenizer

_OTHER_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
"""Type of most values in the matrices of the blocks -> general.file_type, where it is not MOSTLY_ and the type."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: name, type, and shape in values."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        gguf = import_gguf()
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return int(np.prod(self.shape)) // int(values) * int(size)


@dataclass(frozen=True)
class Header:
    """The metadata of a file, which stand before its tensors.

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
        source = folder_of(self.config) or str(self.tokenizer.resolve())
        name = Path(source).name  # of the folder or of the repository that the model came from
        write_tokenizer(writer, self.tokenizer, config.vocab_size, self.stops, name)
        _write_infos(writer, tensors)


@dataclass(frozen=True)
class DenoiserHeader:
    """The metadata of a file of a denoiser, which stand before its tensors, as ComfyUI-GGUF reads them.

    Attributes:
        arch: The name of the architecture.
        mix: Which mix of block types the file is.
        shapes: Name of a tensor -> its shape, where it lies in the file as a matrix.
    """

    arch: str
    mix: Mix
    shapes: Mapping[str, tuple[int, ...]]

    def write(self, writer: Any, tensors: Sequence[GgufTensor]) -> None:
        """Write the header: the version, the mix, and the shapes and places of the tensors."""
        gguf = import_gguf()
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(int(getattr(gguf.LlamaFileType, f"MOSTLY_{self.mix.file_type}")))
        for name, shape in self.shapes.items():
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
        _write_infos(writer, tensors)


def _write_infos(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write the header by a gguf.GGUFWriter, with the names, types and shapes of the tensors."""
    gguf = import_gguf()
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def create_file(file: Path, beginning: bytes, tensors: Sequence[GgufTensor], begun: bool = False) -> dict[str, int]:
    """Make a file of full size; return the first byte of each tensor by its name.

    Args:
        file: The file; with `begun` it is there already, partly filled, and stays as it is.
        beginning: From `header_bytes`.
        tensors: These.

    Raises:
        FormatError: A file that is begun was made for another header.
    """
    begins, end = {}, _padded(len(beginning))
    for tensor in tensors:
        begins[tensor.name] = end
        end += _padded(tensor.size)
    if begun:
        with file.open("rb") as handle:
            if handle.read(len(beginning)) != beginning or handle.seek(0, 2) != end:
                raise FormatError(f"{file} was begun for another model, plan or tokenizer.")
        return begins
    with file.open("wb") as handle:
        handle.write(beginning)
        handle.truncate(end)
    return begins


def header_bytes(header: Header | DenoiserHeader, tensors: Sequence[GgufTensor]) -> bytes:
    """All that stands before the first tensor, but for what fills it up to a multiple of the alignment."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "header.gguf"
        writer = import_gguf().GGUFWriter(file, header.arch)
        try:
            header.write(writer, tensors)
        finally:
            writer.close()
        return file.read_bytes()


def bytes_before(header: Header, tensors: Sequence[GgufTensor]) -> int:
    """Bytes of a file beside those of its tensors, at most: reads no value."""
    return len(header_bytes(header, tensors)) + int(import_gguf().GGUF_DEFAULT_ALIGNMENT) * (len(tensors) + 1)


def _padded(size: int) -> int:
    """The next multiple of the alignment."""
    alignment = int(import_gguf().GGUF_DEFAULT_ALIGNMENT)
    return -(-size // alignment) * alignment


def _file_type(tensors: Sequence[GgufTensor], config: Any) -> str:
    """The name in gguf.LlamaFileType: of the mix whose rules give these types, or of the main type."""
    counts = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.name.startswith("blk."):
            counts[tensor.kind] += int(np.prod(tensor.shape))
    main = max(counts, key=lambda kind: counts[kind])  # of most values in the matrices of the blocks
    if main in _OTHER_FILE_TYPES:
        return _OTHER_FILE_TYPES[main]
    # Mixes of one base differ in what they make wider; the file has the name of the one that it is nearest to.
    mixes = [mix for mix in MIXES.values() if mix.base.upper() == main]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    roles = [(role_of(matrix.name, matrix.shape[-1], config), matrix.kind) for matrix in matrices]

    def strange(mix: Mix) -> int:
        return sum((mix.type_of(role) or kind).upper() != kind for role, kind in roles)

    return f"MOSTLY_{min(mixes, key=strange).file_type if mixes else main}"
