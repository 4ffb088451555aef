"""Checks that a tensor of a file holds what its type and shape promise: the values inside, beside it, or sparse.

onnx_ir reads what is missing as zeros, and so nobody would notice; every tensor is looked at before it reads any.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from quark.core.array import NumpyArray
from quark.errors import FormatError

FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
LONGEST_NAME = 4096
"""Bytes in a path, at most, on the systems that there are."""
_DENSE_LIMIT = 2**31 - 2**20
"""Bytes of a sparse tensor once its zeros are written out."""


@dataclass(frozen=True)
class Outside:
    """Where the bytes of a tensor lie: a regular file in the folder of the model."""

    file: Path
    offset: int
    length: int


def quoted(name: str | bytes) -> str:
    """A name as it is shown: what is long is cut."""
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(name)} characters)"


def check_tensor(tensor: TensorProto, who: str, folder: Path) -> None:
    """Raise FormatError for a tensor whose type is none, or whose data are not what its shape needs.

    Args:
        tensor: Of a file, its data not read yet.
        who: What the error calls it.
        folder: Of the model, where external data lie.
    """
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise FormatError(f"{who} has the element type {tensor.data_type}, which ONNX does not have.")
    if any(size < 0 for size in tensor.dims):
        raise FormatError(f"{who} has the shape {list(tensor.dims)}: a size is negative.")
    given = [name for name in FIELDS if len(getattr(tensor, name))]
    given += ["raw_data"] if tensor.HasField("raw_data") else []
    if tensor.data_location == TensorProto.EXTERNAL:
        if [name for name in given if len(getattr(tensor, name))]:
            raise FormatError(f"{who} has data inside the model ({', '.join(given)}) and beside it: one is wrong.")
        outside(tensor, who, folder)
    elif len(given) > 1:
        raise FormatError(f"{who} has its data twice: as {' and as '.join(given)}.")
    else:
        _check_inside(tensor, who, given)


def _check_inside(tensor: TensorProto, who: str, given: list[str]) -> None:
    needed, kind = math.prod(tensor.dims), TensorProto.DataType.Name(tensor.data_type).lower()
    if not given:
        if needed:
            raise FormatError(f"{who} has no data; its shape {list(tensor.dims)} of {kind} needs {needed} values.")
        return
    if given == ["raw_data"]:
        if tensor.data_type == TensorProto.STRING:
            raise FormatError(f"{who} holds text as raw_data, which ONNX does not have.")
        if len(tensor.raw_data) != (expected := byte_count(tensor)):
            raise FormatError(
                f"{who} is damaged: it has {len(tensor.raw_data)} bytes, its shape {list(tensor.dims)} of {kind} "
                f"needs {expected}."
            )
        return
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    if given != [field]:
        raise FormatError(f"{who} of {kind} has its data in {given[0]}; they belong in {field} or raw_data.")
    expected, found = _entries(tensor), len(getattr(tensor, field))
    if found != expected:
        raise FormatError(
            f"{who} is damaged: it has {found} entries of {field}, its shape {list(tensor.dims)} of {kind} "
            f"needs {expected}."
        )


def _entries(tensor: TensorProto) -> int:
    """Entries of the typed field: a complex number has two; of what is narrower than a byte, one holds a byte."""
    size = math.prod(tensor.dims)
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * size
    if tensor.data_type == TensorProto.STRING:
        return size
    bits = ir.DataType(tensor.data_type).bitwidth
    return size if bits >= 8 else -(-size * bits // 8)


_EXTERNAL_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})
"""The keys by which ONNX describes data outside the model (onnx.proto, TensorProto.external_data)."""


def byte_count(tensor: TensorProto) -> int:
    """Bytes that the type and shape of a tensor need."""
    return -(-math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8)


def outside(tensor: TensorProto, who: str, folder: Path) -> Outside:
    """Where the data of an external tensor lie. A file that has several names (hard links) is as good as another.

    Raises:
        FormatError: Nowhere, outside the folder (by `..`, an absolute path or a link), in what is no regular file, or
            in fewer bytes than the shape needs; or the length says something else than the shape.
    """
    entries = _external_entries(tensor, who)
    location = entries.get("location", "")
    folder_like = location.replace("\\", "/").rpartition("/")[2] in ("", ".")
    if folder_like or "\0" in location or len(location.encode()) > LONGEST_NAME:
        raise FormatError(f"The data of {who} lie in a file of no possible name: {quoted(location)}.")
    if tensor.data_type == TensorProto.STRING:
        raise FormatError(f"{who} is text, and that cannot lie beside the model.")
    numbers = {key: entries.get(key, "0") for key in ("offset", "length")}
    if not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers.values()):
        raise FormatError(f"The data of {who} have {numbers}: these must be numbers of bytes.")
    offset, length, needed = int(numbers["offset"]), int(numbers["length"]), byte_count(tensor)
    if "length" in entries and length != needed:
        raise FormatError(
            f"The data of {who} have a length of {length} bytes; its shape {list(tensor.dims)} needs {needed}."
        )
    file = _inside(folder, location, who)
    size = file.stat().st_size
    if offset + needed > size:
        raise FormatError(f"The data of {who} is truncated: it ends at byte {offset + needed} of {file}, of {size}.")
    return Outside(file, offset, needed)


def _external_entries(tensor: TensorProto, who: str) -> dict[str, str]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    unknown = sorted(entries.keys() - _EXTERNAL_KEYS)
    if unknown:
        raise FormatError(f"The external data of {who} have the unknown key {quoted(unknown[0])}.")
    if len(entries) < len(tensor.external_data):
        raise FormatError(f"The external data of {who} have a key twice. Each key may occur once.")
    return entries


def _inside(folder: Path, location: str, who: str) -> Path:
    base = folder.resolve()
    try:
        file = (base / location).resolve()
        if Path(location).is_absolute() or not file.is_relative_to(base):
            raise FormatError(f"The data of {who} lies outside the model's folder: {quoted(location)}.")
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise FormatError(f"The data of {who} is missing: {quoted(location)} is not beside the model.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise FormatError(f"The data of {who} cannot be read from {quoted(location)}: {error}.") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"The data of {who} lie in {quoted(location)}, which is no regular file.")
    return file


class LinkedTensor(ir.ExternalTensor):
    """An external tensor whose place `outside` has checked, and that may have several names (hard links).

    onnx_ir refuses those; but a store that keeps equal files once is made of them.
    """

    @classmethod
    def of(cls, tensor: ir.ExternalTensor, folder: Path) -> LinkedTensor:
        """A tensor that is linked to its file in this folder."""
        return cls(
            tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or "",
            doc_string=tensor.doc_string, metadata_props=dict(tensor.metadata_props), base_dir=folder,
        )  # fmt: skip

    def _check_path_containment(self) -> None:
        """Done at the door."""


def embed(tensor: TensorProto, who: str, folder: Path) -> None:
    """Read the data of an external tensor into it."""
    place = outside(tensor, who, folder)
    with place.file.open("rb") as file:
        file.seek(place.offset)
        tensor.raw_data = file.read(place.length)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def dense(sparse: onnx.SparseTensorProto, who: str, folder: Path) -> TensorProto:
    """A sparse tensor with its zeros written out, under the name of its values.

    Raises:
        FormatError: Values, indices and shape contradict each other, or the zeros take more than 2 GB.
    """
    values, indices = TensorProto(), TensorProto()
    values.CopyFrom(sparse.values)
    indices.CopyFrom(sparse.indices)
    for part, name in ((values, "values"), (indices, "indices")):
        check_tensor(part, f"{who} ({name})", folder)
        if part.data_location == TensorProto.EXTERNAL:
            embed(part, f"{who} ({name})", folder)
    shape, count = list(sparse.dims), math.prod(values.dims)
    if len(values.dims) != 1 or not shape or any(size <= 0 for size in shape):
        raise FormatError(f"{who} is sparse, of shape {shape} with values of shape {list(values.dims)}: no such thing.")
    whole = TensorProto(data_type=values.data_type, dims=shape, name=values.name)
    if values.data_type == TensorProto.STRING or ir.DataType(values.data_type).bitwidth < 8:
        raise FormatError(f"{who} is sparse with values of {ir.DataType(values.data_type)}: possible: numbers.")
    if byte_count(whole) > _DENSE_LIMIT:
        raise FormatError(f"{who} is sparse and takes {byte_count(whole)} bytes when its zeros are written out.")
    flat = _flat_indices(indices, shape, count, who)
    array = np.zeros(math.prod(shape), onnx.helper.tensor_dtype_to_np_dtype(values.data_type))
    array[flat] = onnx.numpy_helper.to_array(values)
    whole.raw_data = array.tobytes()
    return whole


def _flat_indices(indices: TensorProto, shape: list[int], count: int, who: str) -> NumpyArray:
    """Where the values of a sparse tensor go in the flat dense one."""
    if indices.data_type != TensorProto.INT64 or list(indices.dims) not in ([count], [count, len(shape)]):
        raise FormatError(
            f"{who} is sparse with {count} values and indices of shape {list(indices.dims)}; possible: int64 "
            f"[{count}] or [{count}, {len(shape)}]."
        )
    places = onnx.numpy_helper.to_array(indices)
    limits = np.array([math.prod(shape)] if places.ndim == 1 else shape)
    if count and ((places < 0) | (places >= limits)).any():
        raise FormatError(f"{who} is sparse, and an index lies outside its shape {shape}.")
    flat = places if places.ndim == 1 else np.ravel_multi_index(tuple(places.T), shape)
    if (np.diff(flat) <= 0).any():
        raise FormatError(f"{who} is sparse, and its indices do not rise: two values may have one place.")
    return np.asarray(flat)


def tensors_of(attribute: onnx.AttributeProto) -> Iterator[TensorProto]:
    """The dense tensors that an attribute holds."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
