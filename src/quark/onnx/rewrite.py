"""Writes a placement into the graph: Q/DQ around activations, integer weights behind DQ, int32 biases.

Names are the documented ones: `{t}_QuantizeLinear`, `{t}_DequantizeLinear`, outputs with `_Output`, `{t}_scale`,
`{t}_zero_point`, weights `{w}_quantized`; the producer of a graph output y gets `{y}_QuantizeLinear_Input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel
from quark.core.quantize import compute_qparams, quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NonFiniteError, NotSupportedError
from quark.onnx.model import constant, opset
from quark.onnx.placement import Placement
from quark.onnx.settings import Settings

if TYPE_CHECKING:
    import onnx_ir as ir

Array = np.ndarray[Any, Any]
FIRST_OPSET = {"int8": 13, "uint8": 13, "int32": 13, "int16": 21, "uint16": 21, "int4": 21, "uint4": 21}
CONTRIB = "com.microsoft"
INT32 = DTYPES["int32"]


class Rewriter:
    """Edits one model.

    Args:
        model: The model, changed in place.
        settings: Domain and cast options.
        params: Representative tensor of each class -> scale and zero point.
        placement: What to write.
    """

    def __init__(
        self, model: ir.Model, settings: Settings, params: Mapping[ir.Value, QParams], placement: Placement
    ) -> None:
        import onnx_ir as ir

        self.ir, self.model, self.graph = ir, model, model.graph
        self.settings, self.params, self.placement = settings, params, placement
        self.weight_scales: dict[tuple[ir.Node, int], Array] = {}

    def run(self) -> None:
        """Write everything, drop what nothing uses any more, and sort."""
        for (node, index), spec in self.placement.weights.items():
            self._weight(node, index, spec)
        for (node, index), weight in self.placement.biases.items():
            self._bias(node, index, weight)
        for (add, index), matmul in self.placement.added_biases.items():
            self._bias(add, index, 1, matmul)
        for value, spec in self.placement.activations.items():
            self._activation(value, spec)
        unused = [name for name, value in self.graph.initializers.items() if not list(value.uses())]
        for name in unused:
            if not self.graph.initializers[name].is_graph_output():
                del self.graph.initializers[name]
        self.graph.sort()

    def _activation(self, value: ir.Value, spec: TensorSpec) -> None:
        name = value.name or ""
        uses, is_output = list(value.uses()), value.is_graph_output()
        if not uses and not is_output:
            return
        if spec.is_cast:
            first, last = self._cast(value, name, spec)
        else:
            scale, zero = self._parameters(name, self.params[self.placement.root(value)], spec)
            first = self._node("QuantizeLinear", [value, scale, zero], name, spec)
            last = self._node("DequantizeLinear", [first.outputs[0], scale, zero], name, spec)
        result = last.outputs[0]
        result.type, result.shape = value.type, value.shape
        producer = value.producer()
        if producer is None:
            self.graph.insert_before(self.graph[0], [first, last])
        else:
            self.graph.insert_after(producer, [first, last])
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        if is_output:
            value.name = f"{name}_QuantizeLinear_Input"
            result.name = name
            for position, output in enumerate(self.graph.outputs):
                if output is value:
                    self.graph.outputs[position] = result

    def _cast(self, value: ir.Value, name: str, spec: TensorSpec) -> tuple[ir.Node, ir.Node]:
        to = self.ir.DataType[spec.dtype.onnx]
        down = self.ir.node("Cast", [value], {"to": int(to)}, name=f"{name}_QuantizeLinear")
        down.outputs[0].name = f"{name}_QuantizeLinear_Output"
        up = self.ir.node("Cast", down.outputs, {"to": int(value.dtype or self.ir.DataType.FLOAT)})
        up.name, up.outputs[0].name = f"{name}_DequantizeLinear", f"{name}_DequantizeLinear_Output"
        return down, up

    def _node(self, op_type: str, inputs: list[ir.Value], name: str, spec: TensorSpec, axis: int | None = None) -> Any:
        domain = self._domain(spec)
        attributes = {} if axis is None else {"axis": axis}
        node = self.ir.node(op_type, inputs, attributes, domain=domain, name=f"{name}_{op_type}")
        node.outputs[0].name = f"{name}_{op_type}_Output"
        return node

    def _domain(self, spec: TensorSpec) -> str:
        first = FIRST_OPSET.get(spec.dtype.name)
        if first is None:
            raise NotSupportedError(
                f"{spec.dtype} Q/DQ is not part of this version; possible: {', '.join(FIRST_OPSET)}."
            )
        contrib = self.settings.contrib_domain or first > opset(self.model)
        if contrib:
            self.model.opset_imports[CONTRIB] = 1
        return CONTRIB if contrib else ""

    def _parameters(self, name: str, params: QParams, spec: TensorSpec) -> tuple[ir.Value, ir.Value]:
        scale = np.asarray(params.scale, np.float32)
        zero = np.zeros(scale.shape) if params.zero_point is None else params.zero_point
        return self._initializer(f"{name}_scale", scale), self._integers(f"{name}_zero_point", zero, spec)

    def _integers(self, name: str, codes: Any, spec: TensorSpec) -> ir.Value:
        if spec.dtype.bits < 8:
            import ml_dtypes

            return self._initializer(name, np.asarray(codes).astype(getattr(ml_dtypes, spec.dtype.name)))
        return self._initializer(name, np.asarray(codes).astype(spec.dtype.name))

    def _initializer(self, name: str, array: Array) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = self.ir.tensor(array, name=name)
        value = self.ir.Value(
            name=name, const_value=tensor, type=self.ir.TensorType(tensor.dtype), shape=self.ir.Shape(array.shape)
        )
        self.graph.initializers[name] = value
        return value

    def _weight(self, node: ir.Node, index: int, spec: TensorSpec) -> None:
        source = node.inputs[index]
        assert source is not None
        name, weight = source.name or "", np.asarray(constant(source), np.float32)
        if not np.isfinite(weight).all():
            raise NonFiniteError(f"The weight {name} of {node.name} holds NaN or Inf.")
        if spec.is_cast:
            self._cast_weight(node, index, name, weight, spec)
            return
        params = compute_qparams(weight, spec)
        self.weight_scales[node, index] = np.asarray(params.scale)
        axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else None
        suffix = "" if axis is None else f"_{axis}"
        codes = self._integers(f"{name}_quantized{suffix}", quantize(weight, params, spec), spec)
        scale, zero = self._parameters(name + suffix, params, spec)
        decoder = self._node("DequantizeLinear", [codes, scale, zero], name, spec, axis)
        self._unique(decoder, node, index)

    def _cast_weight(self, node: ir.Node, index: int, name: str, weight: Array, spec: TensorSpec) -> None:
        import ml_dtypes

        kind = np.float16 if spec.dtype.name == "float16" else ml_dtypes.bfloat16
        stored = self._initializer(f"{name}_quantized", np.asarray(quantize(weight, None, spec)).astype(kind))  # type: ignore[arg-type]
        up = self.ir.node("Cast", [stored], {"to": int(self.ir.DataType.FLOAT)}, name=f"{name}_DequantizeLinear")
        up.outputs[0].name = f"{name}_DequantizeLinear_Output"
        self._unique(up, node, index)

    def _bias(self, node: ir.Node, index: int, weight: int, owner: ir.Node | None = None) -> None:
        """Make input `index` of `node` an int32 bias of `owner` (default: the node itself)."""
        owner = owner or node
        source, data = node.inputs[index], owner.inputs[0]
        assert source is not None and data is not None
        root = self.placement.root(data)
        if (
            data not in self.placement.activations
            or root not in self.params
            or (owner, weight) not in self.weight_scales
        ):
            return
        name, bias = source.name or "", np.asarray(constant(source), np.float32)
        scale = np.asarray(self.params[root].scale, np.float64) * self.weight_scales[owner, weight]
        scale = np.asarray(scale, np.float32)
        codes = np.clip(np.rint(bias.astype(np.float64) / scale), -(2**31), 2**31 - 1).astype(np.int32)
        key = f"{node.name}_{name}"
        inputs = [
            self._initializer(f"{key}_quantized", codes),
            self._initializer(f"{key}_quantized_scale", scale),
            self._initializer(f"{key}_quantized_zero_point", np.zeros(scale.shape, np.int32)),
        ]
        spec = replace(self.placement.weights[owner, weight], dtype=INT32)
        self._unique(self._node("DequantizeLinear", inputs, name, spec, 0 if scale.ndim else None), node, index)

    def _unique(self, decoder: ir.Node, node: ir.Node, index: int) -> None:
        """Put a decoder before the node that reads it; a second reader of one constant gets a name of its own."""
        taken = {other.name for other in self.graph}
        if decoder.name in taken:
            decoder.name = f"{decoder.name}_{node.name}"
            decoder.outputs[0].name = f"{decoder.name}_Output"
        self.graph.insert_before(node, [decoder])
        node.replace_input_with(index, decoder.outputs[0])
