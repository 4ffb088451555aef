"""Live tensors in an ONNX file: how the output of a layer is quantized as it comes.

    static integers        QuantizeLinear, DequantizeLinear
    static FP8             QuantizeLinear, Cast, Mul
    bfloat16, float16      Clip, Cast, Cast
    dynamic uint8          DynamicQuantizeLinear, DequantizeLinear (asymmetric, per tensor)
    block formats          the function MXQuantizeDequantize or BFPQuantizeDequantize, as in the ONNX flow
    others                 the function QuantizeDequantize (onnx_ops/live.py)

A tensor that several layers read under equal scales is quantized once.

Some forms go around what ONNX Runtime (1.31) does to others, each found by a test:

* It takes a DequantizeLinear of FP8 or 4 bits before MatMul, Conv or Add for one of 8-bit integers, fuses all into a
  QLinear operator, and refuses the model. So FP8 is decoded by Cast and Mul, and 4-bit tensors are a function.
* It takes the zero point of FP8 for that of uint8 and drops a Relu before it. So the type is said by `output_dtype`.
* At opset 21 it moves int8 pairs over the Reshape that it puts before a Gemm, then turns them into uint8 but for their
  `output_dtype`, and refuses the model. So int8 codes are stored as uint8 there, shifted by 128: the same values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quark.core.array import NumpyArray, to_numpy
from quark.core.granularity import PerChannel, PerTensor
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.spec import ScaleType, TensorSpec
from quark.errors import CalibrationError, NotSupportedError
from quark.onnx_ops.element_types import FIRST_OPSET, code_type
from quark.onnx_ops.graph_writer import GraphWriter
from quark.onnx_ops.live import live
from quark.onnx_ops.operators import BFP_FORMATS, MX_ELEMENTS, block
from quark.torch.writers.onnx.marked_tensors import MarkedTensor

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCK_TYPES = frozenset({*MX_ELEMENTS, *BFP_FORMATS, "bfp16", "mxint8"})
_OUTPUT_DTYPE_OPSET = 21
"""The first whose QuantizeLinear has `output_dtype`."""

Known = dict[tuple[object, ...], "ir.Value"]
"""The tensors that are quantized already: (tensor, spec, parameters) -> result."""


def write_activation(writer: GraphWriter, node: ir.Node, tensor: MarkedTensor, known: Known) -> None:
    """Put the quantization of a live tensor in the place of a marker."""
    x = node.inputs[0]
    assert x is not None
    params = None if tensor.spec.dynamic else _static(tensor)
    second = tensor.second if tensor.spec.dynamic else None
    key = (id(x), tensor.spec, *_bytes(params), *_bytes(second))
    if key not in known:
        name = f"{x.name}_{tensor.name}" if any(id(x) == read[0] for read in known) else x.name or tensor.name
        float_x = writer.cast(x, writer.kind("FLOAT"), f"{name}_Cast")
        result = _quantized_value(writer, float_x, name, tensor, params, second, x.shape)
        known[key] = writer.cast(result, x.dtype, f"{name}_back")
        known[key].shape = x.shape
    writer.replace(node, known[key])


def _static(tensor: MarkedTensor) -> QParams | None:
    params = getattr(tensor.module, "params", None)
    if params is None and not tensor.spec.is_cast:
        raise CalibrationError(f"{tensor.name} has no scale yet: run quantize_model with calibration data first.")
    return params


def _bytes(params: QParams | None) -> tuple[bytes, ...]:
    if params is None:
        return ()
    zero = b"" if params.zero_point is None else to_numpy(params.zero_point).tobytes()
    return (to_numpy(params.scale).tobytes(), zero)


def _quantized_live(
    writer: GraphWriter, x: ir.Value, name: str, spec: TensorSpec, second: QParams | None, dims: list[int | None] | None
) -> ir.Value:
    """Under scales of its own, which are those of scales where `second` is given."""
    if spec.is_block and spec.dtype.name in BLOCK_TYPES:
        return writer.call(block(spec, writer.opset, dims), [x], f"{name}_{spec.dtype}")
    plain = spec.dtype.name == "uint8" and isinstance(spec.granularity, PerTensor) and not spec.symmetric
    exact = spec.scale_type in (ScaleType.float, ScaleType.float32) and not spec.float_zero_point
    if plain and exact and spec.rounding is RoundType.half_even:
        codes = writer.dynamic_codes(x, f"{name}_QuantizeLinear")
        return writer.node("DequantizeLinear", codes, f"{name}_DequantizeLinear")
    others = () if second is None else (_scalar(writer, f"{name}_scale_2", second.scale),)
    return writer.call(live(spec, dims), [x, *others], f"{name}_{spec.dtype}")


def _quantized_value(
    writer: GraphWriter,
    x: ir.Value,
    name: str,
    tensor: MarkedTensor,
    params: QParams | None,
    second: QParams | None,
    shape: ir.Shape | None,
) -> ir.Value:
    spec = tensor.spec
    dims = None if shape is None else [size if isinstance(size, int) else None for size in shape]
    try:
        if spec.is_cast:
            return _cast(writer, x, name, spec)
        if spec.dynamic:
            return _quantized_live(writer, x, name, spec, second, dims)
        assert params is not None
        if _is_quantize_linear(spec):
            return _pair(writer, x, name, tensor, params)
        zero = 0.0 if params.zero_point is None else params.zero_point
        numbers = [_scalar(writer, f"{name}_scale", params.scale), _scalar(writer, f"{name}_zero_point", zero)]
        return writer.call(live(spec, dims, given=True), [x, *numbers], f"{name}_{spec.dtype}")
    except NotSupportedError as error:
        raise NotSupportedError(f"{tensor.name}: {error}") from None


def _scalar(writer: GraphWriter, name: str, value: object) -> ir.Value:
    return writer.constant(name, np.asarray(to_numpy(value), np.float32).reshape(()))


def _cast(writer: GraphWriter, x: ir.Value, name: str, spec: TensorSpec) -> ir.Value:
    limits = {f"{spec.dtype}_min": spec.dtype.min, f"{spec.dtype}_max": spec.dtype.max}
    bounds = [writer.shared(key, np.asarray(limit, np.float32)) for key, limit in limits.items()]
    clipped = writer.node("Clip", [x, *bounds], f"{name}_Clip")
    codes = writer.cast(clipped, writer.kind(code_type(spec.dtype)), f"{name}_QuantizeLinear")
    return writer.cast(codes, writer.kind("FLOAT"), f"{name}_DequantizeLinear")


def _is_quantize_linear(spec: TensorSpec) -> bool:
    splits = isinstance(spec.granularity, (PerTensor, PerChannel))
    plain = spec.code_spec is None and spec.scale_spec is None and not spec.float_zero_point
    written = spec.dtype.onnx in FIRST_OPSET and 8 <= spec.dtype.bits <= 16
    return splits and plain and written and spec.rounding is RoundType.half_even


def _pair(writer: GraphWriter, x: ir.Value, name: str, tensor: MarkedTensor, params: QParams) -> ir.Value:
    """QuantizeLinear, and back to float."""
    spec = tensor.spec
    axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else None
    attributes = {} if axis is None else {"axis": axis}
    scale, kind = np.asarray(to_numpy(params.scale), np.float32), code_type(spec.dtype)
    if spec.dtype.is_float:
        writer.require(_OUTPUT_DTYPE_OPSET, f"{tensor.name} ({spec})")
        return _float8(writer, x, name, scale, kind, attributes)
    writer.require(FIRST_OPSET[kind], f"{tensor.name} ({spec})")
    if spec.symmetric:
        # Calibration puts -amax half way between two codes. The product with 1 / scale (core/quantize.py) falls on one
        # side, the quotient of QuantizeLinear may fall on the other: then, the next scale under which it does not.
        lowest = np.float32((spec.dtype.min - spec.dtype.max) / 2) * scale
        wanted = np.rint(lowest * (np.float32(1) / scale))
        for other in (np.nextafter(scale, np.float32(np.inf)), np.nextafter(scale, np.float32(0))):
            scale = np.where(np.rint(lowest / scale) == wanted, scale, other)
    zero = np.zeros_like(scale) if params.zero_point is None else to_numpy(params.zero_point)
    if kind == "INT8" and writer.opset >= _OUTPUT_DTYPE_OPSET:
        kind, zero = "UINT8", zero + 128
    inputs = [
        writer.constant(f"{name}_scale", scale),
        writer.constant(f"{name}_zero_point", zero, writer.kind(kind)),
    ]
    codes = writer.node("QuantizeLinear", [x, *inputs], f"{name}_QuantizeLinear", attributes, kind)
    return writer.node("DequantizeLinear", [codes, *inputs], f"{name}_DequantizeLinear", attributes)


def _float8(
    writer: GraphWriter, x: ir.Value, name: str, scale: NumpyArray, kind: str, attributes: dict[str, int]
) -> ir.Value:
    step = writer.constant(f"{name}_scale", scale)
    typed = {**attributes, "output_dtype": int(writer.kind(kind))}
    codes = writer.node("QuantizeLinear", [x, step], f"{name}_QuantizeLinear", typed, kind)
    if attributes:
        if x.shape is None:
            raise NotSupportedError("FP8 per channel needs a tensor of known rank.")
        following = len(x.shape) - 1 - attributes["axis"] % len(x.shape)
        step = writer.constant(f"{name}_scale_column", scale.reshape(-1, *[1] * following))
    return writer.node("Mul", [writer.cast(codes, writer.kind("FLOAT"), f"{name}_Cast"), step], f"{name}_Mul")
