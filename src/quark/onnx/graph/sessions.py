"""Sessions of stock ONNX Runtime on models that were edited in memory: other outputs, other names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from quark.errors import CalibrationError, FormatError, NotSupportedError
from quark.onnx.graph.proto_file import read_header, reason
from quark.onnx_ops.custom_libraries import session_options

_PROVIDERS = ("CPUExecutionProvider",)


def open_session(
    model: onnx.ModelProto | Path,
    folder: Path | None = None,
    threads: int = 1,
    optimized: Path | None = None,
    in_float: bool = False,
    weights: Mapping[str, Any] | None = None,
    name: str = "",
    arena: bool = True,
) -> onnxruntime.InferenceSession:
    """A session on the CPU with all graph optimisation.

    Args:
        model: A file, or a model read by `read_header`.
        folder: Where the external data of a model lies that is no file.
        threads: Threads within an operator.
        optimized: Where to write the optimised graph, weights beside it.
        in_float: Compute with the decoded values, as Q/DQ define it, not in integer kernels; weights are decoded once.
        weights: Arrays of a model of `split_weights`.
        name: What an error calls it; "" for the file.
        arena: Keep the memory of a run for the next.

    Raises:
        FormatError: ONNX Runtime does not load it.
        NotSupportedError: It lacks an operator of another domain, or a kernel.
    """
    options = session_options()
    options.log_severity_level, options.enable_cpu_mem_arena = 4, arena
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that wait for the next operator by spinning take the time of another that computes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if folder is not None:
        options.add_session_config_entry(FOLDER, str(folder))
    if in_float:
        options.add_session_config_entry(*DECODED)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.data")
    name = name or (str(model) if isinstance(model, Path) else "The model")
    try:
        if not isinstance(model, Path) and weights is not None:
            return session_over(model, weights, options)
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        return onnxruntime.InferenceSession(source, options, providers=list(_PROVIDERS))
    except Exception as error:
        raise _refusal(error)(f"{name} does not load in ONNX Runtime: {error}") from error


def session_over(
    proto: onnx.ModelProto,
    weights: Mapping[str, Any],
    options: onnxruntime.SessionOptions,
    providers: Sequence[str] = _PROVIDERS,
) -> onnxruntime.InferenceSession:
    """A session over weights where they are, be it a mapped file; raises what ONNX Runtime raises.

    Args:
        proto: A model that names its weights as external, as `split_weights` gives it.
        weights: Their arrays by name. The session keeps them.
        options: Of the session; the weights are added.
        providers: Where it runs.
    """
    import onnxruntime

    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    shared = [
        onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, types[name]) for name, array in weights.items()
    ]
    options.add_external_initializers(list(weights), shared)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=list(providers))
    session.quark_weights = shared  # what it reads has to live as long as it does
    return session


DECODED = ("session.disable_quant_qdq", "1")
"""The option, and its value, with which a session computes with decoded values and not in integer kernels."""


UNKNOWN = re.compile(r"Fatal error: (?!ai\.onnx:)[^\s:]+:\S* is not a registered function/op")
"""An operator of a domain of its own: a library that is loaded at run time may have it."""


FOLDER = "session.model_external_initializers_file_folder_path"
"""The option that names the folder of a message's external data."""
SMALL = 1 << 20
"""Bytes of a message, and elements beside it, of a model that is optimised in no time."""
LARGE = 1 << 28
"""Elements of a model that is not optimised for a check, whatever that may show."""


def _refusal(error: Exception) -> type[FormatError] | type[NotSupportedError]:
    """Return the error for a model that ONNX Runtime does not load: it is not valid, or the runtime cannot say."""
    lacking = type(error).__name__ == "NotImplemented" or UNKNOWN.search(str(error)) is not None
    return NotSupportedError if lacking else FormatError


def require_loads(
    model: onnx.ModelProto | Path, name: str, weights: Mapping[str, Any] | None = None, folder: Path | None = None
) -> None:
    """Ask ONNX Runtime whether a model is valid. Nothing is run, and no large graph optimised.

    Args:
        model: A file, or a message.
        name: What the error begins with.
        weights: Arrays of a message of `split_weights`.
        folder: Where the external data of a message lies.

    Raises:
        FormatError: It is not.
        NotSupportedError: The runtime cannot say: it lacks an operator of another domain, or a kernel.
    """
    options = session_options()
    options.log_severity_level = 4
    # Some contradictions of shapes are seen only when bodies are inlined and constants folded.
    levels = onnxruntime.GraphOptimizationLevel
    proto = read_header(model) if isinstance(model, Path) else model
    bodies = any(attribute.HasField("g") for node in proto.graph.node for attribute in node.attribute)
    outside = (tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL)
    external_elements = sum(math.prod(tensor.dims) for tensor in outside)
    size = proto.ByteSize() + external_elements
    # Folding reads the weights, which the runtime otherwise maps: more than a little may be more than memory holds.
    folds = size < SMALL or (bodies and size < LARGE)
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if folds else levels.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
    if folder is not None:
        options.add_session_config_entry(FOLDER, str(folder))
    try:
        if isinstance(model, Path):
            onnxruntime.InferenceSession(str(model), options, providers=list(_PROVIDERS))
        else:
            session_over(model, weights or {}, options)
    except Exception as error:
        raise _refusal(error)(f"{name} is no valid ONNX model: ONNX Runtime says: {reason(error)}") from error


@cache
def integer_kernels_are_exact() -> bool:
    """Return True where this processor sums products of 8 bits as they are: without VNNI, sums of two saturate."""
    size = 64
    for kind, most in (("UINT8", 255), ("INT8", 127)):
        node = onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])
        types = onnx.TensorProto
        x, y = (
            onnx.helper.make_tensor_value_info(name, types.DataType.Value(each), [size, size])
            for name, each in (("x", kind), ("y", "INT32"))
        )
        weight = onnx.numpy_helper.from_array(np.full((size, size), 127, np.int8), "w")
        graph = onnx.helper.make_graph([node], "products", [x], [y], [weight])
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
        (found,) = open_session(proto).run(None, {"x": np.full((size, size), most, kind.lower())})
        if not np.all(found == size * most * 127):
            return False
    return True


def ask_for(proto: onnx.ModelProto, names: Iterable[str]) -> None:
    """Make these tensors outputs of a model, where they are none yet."""
    present = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)


def run_sample(
    session: onnxruntime.InferenceSession,
    names: Sequence[str] | None,
    feed: Mapping[str, Any],
    options: onnxruntime.RunOptions | None = None,
) -> list[Any]:
    """The outputs of a session for one sample. Raises CalibrationError where the model fails on it."""
    with failing_on(feed):
        return list(session.run(names, feed, options))


@contextmanager
def failing_on(feed: Mapping[str, Any]) -> Iterator[None]:
    """Within: what ONNX Runtime raises becomes a CalibrationError that names the sample."""
    try:
        yield
    except Exception as error:
        shapes = ", ".join(f"{name}: {array.dtype} {list(array.shape)}" for name, array in feed.items())
        raise CalibrationError(f"The model fails on a sample ({shapes}): {error}") from error
