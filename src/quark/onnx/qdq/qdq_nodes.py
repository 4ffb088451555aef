"""QdqNodes: the nodes that quantize a tensor and decode it, of ONNX, com.microsoft or the extended domain.

    most types        QuantizeLinear, DequantizeLinear
    constants         Cast, Sub and Mul where a runtime computes these when it loads a file
    block formats     one node of an extended operator, which does both
    bfloat16          extended Q/DQ, or Clip, Mul and Cast, as the settings say

Names are the documented ones: `{t}_QuantizeLinear`, `{t}_DequantizeLinear`, outputs with `_Output`, `{t}_scale`,
`{t}_zero_point`; of constants with the same bits, a file that is written keeps the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.config.settings import Settings
from quark.onnx_ops.element_types import FIRST_OPSET, code_type
from quark.onnx_ops.graph_writer import GraphWriter
from quark.onnx_ops.operators import Operator, block, linear

EXTENDED = {"bfloat16": "bfloat16", "bfloat16_scaled": "bfloat16", "float16": "float16"}
EXTENDED |= {"int32": "int32", "uint32": "uint32"}
"""Element types that ONNX has no Q/DQ for -> the type of the codes."""
CONTRIB = "com.microsoft"


def onnx_type(spec: TensorSpec) -> ir.DataType:
    """The ONNX type that holds the codes of a tensor."""
    return ir.DataType[code_type(spec.dtype)]


def stored_qparams(params: QParams, spec: TensorSpec, settings: Settings) -> tuple[NumpyArray, NumpyArray]:
    """Scale and zero point as they are stored; the decoded tensor has the type of the scale."""
    scale = np.asarray(params.scale, np.float16 if settings.qdq.quantize_fp16 else np.float32)
    zero = np.zeros(scale.shape) if params.zero_point is None else params.zero_point
    return scale, np.asarray(zero).astype(onnx_type(spec).numpy())


@dataclass(frozen=True)
class QdqNodes:
    """Adds the nodes of one tensor.

    Attributes:
        writer: Of the graph; who calls says where the nodes stand.
        settings: Domain and cast options.
        tensor: Its name.
        suffix: After the names of nodes and outputs that one of several readers has for itself.
        reader: The node that reads a constant: its name is after those that the nodes of another reader have.
    """

    writer: GraphWriter
    settings: Settings
    tensor: str
    suffix: str = ""
    reader: ir.Node | None = None

    def quantize(self, x: ir.Value, params: QParams, spec: TensorSpec) -> ir.Value:
        """The codes of an activation; the activation itself in a block format, which `dequantize` does both ways."""
        if spec.is_block:
            return x
        if self.settings.qdq.clip_bfloat16 and _is_bfloat16(spec):
            limits = {"bfloat16_min": DTYPES["bfloat16"].min, "bfloat16_max": DTYPES["bfloat16"].max}
            bounds = [self.writer.shared(name, np.asarray(limit, np.float32)) for name, limit in limits.items()]
            x = self._node("Clip", [x, *bounds], "Clip")
        if self.is_cast_pair(spec):
            if not spec.is_cast:
                inverse = np.asarray(1 / params.scale, np.float32)
                x = self._node("Mul", [x, self.writer.shared(f"{self.tensor}_inverse_scale", inverse)], "Mul")
            return self._node("Cast", [x], "QuantizeLinear", {"to": int(ir.DataType.BFLOAT16)})
        return self.linear("QuantizeLinear", [x, *self._qparams(params, spec)], spec)

    def dequantize(self, codes: ir.Value, params: QParams, spec: TensorSpec) -> ir.Value:
        """The activation that its codes stand for."""
        if spec.is_block:
            return self.fake_quantize(codes, spec)
        if self.is_cast_pair(spec):
            return self.cast_back(codes, params, spec)
        return self.linear("DequantizeLinear", [codes, *self._qparams(params, spec)], spec)

    def fake_quantize(self, x: ir.Value, spec: TensorSpec) -> ir.Value:
        """A tensor of a block format: one node from float to float."""
        operator = block(spec, self.writer.opset, None if x.shape is None else x.shape.dims)
        return self._call(operator, [x], "DequantizeLinear")

    def is_cast_pair(self, spec: TensorSpec) -> bool:
        """Return True where codes are made and decoded by Cast."""
        return self.settings.qdq.cast_bfloat16 and _is_bfloat16(spec)

    def cast_back(self, codes: ir.Value, params: QParams, spec: TensorSpec) -> ir.Value:
        """Cast to float32, before a product with the scale if there is one."""
        x = self._node("Cast", [codes], "DequantizeLinear", {"to": int(ir.DataType.FLOAT)})
        if spec.is_cast:
            return x
        scale = self.writer.shared(f"{self.tensor}_scale", np.asarray(params.scale, np.float32))
        return self._node("Mul", [x, scale], "DequantizeLinear_Mul")

    def decode_once(self, codes: ir.Value, params: QParams, axis: int | None) -> ir.Value:
        """(codes - zero point) * scale of a constant, in operators that a runtime folds: the value of DequantizeLinear.

        Args:
            codes: Of 8 bits, whose difference to the zero point float32 holds exactly.
            params: Scale and zero point, (channels,) or ().
            axis: Of the channels; None for one scale.
        """
        assert codes.shape is not None
        shape = [1] * len(codes.shape)
        if axis is not None:
            shape[axis] = -1

        def broadcast(array: NumpyArray) -> NumpyArray:
            return np.asarray(array, np.float32).reshape(shape if axis is not None else ())

        x = self._node("Cast", [codes], "DequantizeLinear_Cast", {"to": int(ir.DataType.FLOAT)})
        if params.zero_point is not None and np.any(params.zero_point):
            zero = self.writer.shared(f"{self.tensor}_zero_point", broadcast(params.zero_point))
            x = self._node("Sub", [x, zero], "DequantizeLinear_Sub")
        scale = self.writer.shared(f"{self.tensor}_scale", broadcast(params.scale))
        return self._node("Mul", [x, scale], "DequantizeLinear")

    def linear(self, op_type: str, inputs: Sequence[ir.Value], spec: TensorSpec, axis: int | None = None) -> ir.Value:
        """QuantizeLinear or DequantizeLinear of (x, scale, zero point): of ONNX or com.microsoft, or extended.

        Raises:
            NotSupportedError: There is none for the type of the spec.
        """
        extended = EXTENDED.get(spec.dtype.name)
        if extended is None:
            return self.standard(op_type, inputs, spec, axis)
        body = "cast" if spec.is_cast else "tensor" if axis is None else "axis"
        quantizes, dequantizes = linear(extended, body, axis)
        return self._call(quantizes if op_type == "QuantizeLinear" else dequantizes, inputs, op_type)

    def standard(self, op_type: str, inputs: Sequence[ir.Value], spec: TensorSpec, axis: int | None = None) -> ir.Value:
        """A node of a Q/DQ operator of ONNX or com.microsoft; returns its output."""
        attributes = {} if axis is None else {"axis": axis}
        if isinstance(spec.granularity, PerGroup):
            attributes["block_size"] = spec.granularity.size
        return self._node(op_type, inputs, op_type, attributes, self._domain(spec))

    def _domain(self, spec: TensorSpec) -> str:
        kind = code_type(spec.dtype)
        if kind not in FIRST_OPSET:
            raise NotSupportedError(
                f"{spec.dtype} Q/DQ is not part of this version; possible: {', '.join(FIRST_OPSET)}."
            )
        onnx_only = spec.dtype.bits < 8 or isinstance(spec.granularity, PerGroup) or self.settings.qdq.quantize_fp16
        wanted = self.settings.qdq.contrib_domain or FIRST_OPSET[kind] > self.writer.opset
        return CONTRIB if wanted and not onnx_only else ""

    def _qparams(self, params: QParams, spec: TensorSpec) -> tuple[ir.Value, ir.Value]:
        scale, zero = stored_qparams(params, spec, self.settings)
        return self.writer.shared(f"{self.tensor}_scale", scale), self.writer.shared(f"{self.tensor}_zero_point", zero)

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        role: str,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        name, output = self._names(role)
        return self.writer.node(op_type, inputs, name, attributes, domain=domain, output=output)

    def _call(self, operator: Operator, inputs: Sequence[ir.Value], role: str) -> ir.Value:
        name, output = self._names(role)
        return self.writer.call(operator, inputs, name, output)

    def _names(self, role: str) -> tuple[str, str]:
        """Names of a node and of its output."""
        name = f"{self.tensor}_{role}"
        if self.reader is not None and self.writer.has_node(name):
            name = f"{name}_{self.reader.name}"
        return name + self.suffix, f"{name}_Output{self.suffix}"


def _is_bfloat16(spec: TensorSpec) -> bool:
    """Return True where the codes are bfloat16, scaled or not."""
    return EXTENDED.get(spec.dtype.name) == "bfloat16"
