"""MatMulNBits (com.microsoft): a MatMul whose constant operand has 2 to 8 bits in blocks along the sum.

    y = x @ ((q - zero_point) * scale)      q (K, N), one scale for each `block_size` values of a column

Stored by column: B uint8 (N, blocks, block_size * bits / 8), first code in the low bits; scales float32 (N, blocks);
zero points packed like codes (N, ceil(blocks * bits / 8)), absent for 2^(bits-1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quark.core.array import pad_axis
from quark.core.granularity import PerGroup
from quark.core.packing import pack_bits
from quark.core.quantize import quantize
from quark.core.spec import TensorSpec
from quark.onnx.graph.model_file import constant

if TYPE_CHECKING:
    from quark.onnx.qdq.rewriter import Rewriter

Array = np.ndarray[Any, Any]
DOMAIN = "com.microsoft"


def write_nbits(rewriter: Rewriter, node: ir.Node, spec: TensorSpec, accuracy_level: int) -> None:
    """Replace a MatMul by a MatMulNBits of the same name."""
    ir, source, weights = rewriter.ir, node.inputs[1], rewriter.parameters.weights
    assert source is not None and isinstance(spec.granularity, PerGroup)
    k, n = constant(source).shape
    bits, size = spec.dtype.bits, spec.granularity.size
    blocks = -(-k // size)
    offset = 1 << (bits - 1) if spec.dtype.signed else 0

    def codes() -> Any:
        found = np.asarray(quantize(np.asarray(constant(source), np.float32), weights[node, 1], spec)) + offset
        columns = pad_axis(np.ascontiguousarray(found.astype(np.uint8).T), 1, blocks * size - k)
        return ir.tensor(np.asarray(pack_bits(columns, bits)).reshape(n, blocks, size * bits // 8))

    def scales() -> Any:
        return ir.tensor(np.ascontiguousarray(np.asarray(weights[node, 1].scale, np.float32).T))

    def zeros() -> Any:
        zero = np.ascontiguousarray((np.asarray(weights[node, 1].zero_point) + offset).astype(np.uint8).T)
        return ir.tensor(np.asarray(pack_bits(pad_axis(zero, 1, -blocks % (8 // bits)), bits)))

    name = rewriter.stored_name(source.name or "", node, source, weights[node, 1], spec)
    parts = [("quantized", codes, [n, blocks, size * bits // 8]), ("scale", scales, [n, blocks])]
    parts += [] if spec.symmetric else [("zero_point", zeros, [n, -(-blocks * bits // 8)])]
    inputs = [node.inputs[0]]
    for suffix, evaluate, shape in parts:
        kind = ir.DataType.FLOAT if suffix == "scale" else ir.DataType.UINT8
        inputs.append(rewriter.initializer(f"{name}_{suffix}", rewriter.lazy(evaluate, kind, shape)))
    attributes = {"K": k, "N": n, "bits": bits, "block_size": size, "accuracy_level": accuracy_level}
    new = ir.node("MatMulNBits", inputs, attributes, domain=DOMAIN, name=node.name)
    rewriter.model.opset_imports[DOMAIN] = 1
    rewriter.replace(node, [new])
