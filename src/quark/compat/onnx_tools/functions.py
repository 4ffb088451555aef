"""The conversions as functions on ModelProto: what the modules of `quark.onnx.tools` are documented with.

A ModelProto that is passed in is never changed: the converted model is what comes back. `convert(args)` of several
modules takes what `argparse` makes of a command line, and goes from file to file.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx_ir as ir

from quark.base.command_line import results
from quark.compat.onnx_tools import REFUSED, TOOLS
from quark.compat.onnx_tools.biases import biases_to_int16
from quark.compat.onnx_tools.compare_folders import show
from quark.compat.onnx_tools.node_precision import describe_precision
from quark.core.array import NumpyArray
from quark.core.metrics import psnr
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.graph.edit import remove_unused
from quark.onnx.graph.model_file import infer_shapes, read, to_proto
from quark.onnx.passes.copy_shared_init import copy_bias_init, copy_shared_init
from quark.onnx_ops.saving import save

Source = str | os.PathLike[str] | onnx.ModelProto
PATHS = {
    "input": ("input", "input_model", "input_model_path"),
    "output": ("output", "output_model", "output_model_path", "quantized_model_path"),
    "external data": ("save_as_external_data", "external_data"),
}
"""A value that a tool needs -> the names under which the documented command lines have it."""


# From model to model --------------------------------------------------------------------------------------------------


def _converted(tool: str, model: Source, *flags: Any) -> onnx.ModelProto:
    graph = read(model)
    TOOLS[tool].run(graph, *flags)
    return to_proto(graph)


def _on_models(tool: str, summary: str) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """A function of one argument, the model."""

    def convert(model: onnx.ModelProto) -> onnx.ModelProto:
        return _converted(tool, model)

    convert.__name__ = convert.__qualname__ = tool
    convert.__doc__ = summary
    return convert


convert_a8w8_npu_to_a8w8_cpu = _on_models("convert_a8w8_npu_to_a8w8_cpu", "The model with int32 biases.")
convert_customqdq_to_qdq = _on_models("convert_customqdq_to_qdq", "The model with the Q/DQ of ONNX itself.")
convert_s8s8_to_u8s8 = _on_models("convert_s8s8_to_u8s8", "The model with uint8 activations instead of int8.")
convert_u16s8_to_s16s8 = _on_models("convert_u16s8_to_s16s8", "The model with int16 activations instead of uint16.")
insert_clip_bfloat16_qdq = _on_models("insert_clip_bfloat16_qdq", "The model with activations clipped to bfloat16.")
remove_bf16_cast = _on_models("remove_bf16_cast", "The model without Casts to bfloat16 and back.")
remove_qdq = _on_models("remove_qdq", "The quantized model as a float one.")
remove_qdq_mul_add = _on_models("remove_qdq_mul_add", "The model without Q/DQ between Mul and Add.")
replace_bfloat16_qdq_cast = _on_models("replace_bfloat16_qdq_cast", "The model with Casts instead of bfloat16 Q/DQ.")


def convert_bias_int32_to_int16(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """The model with int16 biases, and whether there were int32 ones."""
    graph = read(model)
    count = biases_to_int16(graph)
    return to_proto(graph), count > 0


def convert_custom_ops(model: onnx.ModelProto, domain: str, mapping: Mapping[str, str]) -> onnx.ModelProto:
    """The model with operators of other names.

    Args:
        model: The model.
        domain: The domain that renamed operators then have.
        mapping: Former op type -> its new name.
    """
    graph = read(model)
    found = [node for node in graph.graph.all_nodes() if node.op_type in mapping]
    for node in found:
        node.domain, node.op_type = domain, mapping[node.op_type]
    if found:
        graph.opset_imports[domain] = 1
    remove_unused(graph)
    return to_proto(graph)


def convert_opset_version(model: onnx.ModelProto, target_opset: int) -> onnx.ModelProto:
    """The model in another opset. Raises NotSupportedError where it cannot be."""
    return _converted("convert_opset_version", model, target_opset)


def convert_float16_to_float(
    model: onnx.ModelProto,
    disable_shape_infer: bool = False,
    op_block_list: Sequence[str] | None = None,
    node_block_list: Sequence[str] | None = None,
    subgraphs_to_include: Sequence[Any] | None = None,
) -> onnx.ModelProto:
    """The float16 model in float32.

    Args:
        model: The model.
        disable_shape_infer: Leave shapes as the model states them.
        op_block_list, node_block_list, subgraphs_to_include: Not in this version: the whole model is converted.

    Raises:
        NotSupportedError: A part of the model is asked for.
    """
    if op_block_list or node_block_list or subgraphs_to_include:
        raise NotSupportedError("convert_float16_to_float converts whole models in this version, not parts of one.")
    graph = read(model)
    TOOLS["convert_fp16_to_fp32"].run(graph)
    if not disable_shape_infer:
        infer_shapes(graph)
    return to_proto(graph)


def copy_shared_initializers(
    onnx_model: onnx.ModelProto,
    support_op_types: Sequence[str] = (),
    prefix: str = "duplicated",
    only_bias: bool = False,
) -> onnx.ModelProto:
    """The model in which nodes of some types share no initializer.

    Args:
        onnx_model: The model.
        support_op_types: The op types; empty: all.
        prefix: What the names of copies begin with.
        only_bias: Copy biases only: third inputs.
    """
    graph = read(onnx_model)
    kinds = tuple(support_op_types) or tuple({node.op_type for node in graph.graph})
    present = set(graph.graph.initializers)
    (copy_bias_init if only_bias else copy_shared_init)(graph, kinds)
    for name in set(graph.graph.initializers) - present:
        graph.graph.initializers[name].name = f"{prefix}{name}"
    return to_proto(graph)


def remove_qdq_between_ops(model: onnx.ModelProto, between_ops: Iterable[tuple[str, str]]) -> onnx.ModelProto:
    """The model without Q/DQ between pairs of op types, [("Conv", "Relu"), ...]."""
    return _converted("remove_qdq_between_ops", model, ";".join(",".join(pair) for pair in between_ops))


def fix_input_shapes(model: onnx.ModelProto, fix_shapes_config: str) -> onnx.ModelProto:
    """The model with fixed shapes of inputs, as "name:[1,3,224,224];other:[1,10]", and of what follows from them."""
    return _converted("convert_dynamic_to_fixed", model, fix_shapes_config)


def get_input_shapes(onnx_model: onnx.ModelProto) -> dict[str, list[int]]:
    """Input name -> shape, 0 for a dimension that is not fixed."""
    return _shapes(onnx_model.graph.input)


def get_output_shapes(onnx_model: onnx.ModelProto) -> dict[str, list[int]]:
    """Output name -> shape, 0 for a dimension that is not fixed."""
    return _shapes(onnx_model.graph.output)


def _shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, list[int]]:
    return {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in values}


# From model or file to model or file ----------------------------------------------------------------------------------


def _write_converted(
    tool: str, source: Source, target: str | os.PathLike[str] | None, **flags: Any
) -> onnx.ModelProto | None:
    """The converted model, or None where it went to a file."""
    if target is None:
        return _converted(tool, source, *flags.values())
    if isinstance(source, onnx.ModelProto):
        graph = read(source)
        TOOLS[tool].run(graph, *flags.values())
        save(graph, target)
    else:
        TOOLS[tool].convert(Path(source), Path(target), **flags)
    return None


def convert_quant_to_float(
    quant_model: Source, float_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Make a quantized model float; returns it where no path to write is given."""
    return _write_converted("convert_quant_to_float", quant_model, float_model)


def convert_resize_fs_to_pof2s(
    input_model: Source, output_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Make the scales beside Resize powers of two; returns the model where no path to write is given."""
    return _write_converted("convert_resize_fs_to_pof2s", input_model, output_model)


def convert_u16u8_to_u8u8(
    input_model: Source, output_model: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Make uint16 activations uint8, of the same range; returns the model where no path to write is given."""
    return _write_converted("convert_u16u8_to_u8u8", input_model, output_model)


def replace_inf_in_onnx_weights(
    input_model: Source, output_model: str | os.PathLike[str] | None = None, replace_inf_value: float = 10000.0
) -> onnx.ModelProto | None:
    """Replace infinite weights by a value or its negative; returns the model where no path to write is given."""
    return _write_converted("replace_inf_weights", input_model, output_model, replace_inf_value=replace_inf_value)


def convert_fp32_to_bfp16(input_model_path: str, output_model_path: str) -> None:
    """Write a float32 model whose tensors pass through BFP16 blocks."""
    _write_converted("convert_fp32_to_bfp16", input_model_path, output_model_path)


def convert_fp16_to_bfp16(input_model_path: str, output_model_path: str) -> None:
    """Write a float16 model whose tensors pass through BFP16 blocks."""
    _write_converted("convert_fp16_to_bfp16", input_model_path, output_model_path)


# From the arguments of a command line ---------------------------------------------------------------------------------


def _of_arguments(tool: str) -> Callable[[Namespace], None]:
    """A function of what argparse makes of the tool's command line."""

    def convert(args: Namespace) -> None:
        given = dict(vars(args))
        source, target, beside = (
            next((given.pop(name) for name in names if name in given), None) for names in PATHS.values()
        )
        flags = {}
        for name, flag in TOOLS[tool].flags.items():
            value = given.get(name)
            flags[name] = (False if flag.kind is bool else flag.default) if value is None else value
        missing = [name for name, value in {"input": source, "output": target, **flags}.items() if value is None]
        if missing:
            raise ConfigError(f"{tool}: the arguments lack {', '.join(missing)}.")
        TOOLS[tool].convert(Path(str(source)), Path(str(target)), bool(beside), **flags)

    convert.__doc__ = f"{TOOLS[tool].summary} Takes the arguments of the command {tool}."
    return convert


fp16_to_bf16_of_arguments = _of_arguments("convert_fp16_to_bf16")
fp16_to_bfp16_of_arguments = _of_arguments("convert_fp16_to_bfp16")
fp16_to_fp32_of_arguments = _of_arguments("convert_fp16_to_fp32")
fp32_to_bf16_of_arguments = _of_arguments("convert_fp32_to_bf16")
fp32_to_bfp16_of_arguments = _of_arguments("convert_fp32_to_bfp16")
fp32_to_fp16_of_arguments = _of_arguments("convert_fp32_to_fp16")
s8s8_to_u8s8_of_arguments = _of_arguments("convert_s8s8_to_u8s8")
u16s8_to_s16s8_of_arguments = _of_arguments("convert_u16s8_to_s16s8")
u16u8_to_u8u8_of_arguments = _of_arguments("convert_u16u8_to_u8u8")
fix_shapes_of_arguments = _of_arguments("fix_shapes")
random_quantize_of_arguments = _of_arguments("random_quantize")
remove_initializer_of_arguments = _of_arguments("remove_initializer_from_input")


def print_a16w8_a8w8_nodes(args: Namespace) -> None:
    """Print the layers with 8-bit and with 16-bit activations of the model at `args.input`."""
    for line in describe_precision(read(args.input)):
        results().print(line)


def compare_result_folders(baseline_results_folder: str, quantized_results_folder: str) -> None:
    """Print how far the results in one folder are from those in another."""
    show(Path(baseline_results_folder), Path(quantized_results_folder))


# Beside the conversions -----------------------------------------------------------------------------------------------


def fix_input_and_output_shapes(model_input: Source, fix_shapes: str) -> onnx.ModelProto:
    """The model with these shapes of inputs and outputs, as "x:[1,3,224,224];y:[1,10]", and of what follows."""
    return _converted("fix_shapes", model_input, fix_shapes)


def generate_random_data(model_input: Source) -> dict[str, NumpyArray]:
    """One sample of seeded noise for every input; unknown dimensions count as 1."""
    feed = RandomDataReader(model_input).get_next()
    assert feed is not None
    return feed


def infer_all_tensors_shape(model_input: Source, save_as_external_data: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, of all tensors whose shape follows from the inputs.

    Args:
        model_input: The model; nothing is run, and nothing written.
        save_as_external_data: Of no effect, as no file is written.
    """
    graph = read(model_input)
    infer_shapes(graph)
    values = (value for node in graph.graph for value in node.outputs)
    known = {value.name or "": value.shape for value in values if value.shape is not None}
    return {
        name: tuple(int(str(size)) for size in shape)
        for name, shape in known.items()
        if all(isinstance(size, int) for size in shape)
    }


def save_all_tensors_shape(model_input: Source, tensor_name_shape_dict: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """The model with these shapes noted at its tensors.

    Raises:
        ConfigError: A name is no tensor of the model.
    """
    graph = read(model_input)
    infer_shapes(graph)
    values = {value.name: value for node in graph.graph for value in node.outputs}
    for name, sizes in tensor_name_shape_dict.items():
        if name not in values:
            raise ConfigError(f"{name!r} is no tensor of the model.")
        values[name].shape = ir.Shape(list(sizes))
    return to_proto(graph)


def find_nms(model: onnx.ModelProto) -> list[str]:
    """The names of the NonMaxSuppression nodes: the shapes after them follow from values."""
    return [node.name for node in model.graph.node if node.op_type == "NonMaxSuppression"]


def scale2pos(scale: float) -> int:
    """The position of a fixed-point format whose step is the smallest power of two not below a scale."""
    bounded = min(max(scale, 2.0**-127), 2.0**127)
    return int(np.floor(-np.log2(bounded)))


def pos2scale(pos: int) -> float:
    """The step of a fixed-point format, 2^-pos."""
    return float(2.0**-pos)


def calculate_psnr(reference_image: NumpyArray, noisy_image: NumpyArray) -> NumpyArray:
    """PSNR in dB; the peak is the largest magnitude of the reference, and equal images give infinity."""
    return np.array(psnr(np.asarray(reference_image), np.asarray(noisy_image)))


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotSupportedError(f"{name} is not part of this version: {reason}.")

    refuse.__doc__ = f"Not in this version: {reason}."
    return refuse


convert_lstm_to_customlstm = _refused("convert_lstm_to_customlstm", REFUSED["convert_lstm_to_customlstm"])
convert_qdq_to_qop = _refused("convert_qdq_to_qop", REFUSED["convert_qdq_to_qop"])
save_tensor_hist_figure = _refused("save_tensor_hist_figure", REFUSED["save_tensor_hist"])
save_weights_hist_figures = _refused("save_weights_hist", REFUSED["save_weights_hist"])
