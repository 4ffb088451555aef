"""Conversions to half precision, float16 and bfloat16, with or without Casts, and back."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.errors import ConfigError, did_you_mean
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.graph.edit import is_op, prune, remove_unused
from quark.onnx.graph.model_file import constant, infer_shapes, opset, refuse_invalid, refuse_quantized
from quark.onnx.passes.convert_float import convert_fp16_to_fp32, convert_fp32_to_bf16, convert_fp32_to_fp16
from quark.onnx.passes.convert_opset_version import convert_opset_version
from quark.onnx.passes.simplify import simplify
from quark.onnx.search.settle import quantize
from quark.onnx_ops.graph_writer import GraphWriter, add_constant, redirect

FORMATS = ("with_cast", "customqdq", "simulate_bf16", "bf16")
BFLOAT16_OPSET = 22
"""The first opset whose Conv, pools and other operators that 13 left out take bfloat16."""


def to_float16(
    model: ir.Model, keep_io_types: bool, disable_shape_infer: bool, not_simplify: bool, all_tensors_to_one_file: bool
) -> int:
    """Turn a float32 model into float16. Weights outside always go to one file, whether that is asked for or not."""
    refuse_quantized(model)
    if not disable_shape_infer:
        infer_shapes(model)
    if not not_simplify:
        simplify(model)
    count = convert_fp32_to_fp16(model, keep_io_types)
    refuse_invalid(model, "The model in float16")
    return count


def to_float32(model: ir.Model) -> int:
    """Turn a float16 model into float32."""
    count = convert_fp16_to_fp32(model)
    refuse_invalid(model, "The model in float32")
    return count


def to_bfloat16(model: ir.Model, format: str) -> int:
    """Turn a float32 or float16 model into bfloat16.

    Args:
        model: The model, changed in place.
        format: "bf16": every tensor, in opset 22 where an operator does not take it before. "with_cast": a float32
            graph whose tensors pass through bfloat16 by pairs of Cast. "customqdq": the same by custom Q/DQ.
            "simulate_bf16": a float32 graph without Casts whose weights have bfloat16 values.

    Returns:
        How many tensors or places changed.

    Raises:
        ConfigError: For a format that is none of `FORMATS`.
    """
    if format not in FORMATS:
        raise ConfigError(f"The format {format!r} is unknown. {did_you_mean(format, FORMATS)}")
    refuse_quantized(model)
    convert_fp16_to_fp32(model)
    infer_shapes(model)
    if format == "bf16":
        if opset(model) < BFLOAT16_OPSET and not _all_take_bfloat16(model):
            convert_opset_version(model, BFLOAT16_OPSET)
        count = convert_fp32_to_bf16(model)
        refuse_invalid(model, "The model in bfloat16 (another format: with_cast)")
        return count
    config = get_default_config("BF16")
    config.extra_options["BF16QDQToCast"] = format != "customqdq"
    quantize(model, lower(config))
    if format == "simulate_bf16":
        return remove_bfloat16_casts(model)
    return sum(node.op_type in ("Cast", "ExtendedDequantizeLinear") for node in model.graph)


def _all_take_bfloat16(model: ir.Model) -> bool:
    """Return True where every operator of ONNX has a type that may be bfloat16, in the opset of the model."""
    version = opset(model)
    kinds = {node.op_type for node in model.graph.all_nodes() if node.domain == ""}
    schemas = [
        onnx.defs.get_schema(kind, version) for kind in kinds if onnx.defs.has(kind, max_inclusive_version=version)
    ]
    return all(any("tensor(bfloat16)" in c.allowed_type_strs for c in s.type_constraints) for s in schemas)


def to_bfp16(model: ir.Model) -> int:
    """Turn a float32 or float16 model into one whose tensors pass through BFP16 blocks; return how many do."""
    refuse_quantized(model)
    convert_fp16_to_fp32(model)
    infer_shapes(model)
    quantize(model, lower(get_default_config("BFP16")))
    return sum(node.op_type == "BFPQuantizeDequantize" for node in model.graph)


def remove_bfloat16_casts(model: ir.Model) -> int:
    """Remove pairs of Cast to bfloat16 and back, and store bfloat16 weights as float32; return how many."""
    count = 0
    for node in [node for node in model.graph if _casts_to(node, ir.DataType.FLOAT)]:
        source = node.inputs[0]
        producer = source.producer() if source is not None else None
        if source is None:
            continue
        if producer is not None and _casts_to(producer, ir.DataType.BFLOAT16) and producer.inputs[0] is not None:
            if not redirect(node.outputs[0], producer.inputs[0]):
                continue
        elif source.dtype == ir.DataType.BFLOAT16 and source.is_initializer() and not node.outputs[0].is_graph_output():
            value = add_constant(model.graph, f"{source.name}_float", constant(source).astype(np.float32))
            node.outputs[0].replace_all_uses_with(value)
        else:
            continue
        prune(node)
        count += 1
    remove_unused(model)
    return count


def clip_bfloat16(model: ir.Model) -> int:
    """Clip activations to the largest bfloat16 before they are quantized to it; return how many are."""
    writer = GraphWriter(model, typed=True)
    count = 0
    for node in [node for node in model.graph if node.op_type == "ExtendedQuantizeLinear"]:
        source, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        clipped = source is None or is_op(source.producer(), "Clip")
        if source is None or zero is None or zero.dtype != ir.DataType.BFLOAT16 or source.is_initializer() or clipped:
            continue
        ends = {"min": -DTYPES["bfloat16"].max, "max": DTYPES["bfloat16"].max}
        bounds = [
            add_constant(model.graph, f"{source.name}_clip_{end}", np.array(value, np.float32))
            for end, value in ends.items()
        ]
        clip = writer.node("Clip", [source, *bounds], f"{source.name}_clip")
        writer.insert_before(node)
        node.replace_input_with(0, clip)
        count += 1
    return count


def _casts_to(node: ir.Node, kind: ir.DataType) -> bool:
    return is_op(node, "Cast") and node.attributes["to"].as_int() == int(kind)
