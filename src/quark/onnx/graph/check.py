"""What is refused at the door: graphs that no runtime takes, so that no work is done for nothing."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from quark.errors import FormatError
from quark.onnx.graph.check_tensors import quoted


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


def _is_given(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


def _check_names(model: ir.Model, name: str) -> None:
    for node in model.graph.all_nodes():
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        # What is no UTF-8 is read as bytes.
        if any(isinstance(text, bytes) for text in (node.name, node.op_type, *(value.name for value in values))):
            raise FormatError(f"{name} is damaged: a name at the node {node.name!r} is no text.")
        for value in values:
            if not _is_given(value):
                raise FormatError(
                    f"{name} is not an ONNX model: {node.name} reads {quoted(value.name or '')}, which nothing gives."
                )
    for value in model.graph.outputs:
        if not _is_given(value):
            raise FormatError(f"{name} is not an ONNX model: nothing gives its output {quoted(value.name or '')}.")
