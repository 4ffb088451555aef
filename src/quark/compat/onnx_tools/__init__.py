"""Conversions of ONNX files, each a command `python -m quark.onnx.tools.<name>`. A new one is a row here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import onnx_ir as ir

from quark.compat.onnx_tools.biases import biases_to_int16, biases_to_int32
from quark.compat.onnx_tools.domains import bfloat16_to_casts, custom_to_standard, rename_custom_ops
from quark.compat.onnx_tools.half import (
    FORMATS,
    clip_bfloat16,
    remove_bfloat16_casts,
    to_bfloat16,
    to_bfp16,
    to_float16,
    to_float32,
)
from quark.compat.onnx_tools.node_precision import describe_precision
from quark.compat.onnx_tools.random_quantize import random_quantize
from quark.compat.onnx_tools.replace_inf import replace_inf_weights
from quark.compat.onnx_tools.shapes import assign_shapes
from quark.compat.onnx_tools.shift_codes import resize_to_powers_of_two, shift_codes
from quark.compat.onnx_tools.text import read_text, write_text
from quark.compat.onnx_tools.tool import Flag, Tool, refused
from quark.core.names.registry import Registry
from quark.onnx.passes import PASSES
from quark.onnx.qdq.remove_qdq import remove_qdq, remove_qdq_between

TOOLS: Registry[Tool] = Registry("ONNX tool")

_shapes = {"fix_shapes": Flag('shapes of inputs, as "name:[1,3,224,224];other:[1,10]"')}
_bfloat16 = {"format": Flag(f"how bfloat16 is written: {', '.join(FORMATS)}", default="with_cast")}
REFUSED = {
    "convert_lstm_to_customlstm": "its operator is for one compiler alone, and has no meaning in ONNX; "
    "possible: the quantized LSTM as it is",
    "convert_qdq_to_qop": "runtimes fuse Q/DQ into integer operators as they load a model; "
    "possible: the model with Q/DQ as it is",
    "save_tensor_hist": "it draws pictures; possible: option Statistics, whose file holds the histogram of each tensor",
    "save_weights_hist": "it draws pictures; possible: `quark evaluate`, which lists the error of every layer",
}
"""Documented tools that are not part of this version: the reason, and what to do."""


def _unique(model: ir.Model, op_types: str) -> int:
    return PASSES["copy_shared_init"](model, tuple(name.strip() for name in op_types.split(",") if name.strip()))


def _nothing(model: object) -> int:
    return 0


for _name, _tool in {
    "fix_shapes": Tool(
        assign_shapes,
        "Give every tensor the shape that follows from the inputs, or from those that are named.",
        {"fix_shapes": replace(_shapes["fix_shapes"], default="")},
    ),
    "convert_dynamic_to_fixed": Tool(PASSES["fix_shapes"], "Give inputs fixed shapes.", _shapes),
    "convert_opset_version": Tool(
        PASSES["convert_opset_version"],
        "Convert a model to another opset.",
        {"target_opset": Flag("the opset", int)},
        ("input", "target_opset", "output"),
    ),
    "convert_nchw_to_nhwc": Tool(PASSES["convert_nchw_to_nhwc"], "Make image inputs NHWC."),
    "convert_fp16_to_fp32": Tool(to_float32, "Turn float16 into float32."),
    "convert_fp32_to_fp16": Tool(
        to_float16,
        "Turn float32 into float16.",
        {
            "keep_io_types": Flag("inputs and outputs stay float32", bool),
            "disable_shape_infer": Flag("use the types that the model states", bool),
            "not_simplify": Flag("keep constants in nodes, Identity and Dropout", bool),
            "all_tensors_to_one_file": Flag("weights outside go to one file, as they always do", bool),
        },
    ),
    "convert_fp32_to_bf16": Tool(to_bfloat16, "Turn float32 into bfloat16.", _bfloat16),
    "convert_fp16_to_bf16": Tool(to_bfloat16, "Turn float16 into bfloat16.", _bfloat16),
    "convert_fp32_to_bfp16": Tool(to_bfp16, "Turn float32 into BFP16."),
    "convert_fp16_to_bfp16": Tool(to_bfp16, "Turn float16 into BFP16."),
    "insert_clip_bfloat16_qdq": Tool(clip_bfloat16, "Clip activations to the range of bfloat16."),
    "convert_bias_int32_to_int16": Tool(biases_to_int16, "Store int32 biases as int16."),
    "convert_a8w8_npu_to_a8w8_cpu": Tool(biases_to_int32, "Store int8 biases as int32, as CPUs compute."),
    "convert_resize_fs_to_pof2s": Tool(resize_to_powers_of_two, "Make scales beside Resize powers of two."),
    "print_a16w8_a8w8_nodes": Tool(
        _nothing, "List layers with 8-bit and 16-bit activations.", order=("input",), tell=describe_precision
    ),
    "remove_bf16_cast": Tool(remove_bfloat16_casts, "Remove Casts to bfloat16 and back."),
    "replace_bfloat16_qdq_cast": Tool(bfloat16_to_casts, "Turn bfloat16 Q/DQ into Casts."),
    "convert_s8s8_to_u8s8": Tool(
        partial(shift_codes, source="int8", target="uint8"), "Make int8 activations uint8, with the same values."
    ),
    "convert_u16s8_to_s16s8": Tool(
        partial(shift_codes, source="uint16", target="int16"), "Make uint16 activations int16, with the same values."
    ),
    "convert_u16u8_to_u8u8": Tool(
        partial(shift_codes, source="uint16", target="uint8"), "Make uint16 activations uint8, of the same range."
    ),
    "remove_qdq": Tool(remove_qdq, "Make a quantized model float."),
    "convert_quant_to_float": Tool(remove_qdq, "Make a quantized model float."),
    "remove_qdq_between_ops": Tool(
        remove_qdq_between,
        "Remove Q/DQ between ops.",
        {"between_ops": Flag('pairs of op types, as "Conv,Relu;Mul,Add"')},
    ),
    "remove_qdq_mul_add": Tool(partial(remove_qdq_between, between_ops="Mul,Add"), "Remove Q/DQ between Mul and Add."),
    "convert_customqdq_to_qdq": Tool(custom_to_standard, "Turn contributed and custom Q/DQ into those of ONNX."),
    "convert_custom_ops": Tool(
        rename_custom_ops,
        "Give custom operators the names that former libraries have.",
        {"reverse_conversion": Flag("from the former names to those of today", bool)},
    ),
    "convert_shared_initializer_to_unique": Tool(
        _unique,
        "Give each node an initializer of its own.",
        {"op_types": Flag("op types, as Conv,Gemm; left out: all", default="")},
    ),
    "remove_initializer_from_input": Tool(PASSES["remove_input_init"], "Take initializers out of the inputs."),
    "replace_inf_weights": Tool(
        replace_inf_weights,
        "Replace infinite weights.",
        {"replace_inf_value": Flag("the value, and its negative", float, 10000.0)},
    ),
    "convert_onnx_to_onnxtxt": Tool(_nothing, "Write a model as text.", write=write_text),
    "convert_onnxtxt_to_onnx": Tool(_nothing, "Read a model from text.", read=read_text),
    "random_quantize": Tool(
        random_quantize,
        "Quantize a model with random data.",
        {
            "config": Flag("name of a configuration", default="XINT8"),
            "exclude_nodes": Flag('nodes or patterns to keep in float, as "a;b"', default=""),
            "exclude_subgraphs": Flag(
                'parts to keep in float, first and last nodes, as "[a,b],[c];[d],[e]"', default=""
            ),
        },
    ),
}.items():
    TOOLS.register(_name, _tool)

for _name, _reason in REFUSED.items():
    TOOLS.register(_name, refused(_name, _reason))

__all__ = ["TOOLS", "Flag", "Tool"]
