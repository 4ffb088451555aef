"""The extended operators: a node, and the ONNX function that computes it where no library is registered.

An operator has one name and several bodies: the element type, and where it matters the kind of scale and the
rounding, are the `overload` of the node and of its function (IR version 10). The function declares every attribute, so
that a registered library, which knows nothing of overloads, can take the node instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.rounding import RoundType
from quark.core.spec import ScaleRule, TensorSpec
from quark.onnx_ops.blocks import block_body
from quark.onnx_ops.dpu import INSTANCE_NORM, SOFTMAX, bfloat16_steps
from quark.onnx_ops.linear import linear_body

DOMAIN, VERSION = "com.amd.quark", 1
BLOCK_OPSET, MINIMUM_IR = 14, 10  # Reshape with allowzero; overloads
QUANTIZE, DEQUANTIZE = "ExtendedQuantizeLinear", "ExtendedDequantizeLinear"
MX, BFP = "MXQuantizeDequantize", "BFPQuantizeDequantize"
ANY = "QuantizeDequantize"
DPU_SOFTMAX, DPU_INSTANCE_NORM = "ExtendedSoftmax", "ExtendedInstanceNormalization"
LINEAR_TYPES = ("bfloat16", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32")
ATTRIBUTES: dict[str, dict[str, int | float | str]] = {
    QUANTIZE: {"axis": 1},
    DEQUANTIZE: {"axis": 1},
    MX: {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0},
    BFP: {
        "bfp_method": "to_bfp",
        "axis": 1,
        "bit_width": 16,
        "block_size": 8,
        "rounding_mode": 0,
        "sub_block_size": 2,
        "sub_block_shift_bits": 1,
        "convert_to_bfloat_before_bfp": 0,
        "use_compiler_version_cpu_kernel": 0,
    },
    ANY: {"axis": -1, "block_size": 32},
    DPU_SOFTMAX: {"axis": -1},
    DPU_INSTANCE_NORM: {"epsilon": 1e-5},
}
"""Operator -> attributes and their defaults."""

BFP_FORMATS = {
    "onnx_bfp16": ("to_bfp", 16),
    "mx4": ("to_bfp_prime", 11),
    "mx6": ("to_bfp_prime", 13),
    "mx9": ("to_bfp_prime", 16),
}
"""Element type -> its (bfp_method, bit_width): a code and the 8 bits of the exponent that a block shares."""
MX_ELEMENTS = {
    "fp8_e5m2": "fp8_e5m2",
    "fp8_e4m3": "fp8_e4m3",
    "fp6_e3m2": "fp6_e3m2",
    "fp6_e2m3": "fp6_e2m3",
    "fp4_e2m1": "fp4_e2m1",
    "onnx_mxint8": "int8",
}
"""Element type -> its element_dtype."""

ROUNDING_MODES = {RoundType.round: 0, RoundType.half_up: 1, RoundType.half_even: 2}
"""Those of the documented operators; their float elements have the last alone, whatever a node says."""


@dataclass(frozen=True)
class Operator:
    """One node's operator, and the body that it stands for.

    Attributes:
        name: Op type.
        overload: Which body.
        body: Text of the body for an opset, in ONNX's textual syntax.
        attributes: Those that the node carries.
        inputs: Names that the body gives to them.
    """

    name: str
    overload: str
    body: str = field(repr=False)
    attributes: Mapping[str, int | float | str]
    inputs: tuple[str, ...] = ("x",)


def linear(dtype: str, kind: str, axis: int | None = None) -> tuple[Operator, Operator]:
    """The operators that quantize to `dtype` and dequantize; `kind` is "cast", "tensor" or "axis"."""
    attributes = {} if axis is None else {"axis": axis}
    quantizer, dequantizer = (linear_body(DTYPES[dtype], kind, quantizes) for quantizes in (True, False))
    overload = f"{dtype}_{kind}"
    inputs = ("x", "scale", "zero_point")
    return (
        Operator(QUANTIZE, overload, quantizer, attributes, inputs),
        Operator(DEQUANTIZE, overload, dequantizer, attributes, inputs),
    )


def block(spec: TensorSpec, opset: int, shape: Sequence[object] | None = None) -> Operator:
    """The operator that fake-quantizes in blocks of `spec`.

    Args:
        spec: Block format, axis, block size, rounding.
        opset: Of the model.
        shape: Of the tensor, as far as known (integers): blocks that fill their axis have a shorter body.
    """
    assert isinstance(spec.granularity, PerGroup)
    dtype, size, axis = spec.dtype, spec.granularity.size, spec.granularity.axis
    split: dict[str, int | str] = {"axis": axis, "block_size": size}
    inner = inner_size(spec.granularity, shape)
    view = "" if inner is None else f"_{size}x{inner}"
    raises = dtype.name == "bfp16"  # the kind that has a larger step where a code would not fit
    is_bfp = raises or dtype.name in BFP_FORMATS
    known = (is_bfp or dtype.name in MX_ELEMENTS) and (spec.rounding is RoundType.half_even or not dtype.is_float)
    rule = ScaleRule.floor if is_bfp else spec.scale_rule
    body = block_body(dtype, spec.rounding, opset, size, inner, rule)
    if not known or rule is not ScaleRule.floor or spec.rounding not in ROUNDING_MODES:
        # The documented operators know none of them: a registered library must not take such a node.
        return Operator(ANY, f"{dtype}_{rule.value}_{spec.rounding.name}{view}", body, split)
    mode = ROUNDING_MODES[spec.rounding]
    attributes = {**split, "rounding_mode": mode}
    if is_bfp:
        method, bits = BFP_FORMATS["onnx_bfp16" if raises else dtype.name]
        overload = f"{method}_{bits}{'_raised' if raises else ''}_{mode}{view}"
        own: dict[str, int | str] = {"bfp_method": method, "bit_width": bits, **attributes}
        if raises:
            own["use_compiler_version_cpu_kernel"] = 1
        return Operator(BFP, overload, body, own)
    element = MX_ELEMENTS[dtype.name]
    return Operator(MX, f"{element}_{mode}{view}", body, {"element_dtype": element, **attributes})


def dpu_softmax(axis: int) -> Operator:
    """The Softmax of the DPU."""
    return Operator(DPU_SOFTMAX, "bfloat16", bfloat16_steps(SOFTMAX), {"axis": axis})


def dpu_instance_norm(epsilon: float) -> Operator:
    """The InstanceNormalization of the DPU."""
    inputs = ("x", "scale", "bias")
    return Operator(DPU_INSTANCE_NORM, "bfloat16", bfloat16_steps(INSTANCE_NORM), {"epsilon": epsilon}, inputs)


def inner_size(split: PerGroup, shape: Sequence[object] | None) -> int | None:
    """Return how many values lie after the axis; None where that is not known, or where the last block is not full."""
    if shape is None or not -len(shape) <= split.axis < len(shape):
        return None
    length, *after = shape[split.axis % len(shape) :]
    known = [n for n in (length, *after) if isinstance(n, int) and n > 0]
    if len(known) <= len(after) or known[0] % split.size:
        return None
    return math.prod(known[1:])


def function(operator: Operator, opset: int) -> onnx.FunctionProto:
    """The function of an operator, for a model of this opset."""
    declared = ", ".join(_declared(name, value) for name, value in ATTRIBUTES[operator.name].items())
    head = f'<domain: "{DOMAIN}", overload: "{operator.overload}", opset_import: ["": {opset}]>'
    text = f"{head}\n{operator.name} <{declared}> ({', '.join(operator.inputs)}) => (y) {{\n{operator.body}}}"
    proto = onnx.parser.parse_function(text)
    _prune(proto)
    return proto


def _declared(name: str, default: float | str) -> str:
    """An attribute with its default, in ONNX's textual syntax."""
    if isinstance(default, str):
        return f'{name}: string = "{default}"'
    return f"{name}: {'int' if isinstance(default, int) else 'float'} = {default}"


def _prune(proto: onnx.FunctionProto) -> None:
    """Drop the constants and steps that this body does not need."""
    needed, kept = set(proto.output), []
    for node in reversed(proto.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    del proto.node[:]
    proto.node.extend(reversed(kept))
