"""ONNX models as the text form of protobuf, which keeps every bit."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf import text_format

from quark.base.files import atomic_file
from quark.errors import FormatError
from quark.onnx.graph.model_file import read, to_proto


def read_text(path: Path) -> ir.Model:
    """Read a model from text. Raises FormatError where it is none."""
    if not path.is_file():
        raise FormatError(f"{path} is not a file.")
    try:
        return read(text_format.Parse(path.read_text("utf-8"), onnx.ModelProto()))
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not the text of an ONNX model: {error}.") from None


def write_text(model: ir.Model, path: Path, external_data: bool = False) -> None:
    """Write a model as text, weights inside."""
    with atomic_file(path) as temporary:
        temporary.write_text(text_format.MessageToString(to_proto(model)), "utf-8")
