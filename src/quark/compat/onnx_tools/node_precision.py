"""Tells in which integer type the activations of each layer are stored: `print_a16w8_a8w8_nodes`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from quark.onnx.graph.model_file import constant, is_constant, read
from quark.onnx.operators import LAYERS
from quark.onnx.qdq.remove_qdq import DEQUANTIZE

WIDTHS: Mapping[str, str] = {"int8": "int8", "uint8": "int8", "int16": "int16", "uint16": "int16"}
"""Type of the codes -> the precision that it counts as."""


def _nodes_by_precision(model: ir.Model) -> dict[str, list[str]]:
    """The layers with 8-bit and with 16-bit input activations: {"int8": names, "int16": names}.

    A MatMul counts where one of its operands, and only one, is a weight.
    """
    names: dict[str, list[str]] = {width: [] for width in dict.fromkeys(WIDTHS.values())}
    for node in model.graph:
        if node.op_type not in LAYERS or (node.op_type == "MatMul" and sum(map(_is_weight, node.inputs)) != 1):
            continue
        activation = node.inputs[1] if _is_weight(node.inputs[0]) else node.inputs[0]
        decoder = activation.producer() if activation is not None else None
        if decoder is None or decoder.op_type not in DEQUANTIZE:
            continue
        zero = constant(decoder.inputs[2]) if len(decoder.inputs) > 2 else None
        width = WIDTHS.get("uint8" if zero is None else str(zero.dtype))
        if width is not None:
            names[width].append(node.name or "")
    return names


def _is_weight(value: ir.Value | None) -> bool:
    """Return True where a value is stored, be it as codes or as floats."""
    decoder = value.producer() if value is not None else None
    return is_constant(decoder.inputs[0] if decoder is not None and decoder.op_type in DEQUANTIZE else value)


def describe_precision(model: ir.Model) -> Iterator[str]:
    """The names of both kinds, each on a line, and how many there are."""
    found = _nodes_by_precision(model)
    for width, names in found.items():
        yield f"{width} activation node names:"
        yield from names
    for width, names in found.items():
        yield f"{width} activation node count: {len(names)}"


def a16w8_a8w8_nodes(input_model_path: str | os.PathLike[str] | onnx.ModelProto) -> tuple[list[str], list[str]]:
    """The names of the layers with 8-bit activations, and of those with 16-bit ones.

    Raises:
        FormatError: There is no ONNX model.
    """
    found = _nodes_by_precision(read(input_model_path))
    return found["int8"], found["int16"]
