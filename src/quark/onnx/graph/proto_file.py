"""ONNX files as messages: read once, from regular files only, and checked before anything is made of them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Container, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from quark.base.files import require_regular
from quark.errors import FormatError, NotSupportedError, one_line
from quark.onnx.graph.check_proto import check_proto
from quark.onnx.graph.check_tensors import FIELDS, byte_count
from quark.onnx_ops.encryption import is_encrypted, load_encrypted
from quark.onnx_ops.saving import SMALL

LARGEST = 2**31 - 1
"""Bytes in a message of protobuf."""
SHOWN = 400
PLAIN = {ir.DataType[name] for name in ("FLOAT", "FLOAT16", "DOUBLE", "INT64", "INT32", "INT16", "INT8", "UINT8")}
"""The element types that numpy has itself."""


def read_header(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """A model file without its external data.

    Raises:
        FormatError: It is none, is no regular file (a device or a pipe is never opened), or contradicts itself.
        NotSupportedError: An input, output or tensor of it is a map.
        ConfigError: It is encrypted, and QUARK_ENCRYPTION_KEY holds no key.
    """
    return _checked(_read_message(Path(path)), Path(path))


def read_light(path: str | os.PathLike[str]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The message without data of large initializers of the graph, and these initializers as arrays.

    In a message they would be copied by each who looks at them, so they are read from the file into their arrays.
    Raises as `read_header` does.
    """
    found = _scanned(Path(path), _read_array)
    return _lighten(read_header(path)) if found is None else (_checked(found[0], Path(path), found[1]), found[1])


def read_ends(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The message of a file without data of large initializers, for a look at inputs, outputs or nodes alone."""
    found = _scanned(Path(path), lambda *_: None)
    return read_header(path) if found is None else _checked(found[0], Path(path), found[1])


def _checked(proto: onnx.ModelProto, path: Path, elsewhere: Container[str] = ()) -> onnx.ModelProto:
    if not proto.opset_import or not proto.graph.node:
        raise FormatError(f"{path} is not an ONNX model: it has no operators.")
    check_message(proto, os.fspath(path), path.parent, elsewhere)
    return proto


def check_message(proto: onnx.ModelProto, name: str, folder: Path, elsewhere: Container[str] = ()) -> None:
    """Raise FormatError, with the name of the model, where it contradicts itself, and NotSupportedError for maps."""
    try:
        check_proto(proto, folder, elsewhere)
    except FormatError as error:
        raise FormatError(f"{name} is no valid ONNX model: {error}") from None
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if _holds_map(value.type):
            raise NotSupportedError(
                f"{name}: {value.name!r} is a map, as ZipMap gives; onnx_ir reads tensors, sequences and optionals. "
                "Possible: export without ZipMap (zipmap=False of skl2onnx and onnxmltools)."
            )


def _holds_map(kind: onnx.TypeProto) -> bool:
    """Return True where a type is a map, or a sequence or optional of maps."""
    inner = kind.WhichOneof("value")
    if inner in ("sequence_type", "optional_type"):
        return _holds_map(getattr(kind, inner).elem_type)
    return inner == "map_type"


def _require_size(path: Path) -> None:
    require_regular(path)
    if path.stat().st_size > LARGEST:
        raise FormatError(f"{path} has {path.stat().st_size} bytes; an ONNX model over 2 GB has its weights beside it.")


def _read_message(path: Path) -> onnx.ModelProto:
    _require_size(path)
    if is_encrypted(path):
        return load_encrypted(path)
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # of the parser that the suffix chooses: protobuf's binary, text or JSON
        raise FormatError(f"{path} is not an ONNX model, or truncated: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Say the error of another library in one line: that of the first cause, cut where it quotes the model."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error) or type(error).__name__
    return (text if len(text) <= SHOWN else f"{text[:SHOWN]} ...").rstrip(".") + "."


# Files without their weights ------------------------------------------------------------------------------------------

# A message is fields: a tag, number * 8 + kind, then a number (kind 0), 8 bytes (1), a length and bytes (2) or 4 bytes
# (5). https://protobuf.dev/programming-guides/encoding
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Numbers of the fields of ModelProto, GraphProto and TensorProto, of onnx.proto."""
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5

_ReadArray = Callable[[BufferedReader, int, onnx.TensorProto], Any]
"""Of a file, where in it, and the tensor whose values lie there."""


def _lighten(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model without its large weights, in another message, as none gives memory back; and these as arrays."""
    arrays = {}
    kinds = {int(kind): kind.numpy() for kind in PLAIN}
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        if tensor.data_type in kinds and tensor.HasField("raw_data") and math.prod(tensor.dims) >= SMALL:
            kind = kinds[tensor.data_type]
            arrays[tensor.name] = np.frombuffer(tensor.raw_data, kind).reshape(tensor.dims)
            tensor.ClearField("raw_data")
    light = onnx.ModelProto()
    light.CopyFrom(proto)
    return light, arrays


def _read_array(file: BufferedReader, start: int, tensor: onnx.TensorProto) -> Any:
    array = np.empty(tuple(tensor.dims), ir.DataType(tensor.data_type).numpy())
    file.seek(start)
    if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
        raise FormatError(f"{file.name} was cut off while it was read.")
    array.flags.writeable = False
    return array


def _scanned(path: Path, read: _ReadArray) -> tuple[onnx.ModelProto, dict[str, Any]] | None:
    """A message without the large initializers of its graph, and what `read` makes of these.

    None for a file that has none, that is no binary message of protobuf, or is one that only its parser understands:
    whatever is unusual is left to it, and to the checks of the whole.
    """
    _require_size(path)
    if path.suffix != ".onnx" or path.stat().st_size < SMALL or is_encrypted(path):
        return None
    arrays: dict[str, Any] = {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            fields = list(_fields(content, 0, len(content)))
            graphs = [field for field in fields if field[0] == GRAPH]
            if len(graphs) != 1 or graphs[0][1] != LENGTH:
                return None
            ((_, _, start, begin, end),) = graphs
            graph = b"".join(_light_graph(content, begin, end, _taking(read, file, arrays)))
            message = content[:start] + _tag(GRAPH) + _varint(len(graph)) + graph + content[end:]
        return (onnx.ModelProto.FromString(message), arrays) if arrays else None
    except (OSError, ValueError, IndexError, DecodeError):
        return None


def _taking(
    read: _ReadArray, file: BufferedReader, arrays: dict[str, Any]
) -> Callable[[int, int, bytes], bytes | None]:
    """Return what takes values of a tensor out of its message, if they are large and as its type and shape say."""

    def take(start: int, length: int, rest: bytes) -> bytes | None:
        tensor = onnx.TensorProto.FromString(rest)
        plain = ir.DataType(tensor.data_type) in PLAIN and tensor.data_location != onnx.TensorProto.EXTERNAL
        twice = tensor.name in arrays or any(len(getattr(tensor, name)) for name in FIELDS)
        if not plain or twice or math.prod(tensor.dims) < SMALL or byte_count(tensor) != length:
            return None
        arrays[tensor.name] = read(file, start, tensor)
        return rest

    return take


def _light_graph(
    content: mmap.mmap, begin: int, end: int, take: Callable[[int, int, bytes], bytes | None]
) -> Iterator[bytes]:
    """The bytes of a graph, cut where an initializer loses its values."""
    since = begin
    for number, kind, start, inside, stop in _fields(content, begin, end):
        if number != INITIALIZER or kind != LENGTH or stop - inside < SMALL:
            continue
        raw = [field for field in _fields(content, inside, stop) if field[0] == RAW_DATA]
        if len(raw) != 1 or raw[0][1] != LENGTH:
            continue
        ((_, _, cut, first, last),) = raw
        light = take(first, last - first, content[inside:cut] + content[last:stop])
        if light is not None:
            yield content[since:start]
            yield _tag(INITIALIZER) + _varint(len(light)) + light
            since = stop
    yield content[since:end]


def _fields(content: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each field its number and kind, where it begins, and where its bytes, or its number, begin and end.

    Raises:
        ValueError: It goes on beyond the end, or is of no kind that onnx.proto has.
    """
    while position < end:
        start = position
        tag, position = _number(content, position)
        kind, begin = tag & 7, position
        if kind == VARINT:
            _, position = _number(content, position)
        elif kind in (EIGHT, FOUR):
            position += 8 if kind == EIGHT else 4
        elif kind == LENGTH:
            length, begin = _number(content, position)
            position = begin + length
        else:
            raise ValueError(f"a field of the kind {kind}")
        if position > end:
            raise ValueError("a field goes on beyond what holds it")
        yield tag >> 3, kind, start, begin, position


def _number(content: mmap.mmap, position: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number of over ten bytes")


def _tag(number: int) -> bytes:
    return _varint(number << 3 | LENGTH)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
