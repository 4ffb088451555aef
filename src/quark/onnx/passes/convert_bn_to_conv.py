"""Replaces a BatchNormalization that stands alone by a depthwise 1x1 Conv, which integer kernels have.

y = x * f + s        weight (C, 1, 1, 1) = f        bias = s        f and s as in `fold_batch_norm`
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import dims, is_op, replace
from quark.onnx.graph.model_file import constant
from quark.onnx.passes.fold_batch_norm import affine_of
from quark.onnx_ops.graph_writer import add_constant


def convert_bn_to_conv(model: ir.Model) -> int:
    """Replace every BatchNormalization of images, series or volumes; return how many there were."""
    count = 0
    for norm in [node for node in model.graph if is_op(node, "BatchNormalization")]:
        affine, shape = affine_of(norm), dims(norm.inputs[0])
        if affine is None or shape is None or len(shape) < 3:
            continue
        kind, spatial = constant(norm.inputs[1]).dtype, [1] * (len(shape) - 2)
        factor, shift = (array.astype(kind) for array in affine)
        weight = add_constant(model.graph, f"{norm.name}_weight", factor.reshape(-1, 1, *spatial))
        bias = add_constant(model.graph, f"{norm.name}_bias", shift)
        replace(norm, "Conv", [norm.inputs[0], weight, bias], {"group": len(factor), "kernel_shape": spatial})
        count += 1
    return count
