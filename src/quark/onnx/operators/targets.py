"""Target profiles: what a runtime fuses into integer kernels, as data.

Q/DQ around an operator that the runtime does not fuse costs time and accuracy, so placement leaves it in float. The
facts about ONNX Runtime's CPU provider were measured on 1.31: integer Conv chains run at a third of the float time,
linear layers are as fast with a float output as with a quantized one and far more accurate, 16-bit activations and
symmetric int8 around a Relu fuse with nothing, and a linear layer with a float bias is computed in float. ConvInteger
takes 1.2 to 8 times the time of a float Conv, and has one zero point for all channels of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quark.core.names.registry import Registry
from quark.onnx.operators import CLAMPS, CONVOLUTIONS, LAYERS, PRODUCTS


@dataclass(frozen=True)
class Target:
    """One runtime.

    Attributes:
        name: Its name in Settings.
        fuses: Op types that are worth quantizing; None for all with a rule.
        follows: Op types quantized only where every live input comes from a quantized node: alone they gain nothing.
        activations: The element types that activations may have; empty for any.
        symmetric: Activations have a fixed zero point, but for those below.
        unsigned_positive: A tensor without negative values has the unsigned type and 0 as its smallest code, so that a
            symmetric type loses no bit on it.
        float_output: Op types whose output stays in float.
        folds_relu: A Relu must go where the quantized range has its effect.
        float_islands: A float node reads what another float node gives in float, though a quantized node reads it too.
        bias_after_matmul: The Add of a constant after a MatMul is its bias, and must be an integer one.
        folds_casts: Cast and Mul of constants are computed when a file is loaded; DequantizeLinear in each run.
        stores: Op types of which dynamic quantization stores the weights as codes and no more: they are computed in
            float, as their kernels for inputs that are quantized as they come are slower.
    """

    name: str
    fuses: frozenset[str] | None = None
    follows: frozenset[str] = frozenset()
    activations: frozenset[str] = frozenset()
    symmetric: bool = False
    unsigned_positive: bool = False
    float_output: frozenset[str] = frozenset()
    folds_relu: bool = False
    float_islands: bool = False
    bias_after_matmul: bool = False
    folds_casts: bool = False
    stores: frozenset[str] = frozenset()


_FOLLOWS = {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Split", "Resize"}
# Facts of ONNX Runtime, not of the operators: those whose Q/DQ it fuses where the node before gives integers.
TARGETS: Registry[Target] = Registry("target")
TARGETS.register("generic", Target("generic"))
TARGETS.register("npu", Target("npu"))
_ORT_X64 = Target(
    "ort_x64",
    fuses=frozenset({"Conv", *PRODUCTS, *CLAMPS} | _FOLLOWS | _MOVES),
    follows=frozenset({*CLAMPS} | _FOLLOWS | _MOVES),
    activations=frozenset({"uint8"}),
    float_output=frozenset(PRODUCTS),
    folds_relu=True,
    float_islands=True,
    bias_after_matmul=True,
    folds_casts=True,
    stores=frozenset(CONVOLUTIONS),
)
TARGETS.register("ort_x64", _ORT_X64)
# ONNX Runtime on ARM64 runs the same graph transformers before the same operators, and MLAS has kernels for both types
# there (onnxruntime/core/mlas/lib/qgemm.h: s8s8 and u8u8 with SDOT and UDOT; convsym.cpp: s8s8 and u8s8 with symmetric
# weights). QDQIsInt8Allowed (core/optimizer/qdq_transformer) leaves int8 as it is there, and makes it uint8 on x64.
# From the source, not measured: no machine of the kind was at hand.
TARGETS.register("ort_arm64", replace(_ORT_X64, name="ort_arm64", activations=frozenset({"int8", "uint8"})))
_LINEAR = frozenset(LAYERS)
# OpenVINO's low-precision transformations move what stands before a layer after the one before it by themselves, so
# only what linear layers read is quantized. Measured on 2026.4 with a YOLOv8n: a Q/DQ pair directly after a
# convolution takes 20 dB (33.1 to 13.6), and zero points within the range take half as much time again. Its CPU
# plugin refuses int8 with a zero point of -128, so what is never negative is uint8.
TARGETS.register(
    "openvino",
    Target(
        "openvino",
        fuses=_LINEAR,
        activations=frozenset({"int8"}),
        symmetric=True,
        unsigned_positive=True,
        float_output=_LINEAR,
    ),
)
