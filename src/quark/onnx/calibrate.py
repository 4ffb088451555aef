"""One pass over the data, graph optimisation on: the statistics of exactly those tensors that will be quantized.

Each sample's activations are reduced at once; memory holds one sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from quark.core.observers import Observer
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, QuarkError
from quark.log import progress
from quark.onnx.model import PROTOBUF_LIMIT, to_proto, weight_bytes
from quark.onnx.parameters import make_observer
from quark.onnx.settings import Settings

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

Feed = dict[str, np.ndarray[Any, Any]]

ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


def collect(
    model: ir.Model, groups: dict[str, tuple[TensorSpec, list[str]]], reader: Any, settings: Settings
) -> dict[str, Observer]:
    """Run the data through the float model and observe.

    Args:
        model: The float model; not changed.
        groups: Name of a class of tensors -> its spec and the tensors whose values count.
        reader: Anything with `get_next() -> dict | None`.
        settings: Limits and providers.

    Returns:
        Name of a class -> what was observed.

    Raises:
        CalibrationError: No data, or a sample that does not fit the inputs: says what was expected and what came.
        NonFiniteError: A tensor held NaN or Inf.
    """
    observers = {name: make_observer(spec, settings) for name, (spec, _) in groups.items()}
    members = [(tensor, observers[name]) for name, (_, tensors) in groups.items() for tensor in tensors]
    inputs = {value.name for value in model.graph.inputs}
    wanted = list(dict.fromkeys(tensor for tensor, _ in members if tensor not in inputs))
    count = 0
    with _Session(model, wanted, settings) as session:
        for feed in progress(samples(reader, session, settings.calibration_samples), "calibration"):
            values = dict(zip(wanted, session.run(wanted, feed), strict=True)) if wanted else {}
            for tensor, observer in members:
                observer.update(np.asarray(values[tensor] if tensor in values else feed[tensor]))
            count += 1
    if count == 0:
        raise CalibrationError("The calibration reader yields nothing: static quantization needs at least one sample.")
    return observers


def samples(reader: Any, session: onnxruntime.InferenceSession, limit: int | None) -> Iterator[Feed]:
    """The reader's samples, each checked against the inputs of the model."""
    if not callable(getattr(reader, "get_next", None)):
        raise CalibrationError(f"A calibration reader needs get_next(); {type(reader).__name__} has none.")
    expected = {i.name: i for i in session.get_inputs()}
    count = 0
    while limit is None or count < limit:
        feed = reader.get_next()
        if feed is None:
            return
        _check_feed(feed, expected)
        yield feed
        count += 1


def _check_feed(feed: Any, expected: dict[str, Any]) -> None:
    described = ", ".join(f"{i.name}: {ORT_TYPES.get(i.type, i.type)} {i.shape}" for i in expected.values())
    if not isinstance(feed, dict) or set(feed) != set(expected):
        came = sorted(feed) if isinstance(feed, dict) else type(feed).__name__
        raise CalibrationError(f"A calibration sample gives {came}; the model expects {described}.")
    for name, value in feed.items():
        array, wanted = np.asarray(value), expected[name]
        shape = [d if isinstance(d, int) else None for d in wanted.shape]
        fits = len(shape) == array.ndim and all(w in (None, g) for w, g in zip(shape, array.shape, strict=False))
        if not fits or str(array.dtype) != ORT_TYPES.get(wanted.type, str(array.dtype)):
            raise CalibrationError(
                f"The calibration input {name!r} is {array.dtype} {list(array.shape)}; the model expects {described}."
            )


class _Session:
    """A session whose outputs are the wanted tensors; over a temporary file where weights lie outside the model."""

    def __init__(self, model: ir.Model, wanted: list[str], settings: Settings) -> None:
        self.model, self.wanted, self.settings = model, wanted, settings
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> onnxruntime.InferenceSession:
        # onnxruntime is imported when a session is made, onnx_ir with it.
        import onnx_ir as ir
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        outside = any(isinstance(v.const_value, ir.ExternalTensor) for v in self.model.graph.initializers.values())
        if outside or weight_bytes(self.model) > PROTOBUF_LIMIT:
            self.folder = tempfile.TemporaryDirectory()
            path = Path(self.folder.name) / "model.onnx"
            ir.save(self.model, path, external_data="model.data")
            proto = onnx.load(path, load_external_data=False)
            self._add_outputs(proto)
            onnx.save(proto, path)
            source: str | bytes = str(path)
        else:
            proto = to_proto(self.model)
            self._add_outputs(proto)
            source = proto.SerializeToString()
        try:
            return onnxruntime.InferenceSession(source, options, providers=list(self.settings.providers))
        except Exception as error:
            raise QuarkError(f"ONNX Runtime does not load the float model: {error}") from error

    def _add_outputs(self, proto: onnx.ModelProto) -> None:
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.wanted if name not in present)

    def __exit__(self, *exception: object) -> None:
        if self.folder is not None:
            self.folder.cleanup()
