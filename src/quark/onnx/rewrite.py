"""Writes a placement into the graph: Q/DQ around activations, integer weights behind DQ, int32 biases.

Names are the documented ones: `{t}_QuantizeLinear`, `{t}_DequantizeLinear`, outputs with `_Output`, `{t}_scale`,
`{t}_zero_point`, weights `{w}_quantized`; the producer of a graph output y gets `{y}_QuantizeLinear_Input`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.quantize import quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NonFiniteError, NotSupportedError
from quark.onnx.dynamic import write_dynamic
from quark.onnx.matmul_nbits import fits_nbits, write_nbits
from quark.onnx.model import constant, opset
from quark.onnx.parameters import Parameters, encode
from quark.onnx.placement import Placement
from quark.onnx.settings import Settings
from quark.onnx.targets import TARGETS

if TYPE_CHECKING:
    import onnx_ir as ir

Array = np.ndarray[Any, Any]
FIRST_OPSET = {"int8": 13, "uint8": 13, "int32": 13, "int16": 21, "uint16": 21, "int4": 21, "uint4": 21}
CONTRIB = "com.microsoft"


class Rewriter:
    """Edits one model.

    Args:
        model: The model, changed in place.
        settings: Domain and cast options.
        parameters: Scales and zero points.
        placement: What to write.
    """

    def __init__(self, model: ir.Model, settings: Settings, parameters: Parameters, placement: Placement) -> None:
        import onnx_ir as ir

        self.ir, self.model, self.graph = ir, model, model.graph
        self.settings, self.parameters, self.placement = settings, parameters, placement
        self.quantized = set(placement.nodes)
        self.node_names = {node.name for node in self.graph}
        self.stored: dict[str, tuple[object, ...]] = {}

    def run(self) -> None:
        """Write everything, drop what nothing uses any more, and sort."""
        dynamic = set(self.placement.dynamic)
        for (node, index), spec in self.placement.weights.items():
            if node in dynamic:
                write_dynamic(self, node)
            elif self.settings.matmul_nbits is not None and fits_nbits(node, spec):
                write_nbits(self, node, spec, self.settings.matmul_nbits)
            else:
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
        name, producer = value.name or "", value.producer()
        # Bodies of If and Loop, which may read the tensor too, stay as they are.
        uses, is_output = [use for use in value.uses() if use.node.graph is self.graph], value.is_graph_output()
        if self._is_float(value):
            uses, is_output = [use for use in uses if use.node in self.quantized], False
        encoder: ir.Node | None = None
        for suffix, readers in self._readers(uses, is_output):
            new = []
            if encoder is None or self.settings.dedicated_pairs:
                encoder = self._encoder(value, name, spec, suffix if self.settings.dedicated_pairs else "")
                new.append(encoder)
            decoder = self._decoder(encoder, value, name, spec, suffix)
            new.append(decoder)
            if producer is None:
                self.graph.insert_before(self.graph[0], new)
            else:
                self.graph.insert_after(producer, new)
            result = decoder.outputs[0]
            result.type, result.shape = value.type, value.shape
            for use in readers:
                use.node.replace_input_with(use.idx, result)
            if is_output and not suffix:
                value.name, result.name = f"{name}_QuantizeLinear_Input", name
                self._set_output(value, result)

    def _readers(self, uses: list[Any], is_output: bool) -> list[tuple[str, list[Any]]]:
        """(suffix, uses) of each pair; the one without a suffix is that of the graph output."""
        nodes = list(dict.fromkeys(use.node for use in uses))
        dedicated = self.settings.dedicated_pairs or self.settings.dedicated_dequantize
        if not dedicated or len(nodes) + is_output <= 1:
            return [("", uses)] if uses or is_output else []
        own = [(f"_{number}", [use for use in uses if use.node is node]) for number, node in enumerate(nodes, 1)]
        return [("", []), *own] if is_output else own

    def _is_float(self, value: ir.Value) -> bool:
        """Whether other float nodes should go on reading this tensor itself."""
        target, producer = TARGETS[self.settings.target], value.producer()
        if not target.float_islands:
            return False
        return producer is None or producer not in self.quantized or producer.op_type in target.float_output

    def _set_output(self, old: ir.Value, new: ir.Value) -> None:
        for position, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[position] = new

    def replace(self, node: ir.Node, new: list[ir.Node]) -> None:
        """Put nodes in the place of one; the last gives its output, under the same name."""
        old, result = node.outputs[0], new[-1].outputs[0]
        result.type, result.shape = old.type, old.shape
        name, is_output = old.name, old.is_graph_output()
        self.graph.insert_before(node, new)
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, result)
        if is_output:
            self._set_output(old, result)
        self.graph.remove(node, safe=True)
        old.name, result.name = None, name

    def _encoder(self, value: ir.Value, name: str, spec: TensorSpec, suffix: str) -> ir.Node:
        if spec.is_cast:
            return self._cast(value, self.ir.DataType[spec.dtype.onnx], f"{name}_QuantizeLinear", suffix)
        scale, zero = self._scale_and_zero(name, self.parameters.activations[self.placement.root(value)], spec)
        return self._node("QuantizeLinear", [value, scale, zero], name, spec, suffix=suffix)

    def _decoder(self, encoder: ir.Node, value: ir.Value, name: str, spec: TensorSpec, suffix: str) -> ir.Node:
        codes = encoder.outputs[0]
        if spec.is_cast:
            kind = value.dtype or self.ir.DataType.FLOAT
            return self._cast(codes, kind, f"{name}_DequantizeLinear", suffix)
        inputs = [codes, encoder.inputs[1], encoder.inputs[2]]
        return self._node("DequantizeLinear", inputs, name, spec, suffix=suffix)

    def _cast(self, value: ir.Value, kind: ir.DataType, name: str, suffix: str = "") -> ir.Node:
        node = self.ir.node("Cast", [value], {"to": int(kind)}, name=name + suffix)
        node.outputs[0].name = f"{name}_Output{suffix}"
        return node

    def _node(self, op_type: str, inputs: Sequence[ir.Value | None], name: str, spec: TensorSpec,
              axis: int | None = None, suffix: str = "") -> ir.Node:  # fmt: skip
        domain = self._domain(spec)
        attributes = {} if axis is None else {"axis": axis}
        if isinstance(spec.granularity, PerGroup):
            attributes["block_size"] = spec.granularity.size
        node = self.ir.node(op_type, inputs, attributes, domain=domain, name=f"{name}_{op_type}{suffix}")
        node.outputs[0].name = f"{name}_{op_type}_Output{suffix}"
        return node

    def _domain(self, spec: TensorSpec) -> str:
        first = FIRST_OPSET.get(spec.dtype.name)
        if first is None:
            raise NotSupportedError(
                f"{spec.dtype} Q/DQ is not part of this version; possible: {', '.join(FIRST_OPSET)}."
            )
        blocked = spec.dtype.bits < 8 or isinstance(spec.granularity, PerGroup)
        contrib = not blocked and (self.settings.contrib_domain or first > opset(self.model))
        if contrib:
            self.model.opset_imports[CONTRIB] = 1
        return CONTRIB if contrib else ""

    def _scale_and_zero(self, name: str, params: QParams, spec: TensorSpec) -> tuple[ir.Value, ir.Value]:
        scale = np.asarray(params.scale, np.float32)
        zero = np.zeros(scale.shape) if params.zero_point is None else params.zero_point
        codes = np.asarray(zero).astype(self._kind(spec).numpy())
        return self.initializer(f"{name}_scale", scale), self.initializer(f"{name}_zero_point", codes)

    def _kind(self, spec: TensorSpec) -> ir.DataType:
        return self.ir.DataType[spec.dtype.onnx]

    def initializer(self, name: str, data: Array | ir.TensorProtocol) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = self.ir.tensor(data, name=name) if isinstance(data, np.ndarray) else data
        value = self.ir.Value(name=name, const_value=tensor, type=self.ir.TensorType(tensor.dtype))
        value.shape = self.ir.Shape(tensor.shape.numpy())
        self.graph.initializers[name] = value
        return value

    def _weight(self, node: ir.Node, index: int, spec: TensorSpec) -> None:
        source = node.inputs[index]
        assert source is not None
        if spec.is_cast:
            self._cast_weight(node, index, source.name or "", np.asarray(constant(source), np.float32), spec)
            return
        codes, scale, zero = self.encoded(node, index, spec)
        axis = getattr(spec.granularity, "axis", None)
        if self.settings.float_weights:
            encoder = self._node("QuantizeLinear", [source, scale, zero], source.name or "", spec, axis)
            codes = self._before(encoder, node)
        decoder = self._node("DequantizeLinear", [codes, scale, zero], source.name or "", spec, axis)
        node.replace_input_with(index, self._before(decoder, node))

    def encoded(self, node: ir.Node, index: int, spec: TensorSpec, transpose: bool = False) -> tuple[ir.Value, ...]:
        """Codes, scale and zero point of a constant operand, as initializers."""
        source, params = node.inputs[index], self.parameters.weights[node, index]
        assert source is not None
        name = self.stored_name(source.name or "", node, source, params, spec)
        codes = self.initializer(f"{name}_quantized", self._codes(source, params, spec, transpose))
        return codes, *self._scale_and_zero(name, params, spec)

    def _codes(self, source: ir.Value, params: QParams, spec: TensorSpec, transpose: bool) -> ir.TensorProtocol:
        """The integers of a weight, computed when they are written: memory holds one weight at a time."""
        kind, shape = self._kind(spec), constant(source).shape

        def evaluate() -> ir.TensorProtocol:
            codes = encode(constant(source), params, spec, kind.numpy())
            return self.ir.tensor(np.ascontiguousarray(codes.T) if transpose else codes, dtype=kind)

        return self.ir.LazyTensor(evaluate, dtype=kind, shape=self.ir.Shape(shape[::-1] if transpose else shape))

    def stored_name(self, name: str, node: ir.Node, source: ir.Value, params: QParams, spec: TensorSpec) -> str:
        """A name for the integers of a constant: shared by all nodes that read it under the same parameters."""
        zero = b"" if params.zero_point is None else np.asarray(params.zero_point).tobytes()
        key = (id(source), spec, np.asarray(params.scale).tobytes(), zero)
        if self.stored.setdefault(name, key) == key:
            return name
        return f"{name}_{node.name}"

    def _cast_weight(self, node: ir.Node, index: int, name: str, weight: Array, spec: TensorSpec) -> None:
        import ml_dtypes

        kind = np.float16 if spec.dtype.name == "float16" else ml_dtypes.bfloat16
        if not np.isfinite(weight).all():
            raise NonFiniteError(f"The weight {name} of {node.name} holds NaN or Inf.")
        stored = self.initializer(f"{name}_quantized", np.asarray(quantize(weight, None, spec)).astype(kind))  # type: ignore[arg-type]
        up = self._cast(stored, self.ir.DataType.FLOAT, f"{name}_DequantizeLinear")
        node.replace_input_with(index, self._before(up, node))

    def _bias(self, node: ir.Node, index: int, weight: int, owner: ir.Node | None = None) -> None:
        """Make input `index` of `node` an int32 or int16 bias of `owner` (default: the node itself)."""
        owner = owner or node
        source, data = node.inputs[index], owner.inputs[0]
        assert source is not None and data is not None
        root = self.placement.root(data)
        params = self.parameters
        if data not in self.placement.activations or root not in params.activations:
            return
        if (owner, weight) not in params.weights:
            return
        name, bias = source.name or "", np.asarray(constant(source), np.float32)
        scale = np.asarray(params.activations[root].scale, np.float64) * params.weights[owner, weight].scale
        scale = np.asarray(scale, np.float32)
        kind = DTYPES["int16" if self.settings.int16_bias else "int32"]
        if self.settings.int16_bias:
            # The scale of the accumulator where the bias fits, else the finest at which it does.
            largest = np.abs(bias) if scale.ndim else np.abs(bias).max()
            scale = np.asarray(np.maximum(scale, largest / kind.max), np.float32)
        codes = np.clip(np.rint(bias.astype(np.float64) / scale), kind.min, kind.max).astype(kind.name)
        key = f"{node.name}_{name}"
        inputs = [
            self.initializer(f"{key}_quantized", codes),
            self.initializer(f"{key}_quantized_scale", scale),
            self.initializer(f"{key}_quantized_zero_point", np.zeros(scale.shape, kind.name)),
        ]
        spec = replace(self.placement.weights[owner, weight], dtype=kind)
        decoder = self._node("DequantizeLinear", inputs, name, spec, 0 if scale.ndim else None)
        node.replace_input_with(index, self._before(decoder, node))

    def _before(self, new: ir.Node, node: ir.Node) -> ir.Value:
        """Put a node before the one that reads it; for a second reader of one constant, under a name of its own."""
        if new.name in self.node_names:
            new.name = f"{new.name}_{node.name}"
            new.outputs[0].name = f"{new.name}_Output"
        self.node_names.add(new.name)
        self.graph.insert_before(node, [new])
        return new.outputs[0]
