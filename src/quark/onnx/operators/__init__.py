"""The rule of each op type. A new one is a row here.

RULES are quantized unless a config says otherwise. ON_REQUEST, and any op type without a row (its float tensors, not
its constants), are quantized where a config names them or asks for all op types. NEVER stays in float.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.operators.rule import Rule
from quark.onnx_ops.operators import DPU_INSTANCE_NORM, DPU_SOFTMAX

ELEMENTWISE = Rule()
ONE_INPUT = Rule(data=(0,))
HOMOGENEOUS_INPUT = Rule(data=(0,), homogeneous=True)
MOVES_DATA = Rule(data=(0,), shares_scale=True)
MOVES_CHANNELS = Rule(data=(0,), shares_scale=True, homogeneous=True)

RULES: dict[str, Rule] = {
    "Conv": Rule(data=(0,), weight=1, output_axis=0, input_axis=1, data_axis=1, bias=2, window=True),
    "ConvTranspose": Rule(data=(0,), weight=1, output_axis=1, input_axis=0, data_axis=1, bias=2, window=True),
    "Gemm": Rule(data=(0,), weight=1, output_axis=1, input_axis=0, data_axis=1, result_axis=-1, bias=2),
    "MatMul": Rule(data=(0, 1), weight=1, output_axis=-1, input_axis=-2, data_axis=-1),
    "InstanceNormalization": ONE_INPUT,
    "LayerNormalization": Rule(data=(0,), data_axis=-1),
    "Softmax": Rule(data=(0,), data_axis=-1),
    "Gather": Rule(data=(0,), shares_scale=True, stored=(0,)),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Min", "Max", "Concat", "PRelu"), ELEMENTWISE),
    "Where": Rule(data=(1, 2)),
    **dict.fromkeys(("ReduceMean", "Sigmoid", "Tanh", "Gelu", "Erf", "Clip"), ONE_INPUT),
    **dict.fromkeys(("HardSigmoid", "HardSwish", "LpNormalization"), ONE_INPUT),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "Relu", "LeakyRelu"), HOMOGENEOUS_INPUT),
    **dict.fromkeys(
        ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "DepthToSpace", "SpaceToDepth"),
        MOVES_DATA,
    ),
    **dict.fromkeys(("Expand", "Tile", "Pad", "Resize"), MOVES_DATA),
    **dict.fromkeys(("MaxPool", "GlobalMaxPool", "Identity"), MOVES_CHANNELS),
    "ArgMax": ONE_INPUT,
}
ON_REQUEST: dict[str, Rule] = {
    **dict.fromkeys(("Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Pow", "Sin", "Cos"), ONE_INPUT),
    **dict.fromkeys(("Softplus", "Softsign", "Mish", "Elu", "Selu", "Celu", "ThresholdedRelu", "Swish"), ONE_INPUT),
    **dict.fromkeys(("LogSoftmax", "Hardmax", "BatchNormalization", "GroupNormalization"), ONE_INPUT),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceProd", "CumSum"), ONE_INPUT),
    **dict.fromkeys(("RMSNormalization", "LpPool", "GridSample"), ONE_INPUT),
    **dict.fromkeys(("Sum", "Mean", "Einsum"), ELEMENTWISE),
    **dict.fromkeys(("GatherElements", "GatherND", "ReverseSequence", "Trilu", "Compress"), MOVES_DATA),
}
RECURRENT: dict[str, Rule] = dict.fromkeys(
    ("LSTM", "GRU", "RNN"), Rule(data=(), output_axis=1, input_axis=2, constants=False, stored=(1, 2))
)
"""Recurrent layers, whose states no Q/DQ reaches: their weights alone are quantized, beside float activations."""
FUSED_LAYERS: dict[str, Rule] = {
    "Attention": Rule(output_axis=1, input_axis=0, constants=False, stored=(1,)),
    "EmbedLayerNormalization": Rule(constants=False, stored=(2, 3, 4)),
}
"""Layers of com.microsoft that hold matrices, or tables of embeddings: these alone are quantized, beside floats."""
HOLDERS = ("If", "Loop", "Scan")
"""Op types that hold bodies."""
QDQ = ("QuantizeLinear", "DequantizeLinear")
NEVER = frozenset(
    {*HOLDERS, "Constant", "ConstantOfShape", "Shape", "Size", "Cast", "CastLike", "NonMaxSuppression"}
    | {"Range", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
    | {*QDQ, "DynamicQuantizeLinear", *RECURRENT}
)
"""Control flow, what makes shapes and constants, and recurrent layers where activations are to have Q/DQ."""

STORES = {**RECURRENT, **FUSED_LAYERS}
"""Op types that are quantized by their constants, where no activation has Q/DQ."""

SIMULATED = {DPU_SOFTMAX: "Softmax", DPU_INSTANCE_NORM: "InstanceNormalization"}
"""Extended operator that computes as the DPU does -> the op type that it stands for."""


def rule_of(op_type: str) -> Rule:
    """The rule of an op type; a plain one where it has no row."""
    op_type = SIMULATED.get(op_type, op_type)
    return RULES.get(op_type) or ON_REQUEST.get(op_type) or STORES.get(op_type) or Rule(constants=False)


# The axes of a node along which channels lie are those of its rule, as its attributes turn them.


def output_axis(node: ir.Node) -> int:
    """Axis of the weight of a node along which its output channels lie; in a ConvTranspose those of one group."""
    rule = rule_of(node.op_type)
    return rule.input_axis if node.attributes.get_int("transB", 0) else rule.output_axis


def input_axis(node: ir.Node) -> int:
    """Axis of the weight of a node that it sums over; in a Conv it holds the input channels of one group."""
    rule = rule_of(node.op_type)
    return rule.output_axis if node.attributes.get_int("transB", 0) else rule.input_axis


def data_axis(node: ir.Node) -> int | None:
    """Axis of the first input of a node that it sums over; None where there is none."""
    axis = rule_of(node.op_type).data_axis
    if axis is None:
        return None
    return 0 if node.attributes.get_int("transA", 0) else node.attributes.get_int("axis", axis)


def result_axis(node: ir.Node) -> int | None:
    """Axis of the output of a node along which its output channels lie; None where there is none."""
    axis = rule_of(node.op_type).result_axis
    return data_axis(node) if axis is None else axis


LAYERS = tuple(name for name, rule in RULES.items() if rule.weight is not None)
BIASED = tuple(name for name in LAYERS if RULES[name].bias is not None)
CONVOLUTIONS = tuple(name for name in LAYERS if RULES[name].window)
PRODUCTS = tuple(name for name in LAYERS if not RULES[name].window)
"""Op types of which each row is one of the input."""
HOMOGENEOUS = tuple(name for name, rule in RULES.items() if rule.homogeneous)

ALIGN_GROUPS: dict[str, tuple[str, ...]] = {
    "Concat": ("Concat",),
    "Pool": ("AveragePool", "GlobalAveragePool"),
    "Pad": ("Pad",),
    "Slice": ("Slice", "Split"),
    "Eltwise": ("Add", "Sub", "Mul", "Div", "Min", "Max"),
}
"""Name of an alignment in Settings -> op types whose inputs and output then share one scale."""

CLAMPS = ("Clip", "Relu")
"""Op types that a QuantizeLinear after them does by itself, where its codes end at their bounds."""
ACTIVATIONS = (*CLAMPS, "LeakyRelu", "PRelu")
FUSE_ACTIVATIONS = (*LAYERS, "Add", "MaxPool", "AveragePool", "GlobalAveragePool")
"""Op types into which runtimes fuse an activation: no scale stands between the two."""

__all__ = [
    "ACTIVATIONS", "ALIGN_GROUPS", "BIASED", "CLAMPS", "CONVOLUTIONS", "FUSED_LAYERS", "FUSE_ACTIVATIONS", "HOLDERS",
    "HOMOGENEOUS", "LAYERS", "NEVER", "ON_REQUEST", "PRODUCTS", "QDQ", "RECURRENT", "RULES", "SIMULATED", "STORES",
    "Rule", "data_axis", "input_axis", "output_axis", "result_axis", "rule_of",
]  # fmt: skip
