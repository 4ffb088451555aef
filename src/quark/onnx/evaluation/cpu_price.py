"""What a layout costs on a CPU, said where the user has named no runtime: layouts of NPUs are slow there.

ONNX Runtime fuses a Conv and its Relu into one integer kernel only where the Relu is gone: where 0 is the smallest
code, quantizing clips by itself. With a fixed zero point in the middle the Relu stays, the Q/DQ pair behind it is not
that of the Conv, and every Conv computes in float between two conversions. 16-bit activations have no integer kernel.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.config.settings import Settings

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")


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
            f"{count} Relu stay behind their layers under symmetric {spec.dtype} activations, so that these do not fuse"
        )
    else:
        return None
    return (
        f"This is a layout for NPUs: on a CPU, ONNX Runtime may run it slower than float, as {why}. For a CPU, use the "
        "target ort_x64 with uint8 activations (on the command line --config U8S8_AAWS --target ort_x64)."
    )


def _stays(node: ir.Node) -> bool:
    """Whether a node is a Relu or Clip directly behind a linear layer, and before a Q/DQ pair."""
    if node.op_type not in ("Relu", "Clip") or node.inputs[0] is None:
        return False
    producer = node.inputs[0].producer()
    coded = any(use.node.op_type == "QuantizeLinear" for use in node.outputs[0].uses())
    return coded and producer is not None and producer.op_type in LINEAR
