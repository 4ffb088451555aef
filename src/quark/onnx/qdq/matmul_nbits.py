"""MatMulNBits (com.microsoft): a MatMul whose constant operand has 2 to 8 bits in blocks along the sum.

    y = x @ ((q - zero_point) * scale)      q (K, N), one scale for each `block_size` values of a column

Stored by column: B uint8 (N, blocks, block_size * bits / 8), first code in the low bits; scales float32 (N, blocks);
zero points packed like codes (N, ceil(blocks * bits / 8)), absent for 2^(bits-1); those of HQQ are floats (N, blocks).
Scales and float zero points have the type of x.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray, pad_axis
from quark.core.granularity import PerGroup
from quark.core.packing import pack_bits
from quark.core.quantize import quantize
from quark.core.spec import ScaleType, TensorSpec
from quark.onnx.graph.model_file import constant
from quark.onnx.qdq.constants import ConstantStore
from quark.onnx_ops.graph_writer import GraphWriter, producer_of

DOMAIN = "com.microsoft"


def write_nbits(
    writer: GraphWriter, store: ConstantStore, node: ir.Node, spec: TensorSpec, accuracy_level: int
) -> ir.Value:
    """Replace a MatMul by a MatMulNBits of the same name.

    Args:
        writer, store: Of the model.
        node: With a weight that fits (`fits_nbits`).
        spec: Of the weight.
        accuracy_level: 0 to 4: the type that the kernel may compute in.

    Returns:
        Its output.
    """
    assert isinstance(spec.granularity, PerGroup)
    operand, source, qparams = (node, 1), node.inputs[1], store.qparams
    rows, columns = constant(source).shape
    bits, size = spec.dtype.bits, spec.granularity.size
    blocks = -(-rows // size)
    kind = ir.DataType.FLOAT16 if spec.scale_type is ScaleType.float16 else ir.DataType.FLOAT
    offset = 1 << (bits - 1) if spec.dtype.signed else 0

    def codes() -> NumpyArray:
        signed = np.asarray(quantize(np.asarray(constant(source), np.float32), qparams[operand], spec))
        by_column = np.ascontiguousarray((signed + offset).astype(np.uint8).T)
        packed = pack_bits(pad_axis(by_column, 1, blocks * size - rows), bits)
        return np.asarray(packed).reshape(columns, blocks, size * bits // 8)

    def scales() -> NumpyArray:
        return np.asarray(qparams[operand].scale, np.float32).astype(kind.numpy()).T

    def float_zero_points() -> NumpyArray:
        return np.asarray(qparams[operand].zero_point, np.float32).astype(kind.numpy()).T

    def zero_points() -> NumpyArray:
        by_column = np.ascontiguousarray((np.asarray(qparams[operand].zero_point) + offset).astype(np.uint8).T)
        return np.asarray(pack_bits(pad_axis(by_column, 1, -blocks % (8 // bits)), bits))

    name, uint8 = store.name(operand, spec), ir.DataType.UINT8
    inputs = [
        node.inputs[0],
        writer.shared(f"{name}_quantized", codes, uint8, (columns, blocks, size * bits // 8)),
        writer.shared(f"{name}_scale", scales, kind, (columns, blocks)),
    ]
    if spec.float_zero_point:
        inputs.append(writer.shared(f"{name}_zero_point", float_zero_points, kind, (columns, blocks)))
    elif not spec.symmetric:
        inputs.append(writer.shared(f"{name}_zero_point", zero_points, uint8, (columns, -(-blocks * bits // 8))))
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": size, "accuracy_level": accuracy_level}
    result = writer.node("MatMulNBits", inputs, f"{node.name}_{bits}_bits", attributes, domain=DOMAIN)
    writer.replace(node, result, keep_name=True)
    producer_of(result).name = node.name
    return result
