"""The cost of a layout on a CPU, said where the user has named no runtime: layouts of NPUs are slow there.

ONNX Runtime fuses a Conv and its Relu into one integer kernel only where the Relu is gone: where 0 is the smallest
code, quantizing clips by itself. With a fixed zero point in the middle the Relu stays, the Q/DQ pair after it is not
that of the Conv, and every Conv computes in float between two conversions. 16-bit activations have no integer kernel.

Some layers that a file leaves in float, ONNX Runtime computes in integers all the same. Where a Conv or Gemm of float
weights reads a DequantizeLinear, and a QuantizeLinear alone reads what it gives (after a Relu or Clip too), the
runtime quantizes the weights itself as it loads the file, to int8 by their largest value, and takes its integer kernel
(its pass WeightBiasQuantization). The file says nothing of it.

A processor without VNNI adds two products of uint8 and int8 codes in 16 bits, where they saturate. The runtime's own
option against it (session.x64quantprecision) does not load a file in which several weights share a zero point: 1.31
names the uint8 copies after what they are made of, and refuses the second one of a name.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import is_constant
from quark.onnx.graph.sessions import integer_kernels_are_exact
from quark.onnx.operators import CLAMPS, LAYERS


def cpu_price(model: ir.Model, settings: Settings) -> str | None:
    """Why a quantized model will be no faster than the float one in ONNX Runtime on a CPU.

    Args:
        model: The quantized model.
        settings: What was asked for.

    Returns:
        A line for the log; None where a runtime was named, or nothing of this kind is in the model.
    """
    spec = settings.specs.layer.input
    if settings.qdq.target_given or spec is None or spec.dynamic or spec.is_block or not spec.has_zero_point:
        return None
    if spec.dtype.bits > 8:
        why = f"it has no integer kernels for {spec.dtype} activations"
    elif spec.symmetric and (count := sum(_stays(node) for node in model.graph)):
        why = (
            f"{count} Relu stay after their layers under symmetric {spec.dtype} activations, so that these do not fuse"
        )
    else:
        return None
    return (
        f"This is a layout for NPUs: on a CPU, ONNX Runtime may run it slower than float, as {why}. For a CPU, use the "
        "target ort_x64 with uint8 activations (on the command line --config U8S8_AAWS --target ort_x64)."
    )


def _stays(node: ir.Node) -> bool:
    """Return True where a node is a Relu or Clip directly after a linear layer, and before a Q/DQ pair."""
    if node.op_type not in CLAMPS or node.inputs[0] is None:
        return False
    producer = node.inputs[0].producer()
    coded = any(use.node.op_type == "QuantizeLinear" for use in node.outputs[0].uses())
    return coded and producer is not None and producer.op_type in (*LAYERS, "Add")


# Layers that are left in float ----------------------------------------------------------------------------------------


_ABSORBED = ("Conv", "Gemm")


def in_integers_unasked(model: ir.Model, settings: Settings) -> str | None:
    """Say which excluded layers ONNX Runtime computes in integers all the same.

    Args:
        model: The quantized model.
        settings: What was asked for.

    Returns:
        A line for the log; None where nothing was excluded, all of it stays in float, or another runtime was named.
    """
    if _runs_elsewhere(settings) or not settings.specs.exclude:
        return None
    names = [node.name or "" for node in model.graph if _is_absorbed(node)]
    if not names:
        return None
    return (
        f"ONNX Runtime on a CPU computes {', '.join(names)} in integers all the same, as both neighbours are "
        "quantized: it rounds these weights to int8 when it loads the file. To keep a layer in float there, exclude "
        "the one before or after it too."
    )


def _runs_elsewhere(settings: Settings) -> bool:
    """Return True where the user named a runtime that is not ONNX Runtime."""
    return settings.qdq.target_given and not settings.qdq.target.startswith("ort")


def _is_absorbed(node: ir.Node) -> bool:
    if node.op_type not in _ABSORBED or node.domain or len(node.inputs) < 2:
        return False
    data, weight = node.inputs[0], node.inputs[1]
    decoded = data is not None and data.producer() is not None and _is(data.producer(), "DequantizeLinear")
    return decoded and is_constant(weight) and _only_coded(node.outputs[0])


def _only_coded(value: ir.Value) -> bool:
    """Return True where one QuantizeLinear is all that reads a tensor, or what a Relu or Clip makes of it."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        return False
    return _is(readers[0], "QuantizeLinear") or (_is(readers[0], *CLAMPS) and _only_coded(readers[0].outputs[0]))


# Sums of integers that saturate --------------------------------------------------------------------------------------


CODES = (ir.DataType.UINT8, ir.DataType.INT8)


def saturating_layers(model: ir.Model, settings: Settings | None = None) -> str | None:
    """Say which layers the integer kernels of this processor compute otherwise than the file says.

    Args:
        model: The quantized model.
        settings: What was asked for, if that is known.

    Returns:
        A line for the log; None where the kernels are exact, no layer is concerned, or another runtime was named.
    """
    if (settings is not None and _runs_elsewhere(settings)) or integer_kernels_are_exact():
        return None
    count = sum(_multiplies_int8(node) for node in model.graph)
    if not count:
        return None
    return (
        f"This processor has no VNNI: in {count} layers ONNX Runtime adds products of 8-bit inputs and int8 weights in "
        "pairs of 16 bits, which saturate. Here, use uint8 weights, which MeasurePlacement=True (--measure) writes on "
        'such a processor, or the session option "session.disable_quant_qdq" = "1", which computes in float.'
    )


def _multiplies_int8(node: ir.Node) -> bool:
    """Return True where a node is a layer of decoded inputs of 8 bits, and of decoded int8 weights."""
    if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 2:
        return False
    data, weight = (_decoder(value) for value in node.inputs[:2])
    if data is None or weight is None or not is_constant(weight.inputs[0]):
        return False
    return _code_type(data) in CODES and _code_type(weight) == ir.DataType.INT8


def _decoder(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that gives a tensor, if one does."""
    producer = None if value is None else value.producer()
    return producer if _is(producer, "DequantizeLinear") else None


def _code_type(decoder: ir.Node) -> ir.DataType | None:
    """The type of what a DequantizeLinear decodes, which is that of its zero point."""
    for value in (*decoder.inputs[2:3], decoder.inputs[0]):
        if value is not None and (kind := value.dtype) is not None:
            return kind
    return None


def _is(node: ir.Node | None, *kinds: str) -> bool:
    return node is not None and node.op_type in kinds
