"""ONNX files as messages: read once, from regular files only, and checked before anything is made of them."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from quark.base.files import require_regular
from quark.errors import FormatError, NotSupportedError, one_line
from quark.onnx.graph.check_proto import check_proto
from quark.onnx_ops.encryption import is_encrypted, load_encrypted

LARGEST = 2**31 - 1
"""Bytes in a message of protobuf."""
SHOWN = 400


def read_header(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """A model file without its external data.

    Raises:
        FormatError: It is none, is no regular file (a device or a pipe is never opened), or contradicts itself.
        NotSupportedError: An input, output or tensor of it is a map.
        ConfigError: It is encrypted, and QUARK_ENCRYPTION_KEY holds no key.
    """
    proto = _read_message(Path(path))
    if not proto.opset_import or not proto.graph.node:
        raise FormatError(f"{path} is not an ONNX model: it has no operators.")
    check_message(proto, os.fspath(path), Path(path).parent)
    return proto


def check_message(proto: onnx.ModelProto, name: str, folder: Path) -> None:
    """Raise FormatError, with the name of the model, where it contradicts itself, and NotSupportedError for maps."""
    try:
        check_proto(proto, folder)
    except FormatError as error:
        raise FormatError(f"{name} is no valid ONNX model: {error}") from None
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if _holds_map(value.type):
            raise NotSupportedError(
                f"{name}: {value.name!r} is a map, as ZipMap gives; onnx_ir reads tensors, sequences and optionals. "
                "Possible: export without ZipMap (zipmap=False of skl2onnx and onnxmltools)."
            )


def _holds_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or optional of maps."""
    inner = kind.WhichOneof("value")
    if inner in ("sequence_type", "optional_type"):
        return _holds_map(getattr(kind, inner).elem_type)
    return inner == "map_type"


def _read_message(path: Path) -> onnx.ModelProto:
    require_regular(path)
    if path.stat().st_size > LARGEST:
        raise FormatError(f"{path} has {path.stat().st_size} bytes; an ONNX model over 2 GB has its weights beside it.")
    if is_encrypted(path):
        return load_encrypted(path)
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # of the parser that the suffix chooses: protobuf's binary, text or JSON
        raise FormatError(f"{path} is not an ONNX model, or truncated: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What another library says, in one line: that of the first cause, cut where it quotes the model."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error) or type(error).__name__
    return (text if len(text) <= SHOWN else f"{text[:SHOWN]} ...").rstrip(".") + "."
