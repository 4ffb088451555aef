"""The inputs of a model: their names, element types and shapes; and whether a sample fits them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import CalibrationError, FormatError, NotSupportedError
from quark.onnx.graph.proto_file import read_ends
from quark.onnx_ops.saving import model_files

Feed = dict[str, NumpyArray]


@dataclass(frozen=True)
class Input:
    """One input: numpy's name of its element type, and its dimensions; a name or None stands for any size.

    That of text is "object"; arrays of numpy's own text, as files hold it without pickled objects, are text too.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        kind = "text" if self.dtype == "object" else self.dtype
        if self.shape is None:
            return f"{self.name}: {kind} of any shape"
        sizes = ("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {kind} [{', '.join(sizes)}]"

    def fits(self, array: NumpyArray) -> bool:
        """Return True where an array has this element type and shape."""
        if str(array.dtype) != self.dtype and not (self.dtype == "object" and array.dtype.kind == "U"):
            return False
        if self.shape is None:
            return True
        same = (not isinstance(size, int) or size == got for size, got in zip(self.shape, array.shape, strict=False))
        return len(self.shape) == array.ndim and all(same)


def model_inputs(model: str | os.PathLike[str] | onnx.ModelProto | ir.Model) -> dict[str, Input]:
    """The inputs of a model by name; an input with a default value is none.

    Raises:
        FormatError: No ONNX file, or an input without type.
        NotSupportedError: An input is a sequence, an optional or a map.
    """
    if isinstance(model, (str, os.PathLike)):
        model = read_ends(model)
    if isinstance(model, onnx.ModelProto):
        defaults = {tensor.name for tensor in model.graph.initializer}
        values = [_tensor_of_proto(value) for value in model.graph.input]
    else:
        defaults, values = set(model.graph.initializers), list(model.graph.inputs)
    return {value.name or "": _input(value) for value in values if value.name not in defaults}


def _tensor_of_proto(value: onnx.ValueInfoProto) -> ir.Value:
    if value.type.WhichOneof("value") == "map_type":  # onnx_ir reads none
        raise _no_tensor(value.name, "a map")
    return ir.serde.deserialize_value_info_proto(value, None)


def _no_tensor(name: str | None, kind: str) -> NotSupportedError:
    return NotSupportedError(
        f"The input {name} is {kind}, and samples hold tensors only. Possible: quantize without samples "
        "(INT8_CPU_DYNAMIC, or weights only), or export the model with a tensor for each input."
    )


def _input(value: ir.Value) -> Input:
    if isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
        raise _no_tensor(value.name, "a sequence" if isinstance(value.type, ir.SequenceType) else "an optional")
    if not isinstance(value.type, ir.TensorType) or value.type.dtype is ir.DataType.UNDEFINED:
        raise FormatError(f"The input {value.name} has no element type.")
    dims = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
    if dims is not None:  # below 0, as some exporters write it, is unknown
        dims = tuple(None if isinstance(d, int) and d < 0 else d for d in dims)
    return Input(value.name or "", str(value.type.dtype.numpy()), dims)


def check_feed(feed: Any, inputs: dict[str, Input], where: str = "A calibration sample") -> None:
    """Raise CalibrationError unless a sample has exactly the inputs of the model, each of its type and shape."""
    expected = ", ".join(map(str, inputs.values()))
    if not isinstance(feed, dict) or set(feed) != set(inputs):
        came = sorted(map(str, feed)) if isinstance(feed, dict) else type(feed).__name__
        raise CalibrationError(f"{where} gives {came}; the model expects {expected}.")
    for name, value in feed.items():
        array = np.asarray(value)
        if not inputs[name].fits(array):
            raise CalibrationError(
                f"{where}: the input {name!r} is {array.dtype} {list(array.shape)}; the model expects {expected}."
            )


def file_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a model file and of the external data it names."""
    return sum(file.stat().st_size for file in model_files(path) if file.is_file())
