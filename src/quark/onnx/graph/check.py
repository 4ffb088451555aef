"""What is refused at the door: graphs and weights that no runtime takes, so that no work is done for nothing."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from quark.errors import FormatError


def check_graph(model: ir.Model, name: str) -> None:
    """Raise FormatError for a graph that no runtime runs."""
    if not model.opset_imports or len(model.graph) == 0:
        raise FormatError(f"{name} is not an ONNX model: it has no operators.")
    if not model.graph.outputs:
        raise FormatError(f"{name} has no outputs.")
    _check_versions(model, name)
    _check_names(model, name)


def sort_nodes(model: ir.Model, name: str) -> None:
    """Put nodes that are out of order into one. Raises FormatError where none exists."""
    try:
        model.graph.sort()
    except ValueError as error:
        raise FormatError(f"{name} is not an ONNX model: {str(error).rstrip('.')}.") from None


def _check_versions(model: ir.Model, name: str) -> None:
    given = {"opset": model.opset_imports.get("", 0), "IR version": model.ir_version}
    newest = {"opset": onnx.defs.onnx_opset_version(), "IR version": onnx.IR_VERSION}
    for what, version in given.items():
        if version > newest[what]:
            raise FormatError(
                f"{name} has {what} {version}; the newest that onnx {onnx.__version__} knows is {newest[what]}."
            )


def _check_names(model: ir.Model, name: str) -> None:
    seen: set[str] = set()
    for node in model.graph:
        if node.name in seen:
            raise FormatError(f"{name} has two nodes of the name {node.name!r}; no scope could tell them apart.")
        seen |= {node.name} if node.name else set()
    for node in model.graph.all_nodes():
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        # What is no UTF-8 is read as bytes.
        if any(isinstance(text, bytes) for text in (node.name, node.op_type, *(value.name for value in values))):
            raise FormatError(f"{name} is damaged: a name at the node {node.name!r} is no text.")
        for value in values:
            if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
                raise FormatError(
                    f"{name} is not an ONNX model: {node.name} reads {value.name!r}, which nothing gives."
                )


def check_weights(model: ir.Model, name: str) -> None:
    """Raise FormatError for weights that are missing, truncated, or outside the folder of the model."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                _check_external(tensor, value.name or "")
            elif isinstance(tensor, ir.TensorProtoTensor) and tensor.raw.HasField("raw_data"):
                given = len(tensor.raw.raw_data)
                if given != tensor.nbytes:
                    raise FormatError(f"{name} is damaged: {value.name} has {given} bytes, its shape {tensor.nbytes}.")


def _check_external(tensor: ir.ExternalTensor, name: str) -> None:
    base = Path(tensor.base_dir or ".").resolve()
    file = (base / tensor.location).resolve()
    if not file.is_relative_to(base):
        raise FormatError(f"The data of {name} lies outside the model's folder: {tensor.location}.")
    if not file.is_file():
        raise FormatError(f"The data of {name} is missing: {tensor.location} is not beside the model.")
    end, size = (tensor.offset or 0) + tensor.nbytes, file.stat().st_size
    if size < end:
        raise FormatError(f"The data of {name} is truncated: it ends at byte {end} of {file}, which has {size}.")
