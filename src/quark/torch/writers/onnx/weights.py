"""Weights in an ONNX file: codes of the narrowest type that the format has, and the nodes that decode them.

    integers           DequantizeLinear(codes, scale, zero point), blocked where groups share a scale
    FP8                Cast(codes) * scale; DequantizeLinear in groups (activations.py says why)
    mx4, mx6, mx9      the same: in units of half a step, a pair that is not shifted holds even codes
    bfloat16, float16  Cast(codes)
    FP4, FP6, E5M3     lookup[codes] * scale: the formats of opset 21 do not hold them
    others             (codes - zero point) * scale, in float64 beyond 16 bits

A matrix with several scales that the graph transposes is stored transposed: in this form ONNX Runtime fuses the
DequantizeLinear with the MatMul after it. (With one scale, it fuses only where the Transpose stays.)
Scales have the type that their format gives them: uint8 exponents for E8M0, FP8 under a float32 scale (NVFP4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from quark.core.array import NumpyArray, to_numpy
from quark.core.blocks.block_types import BlockType
from quark.core.dtypes import DTYPES, MICRO_EXPONENT, Dtype
from quark.core.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.packing import decode, encode
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import NotSupportedError
from quark.onnx_ops.element_types import BLOCKED_OPSET, FIRST_OPSET, code_type
from quark.onnx_ops.graph_writer import GraphWriter
from quark.torch.writers.onnx.marked_tensors import MarkedTensor

_E8M0_BIAS = 127


@dataclass(frozen=True)
class Weight:
    """A weight that is written.

    Attributes:
        tensor: Where it is quantized.
        x: What holds it: float values, or the stored tensor of a loaded checkpoint.
        params: Scale and zero point.
        transposed: Whether it is stored with its two axes swapped.
    """

    tensor: MarkedTensor
    x: torch.Tensor
    params: QParams | None
    transposed: bool = False

    @property
    def spec(self) -> TensorSpec:
        """The spec of the tensor."""
        return self.tensor.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as it is stored."""
        shape = self.tensor.shape(self.x)
        return shape[::-1] if self.transposed else shape

    def codes(self) -> NumpyArray:
        """The values of the codes in the shape of the float tensor, as it is in the model."""
        return to_numpy(self.tensor.codes(self.x, self.params))

    def turned(self, array: NumpyArray) -> NumpyArray:
        """An array over the axes of the tensor, with these axes as they are stored."""
        return array.T if self.transposed and array.ndim == 2 else array

    def axis(self, axis: int) -> int:
        """An axis of the tensor in what is stored."""
        ndim = len(self.shape)
        return ndim - 1 - axis % ndim if self.transposed else axis % ndim


def write_weight(writer: GraphWriter, node: ir.Node, tensor: MarkedTensor, x: torch.Tensor, four_bit: bool) -> None:
    """Put stored codes and their decoding in the place of a marker."""
    if isinstance(tensor.spec.dtype, BlockType):
        raise NotSupportedError(f"{tensor.name}: {tensor.spec.dtype} is a block type of GGUF and has no ONNX form.")
    weight = Weight(tensor, x, tensor.params(x))
    readers = [use.node for use in node.outputs[0].uses()]
    if tensor.spec.is_cast or _is_linear(tensor.spec):
        one_scale = isinstance((tensor.spec.code_spec or tensor.spec).granularity, PerTensor)
        weight = replace(weight, transposed=bool(readers) and not one_scale and all(map(_is_transpose, readers)))
        decoded = (_cast if tensor.spec.is_cast else _linear)(writer, weight, four_bit)
    else:
        decoded = _computed(writer, weight, four_bit)
    result = writer.cast(decoded, node.outputs[0].dtype, f"{tensor.name}_Cast")
    result.shape = ir.Shape(weight.shape)
    writer.replace(node, result)
    for reader in readers if weight.transposed else ():
        reader.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        writer.graph.remove(reader, safe=True)


def _is_transpose(node: ir.Node) -> bool:
    swaps = node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]
    return swaps and not node.outputs[0].is_graph_output()


def _cast(writer: GraphWriter, weight: Weight, four_bit: bool) -> ir.Value:
    kind = writer.kind(code_type(weight.spec.dtype))
    return writer.constant(f"{weight.tensor.name}_quantized", lambda: weight.turned(weight.codes()), kind, weight.shape)


# DequantizeLinear ----------------------------------------------------------------------------------------------------


def _is_linear(spec: TensorSpec) -> bool:
    """Return True where DequantizeLinear decodes the codes, and one product at most gives the values."""
    code_spec = spec.code_spec or spec
    outer = spec.code_spec is None or isinstance(spec.granularity, PerTensor)
    # 32-bit codes are decoded in float64; of the other floats, the file has bit patterns.
    decodes = code_spec.dtype.bits <= 16 and (not code_spec.dtype.is_float or code_spec.dtype.onnx in FIRST_OPSET)
    return decodes and not code_spec.float_zero_point and outer


def _linear(writer: GraphWriter, weight: Weight, four_bit: bool) -> ir.Value:
    spec, params, name = weight.spec, weight.params, weight.tensor.name
    assert params is not None
    inner, inner_params = spec, params
    if spec.code_spec is not None:
        assert params.second is not None
        inner, inner_params = spec.code_spec, params.second
    kind = code_type(inner.dtype, 4 if four_bit else 8)
    attributes, scale, zero, codes = _blocks(weight, inner, inner_params)
    writer.require(BLOCKED_OPSET if "block_size" in attributes else FIRST_OPSET[kind], f"{name} ({inner})")
    stored = writer.constant(f"{name}_quantized", codes, writer.kind(kind), weight.shape)
    if inner.dtype.is_float and "block_size" not in attributes:
        following = len(weight.shape) - 1 - attributes["axis"] if attributes else 0
        step = writer.constant(f"{name}_scale", scale.reshape(-1, *[1] * following) if attributes else scale)
        return writer.node("Mul", [writer.cast(stored, writer.kind("FLOAT"), f"{name}_Cast"), step], f"{name}_Mul")
    inputs = [stored, _scale(writer, f"{name}_scale", scale, inner, inner_params)]
    if zero is not None:
        inputs.append(writer.constant(f"{name}_zero_point", zero, writer.kind(kind)))
    result = writer.node("DequantizeLinear", inputs, f"{name}_DequantizeLinear", attributes)
    if spec.code_spec is None:
        return result
    outer = writer.constant(f"{name}_scale_1", np.asarray(to_numpy(params.scale), np.float32))
    return writer.node("Mul", [result, outer], f"{name}_Mul")


def _blocks(
    weight: Weight, spec: TensorSpec, params: QParams
) -> tuple[dict[str, int], NumpyArray, NumpyArray | None, Callable[[], NumpyArray]]:
    """(attributes, scale, zero point, codes) of DequantizeLinear, all as they are stored."""
    scale, split, shape = to_numpy(params.scale), spec.granularity, weight.tensor.shape(weight.x)
    zero = None if params.zero_point is None or _is_centred(spec) else to_numpy(params.zero_point)
    codes = weight.codes
    if spec.dtype.name in MICRO_EXPONENT:
        scale, codes = _half_steps(weight, scale)
    attributes: dict[str, int] = {}
    if isinstance(split, PerChannel):
        attributes = {"axis": weight.axis(split.axis)}
    elif isinstance(split, PerToken):
        attributes = {"axis": weight.axis(-1), "block_size": shape[-1]}
        scale, zero = scale[..., None], None if zero is None else zero[..., None]
    elif isinstance(split, PerGroup):
        attributes = {"axis": weight.axis(split.axis), "block_size": split.split(shape[split.axis])[1]}
    elif isinstance(split, PerBlock):
        attributes = {"axis": weight.axis(-1), "block_size": split.size[1]}
        scale = np.repeat(scale, split.size[0], axis=-2)[..., : shape[-2], :]
        zero = None if zero is None else np.repeat(zero, split.size[0], axis=-2)[..., : shape[-2], :]
    turned = None if zero is None else weight.turned(zero)
    return attributes, weight.turned(scale), turned, lambda: weight.turned(codes())


def _is_centred(spec: TensorSpec) -> bool:
    """Return True where the zero point is that which DequantizeLinear assumes."""
    return not spec.has_zero_point or (spec.symmetric and spec.dtype.signed)


def _half_steps(weight: Weight, steps: NumpyArray) -> tuple[NumpyArray, Callable[[], NumpyArray]]:
    """The half step of each block, and codes in its units: a pair has the whole step, or the half if it is shifted."""
    spec = weight.spec
    pairs = spec.pairs
    axis = pairs.axes(steps.ndim)[0]
    half = pairs.blocks(steps).max(axis=axis) / 2

    def codes() -> NumpyArray:
        whole = pairs.unblock(np.repeat(np.expand_dims(half, axis), pairs.size, axis), steps.shape)
        ratio = spec.split.to_blocks(steps / whole, weight.tensor.shape(weight.x))
        values = weight.codes()
        return np.asarray(spec.split.unblock(spec.split.blocks(values) * ratio, values.shape))

    return half, codes


# Scales --------------------------------------------------------------------------------------------------------------


def _scale(writer: GraphWriter, name: str, scale: NumpyArray, spec: TensorSpec, params: QParams) -> ir.Value:
    """The scale as a float32 value of the graph, stored in the type that its format gives it."""
    if scale.ndim == 0:
        return writer.constant(name, np.asarray(_multiplied(scale, spec, params), np.float32))
    if spec.is_block:
        exponents = np.frexp(scale)[1] - 1 + _E8M0_BIAS
        powers = np.exp2(np.arange(256, dtype=np.float64) - _E8M0_BIAS).clip(max=2.0**127)
        stored = writer.constant(f"{name}_exponent", exponents.clip(0, 255), writer.kind("UINT8"))
        return _lookup(writer, name, stored, "e8m0_values", powers)
    second = params.second
    if spec.scale_spec is not None and second is not None and np.size(second.scale) == 1:
        outer = writer.constant(f"{name}_2", np.asarray(to_numpy(second.scale), np.float32).reshape(()))
        if spec.scale_spec.dtype.is_float and spec.scale_spec.dtype.onnx in FIRST_OPSET:
            codes = writer.constant(f"{name}_quantized", scale, writer.kind(spec.scale_spec.dtype.onnx))
            return writer.node("DequantizeLinear", [codes, outer], f"{name}_DequantizeLinear")
        codes = _values(writer, name, lambda: scale, scale.shape, spec.scale_spec.dtype)
        return writer.node("Mul", [codes, outer], f"{name}_Mul")
    if spec.scale_type is ScaleType.float8_e5m3:
        return _values(writer, name, lambda: scale, scale.shape, DTYPES["fp8_e5m3"])
    return writer.constant(name, np.asarray(_multiplied(scale, spec, params), np.float32))


def _multiplied(scale: NumpyArray, spec: TensorSpec, params: QParams) -> NumpyArray:
    second = params.second
    if spec.scale_spec is None or second is None:
        return scale
    return scale * to_numpy(second.scale).reshape([1] * scale.ndim)


def _values(
    writer: GraphWriter, name: str, values: Callable[[], NumpyArray], shape: tuple[int, ...], dtype: Dtype
) -> ir.Value:
    """Values of an element type that ONNX does not have, stored as bit patterns."""
    table = decode(np.arange(1 << dtype.bits), dtype)
    kind = code_type(dtype)
    writer.require(FIRST_OPSET[kind], f"{name} ({dtype})")

    def patterns() -> NumpyArray:
        return encode(np.asarray(values(), np.float32), dtype)

    stored = writer.constant(f"{name}_quantized", patterns, writer.kind(kind), shape)
    return _lookup(writer, name, stored, f"{dtype}_values", table)


def _lookup(writer: GraphWriter, name: str, codes: ir.Value, table_name: str, table: NumpyArray) -> ir.Value:
    """table[codes], in float32."""
    index = writer.cast(codes, writer.kind("INT32"), f"{name}_index")
    values = writer.shared(table_name, np.asarray(table, np.float32))
    return writer.node("Gather", [values, index], f"{name}_Gather")


# Everything else -----------------------------------------------------------------------------------------------------


def _computed(writer: GraphWriter, weight: Weight, four_bit: bool) -> ir.Value:
    """Codes in the shape of their blocks, decoded by plain arithmetic."""
    spec, params, name = weight.spec, weight.params, weight.tensor.name
    assert params is not None
    if spec.code_spec is not None:
        raise NotSupportedError(f"{name}: {spec} has no ONNX form; per tensor, with integer codes, it has.")
    shape = weight.tensor.shape(weight.x)
    work = "DOUBLE" if spec.dtype.bits > 16 else "FLOAT"
    value = _stored_blocks(writer, weight, work, four_bit)
    if params.zero_point is not None and not _is_centred(spec):
        zero = to_numpy(spec.split.to_blocks(params.zero_point, shape))
        zero_value = writer.constant(f"{name}_zero_point", zero, writer.kind(work))
        value = writer.node("Sub", [value, zero_value], f"{name}_Sub", kind=work)
    steps = to_numpy(spec.split.to_blocks(params.scale, shape))
    scale = writer.cast(_scale(writer, f"{name}_scale", steps, spec, params), writer.kind(work), f"{name}_scale_Cast")
    value = writer.node("Mul", [value, scale], f"{name}_Mul", kind=work)
    return _unblocked(writer, writer.cast(value, writer.kind("FLOAT"), f"{name}_float"), spec.split, shape, name)


def _stored_blocks(writer: GraphWriter, weight: Weight, work: str, four_bit: bool) -> ir.Value:
    """The values of the codes in the block view."""
    spec, name = weight.spec, weight.tensor.name
    shape = spec.split.block_shape(weight.tensor.shape(weight.x))

    def blocks() -> NumpyArray:
        return np.asarray(spec.split.blocks(weight.codes()))

    if spec.dtype.is_float:
        return _values(writer, name, blocks, shape, spec.dtype)
    kind = writer.kind(code_type(spec.dtype, 4 if four_bit else 8))
    stored = writer.constant(f"{name}_quantized", blocks, kind, shape)
    return writer.cast(stored, writer.kind(work), f"{name}_Cast")


def _unblocked(writer: GraphWriter, value: ir.Value, split: Granularity, shape: tuple[int, ...], name: str) -> ir.Value:
    """The block view back in the shape of the tensor, without padding."""
    if split.block_shape(shape) == shape:
        return value
    padded = list(shape)
    if isinstance(split, PerGroup):
        padded[split.axis] = math.prod(split.split(shape[split.axis]))
    value = writer.node("Reshape", [value, writer.constant(f"{name}_padded", np.array(padded))], f"{name}_Reshape")
    if tuple(padded) == shape:
        return value
    assert isinstance(split, PerGroup)
    numbers = {"starts": 0, "ends": shape[split.axis], "axes": split.axis % len(shape)}
    bounds = [writer.constant(f"{name}_{key}", np.array([number])) for key, number in numbers.items()]
    return writer.node("Slice", [value, *bounds], f"{name}_Slice")
