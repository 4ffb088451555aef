"""One safetensors file, read and written tensor by tensor.

    8 bytes  length n of the header, little-endian
    n bytes  JSON: name -> {dtype, shape, data_offsets: [begin, end]}, filled with spaces to a multiple of 8
    data     the tensors, the widest types first, then by name

All places follow from dtypes and shapes, so a file is created with its header and full size, and its tensors are
written in any order, by any process. The bytes are those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quark.base.json_objects import without_doubles
from quark.errors import FormatError, NonFiniteError, NotSupportedError
from quark.torch.checkpoint.finite import may_be_written
from quark.torch.model.folder_files import regular_file

DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in the file -> dtype, in the order in which the format lays tensors out."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: position for position, dtype in enumerate(_NAMES)}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class ByteRange:
    """Where a tensor lies in a file: its first byte, its length in bytes, and its name there."""

    file: Path
    begin: int
    length: int
    name: str = ""


class TensorFile:
    """The tensors of a file, each read when asked for; what was read can be released.

    Attributes:
        path: The file.
        metadata: Texts by name, as its header has them.

    Raises:
        FormatError: The file is absent, truncated or no safetensors file; says what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with regular_file(path).open("rb") as handle:
                self._size = handle.seek(0, 2)
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            length = struct.unpack("<Q", self._map[:8])[0]
            header = json.loads(self._map[8 : 8 + length].decode(), object_pairs_hook=without_doubles)
            self._start = 8 + length
            self._tensors = {name: self._entry(row) for name, row in header.items() if name != _METADATA}
            self.metadata: dict[str, str] = header.get(_METADATA, {})
            self._check_covered(self.metadata)
        except FormatError:
            raise
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            raise FormatError(f"{path} is no safetensors file, or its header is corrupt: {error}.") from None

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the header."""
        return list(self._tensors)

    def meta(self, name: str) -> torch.Tensor:
        """Dtype and shape of a tensor, on the meta device."""
        return self._tensors[name][0]

    def read(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file: pages are loaded when its values are used. Writing to it changes no file."""
        like, begin = self._tensors[name]
        if like.numel() == 0:
            return torch.empty_like(like, device="cpu")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=_bytes(like), offset=begin)
        return raw.view(like.dtype).reshape(like.shape)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was read; its values are loaded again when they are used."""
        like, begin = self._tensors[name]
        if like.numel() and hasattr(self._map, "madvise"):
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, begin + _bytes(like) - first)

    def release_all(self) -> None:
        """Give back the memory of all that was read, as `release` does of one tensor."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _entry(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        if any(type(size) is not int or size < 0 for size in row["shape"]):
            raise ValueError(f"{row['shape']!r:.80} is no shape")
        if row["dtype"] not in DTYPES:
            raise NotSupportedError(f"{self.path}: tensors of type {row['dtype']} cannot be read.")
        like = torch.empty(row["shape"], dtype=DTYPES[row["dtype"]], device="meta")
        begin, end = row["data_offsets"]
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"{row['data_offsets']!r:.80} are no offsets")
        if self._start + end > self._size:
            raise FormatError(
                f"{self.path} is truncated: its header promises {self._start + end} bytes, it has {self._size}."
            )
        if end - begin != _bytes(like) or begin < 0:
            raise FormatError(f"{self.path}: a tensor of shape {row['shape']} lies in {end - begin} bytes.")
        return like, self._start + begin

    def _check_covered(self, metadata: Any) -> None:
        """Raise ValueError where the library of the format does: gaps, overlaps, metadata that are no texts."""
        end = self._start
        for begin, length in sorted((begin, _bytes(like)) for like, begin in self._tensors.values()):
            if begin != end:
                raise ValueError(f"a tensor begins at byte {begin}, and what stands before it ends at {end}")
            end += length
        if end != self._size:
            raise ValueError(f"the tensors end at byte {end} of {self._size}")
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} is {metadata!r:.80}, not texts by name")


def create_file(path: Path, tensors: Mapping[str, torch.Tensor], keep: bool = False) -> dict[str, ByteRange]:
    """Make a file of full size for tensors like these (meta will do); return where each is to be written.

    Args:
        path: The file; with `keep` it is there already, partly filled, and stays as it is.
        tensors: By name.

    Raises:
        FormatError: A file to keep was made for other tensors.
    """
    rows: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0].encode())):
        begin, end = end, end + _bytes(tensor)
        rows[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    beginning = struct.pack("<Q", len(header)) + header
    if keep:
        with path.open("rb") as handle:
            if handle.read(start) != beginning or handle.seek(0, 2) != start + end:
                raise FormatError(f"{path} was begun for other tensors.")
    else:
        with path.open("wb") as handle:
            handle.write(beginning)
            handle.truncate(start + end)
    del rows[_METADATA]
    offsets = {name: row["data_offsets"] for name, row in rows.items()}
    return {name: ByteRange(path, start + begin, stop - begin, name) for name, (begin, stop) in offsets.items()}


def write_tensor(tensor: torch.Tensor, place: ByteRange, is_weight: bool = True) -> None:
    """Write a tensor to its place.

    Raises:
        NonFiniteError: A weight has NaN, or infinity where it is no mask; see `may_be_written`.
        OSError: As writing does.
    """
    data = tensor.detach().cpu().contiguous()
    if is_weight and not may_be_written(data):
        raise NonFiniteError(f"{place.name or place.file} cannot be written: its values are NaN or infinite.")
    assert _bytes(data) == place.length, f"{place}: {data.dtype} {tuple(data.shape)}"
    if place.length:
        with place.file.open("r+b", buffering=0) as handle:
            handle.seek(place.begin)
            # A raw write may take less than all of it: 2 GB is the most that Linux takes at once.
            rest = memoryview(data.reshape(-1).view(torch.uint8).numpy().data)
            while rest:
                rest = rest[handle.write(rest) :]


def write_across(tensor: torch.Tensor, places: Sequence[ByteRange]) -> list[ByteRange]:
    """Write a tensor to places one after the other; return what is left of them."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for index, place in enumerate(places):
        taken = min(len(data), place.length)
        write_tensor(data[:taken], replace(place, length=taken))
        data = data[taken:]
        if taken < place.length:
            return [replace(place, begin=place.begin + taken, length=place.length - taken), *places[index + 1 :]]
    assert not len(data), f"{len(data)} bytes of {tuple(tensor.shape)} are left over"
    return []


def read_range(place: ByteRange) -> bytes:
    """The bytes at a place."""
    with place.file.open("rb") as handle:
        handle.seek(place.begin)
        return handle.read(place.length)


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
