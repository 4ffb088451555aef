"""Target profiles: what a runtime fuses into integer kernels, as data.

Q/DQ around an operator that the runtime does not fuse costs time and accuracy, so placement leaves it in float. The
facts about ONNX Runtime's CPU provider were measured on 1.31: integer Conv chains run at a third of the float time,
linear layers are as fast with a float output as with a quantized one and far more accurate, 16-bit activations and
symmetric int8 around a Relu fuse with nothing, and a linear layer with a float bias is computed in float.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.core.registry import Registry


@dataclass(frozen=True)
class Target:
    """One runtime.

    Attributes:
        name: Its name in Settings.
        fuses: Op types that are worth quantizing; None for all with a rule.
        follows: Op types quantized only where every live input comes from a quantized node: alone they gain nothing.
        activation: The element type that activations must have; "" for any.
        float_output: Op types whose output stays in float.
        folds_relu: A Relu must go where the quantized range has its effect.
        float_islands: A float node reads what another float node gives in float, though a quantized node reads it too.
        bias_after_matmul: The Add of a constant after a MatMul is its bias, and must be an integer one.
    """

    name: str
    fuses: frozenset[str] | None = None
    follows: frozenset[str] = frozenset()
    activation: str = ""
    float_output: frozenset[str] = frozenset()
    folds_relu: bool = False
    float_islands: bool = False
    bias_after_matmul: bool = False


_FOLLOWS = {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Split", "Resize"}
TARGETS: Registry[Target] = Registry("target")
TARGETS.register("generic", Target("generic"))
TARGETS.register("npu", Target("npu"))
TARGETS.register(
    "ort_x64",
    Target(
        "ort_x64",
        fuses=frozenset({"Conv", "Gemm", "MatMul", "Relu", "Clip"} | _FOLLOWS | _MOVES),
        follows=frozenset({"Relu", "Clip"} | _FOLLOWS | _MOVES),
        activation="uint8",
        float_output=frozenset({"Gemm", "MatMul"}),
        folds_relu=True,
        float_islands=True,
        bias_after_matmul=True,
    ),
)
