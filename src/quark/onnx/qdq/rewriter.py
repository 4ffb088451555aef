"""Writes a placement into the graph: Q/DQ around activations, integer weights behind DQ, int32 biases.

Types that ONNX has no Q/DQ for are written with the extended operators; the block formats as one node.

Names are the documented ones: `{t}_QuantizeLinear`, `{t}_DequantizeLinear`, outputs with `_Output`, `{t}_scale`,
`{t}_zero_point`, weights `{w}_quantized`; the producer of a graph output y gets `{y}_QuantizeLinear_Input`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.calibration.qparams import CAST, Parameters, channel_bias, encode, largest_bias
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import constant, opset
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.dual_pairs import drop_borders
from quark.onnx.placement.placement import FACTOR, Placement
from quark.onnx.qdq.dynamic_quantize import write_dynamic
from quark.onnx.qdq.extended_ops import (
    block_node,
    cast_down,
    cast_up,
    clip_bfloat16,
    is_bfloat16,
    linear_operator,
)
from quark.onnx.qdq.matmul_nbits import write_nbits
from quark.onnx_ops import add_function_node
from quark.onnx_ops.element_types import FIRST_OPSET, code_type

Array = np.ndarray[Any, Any]
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
        self.ir, self.model, self.graph = ir, model, model.graph
        self.settings, self.parameters, self.placement = settings, parameters, placement
        self.quantized = set(placement.nodes)
        # Names of the user's that stay; a constant of ours that would have one gets another.
        self.ends = {value.name for value in (*self.graph.inputs, *self.graph.outputs)}
        self.node_names = {node.name for node in self.graph}
        self.stored: dict[str, tuple[object, ...]] = {}
        self.replaced: dict[ir.Node, ir.Node] = {}

    def run(self) -> None:
        """Write everything, drop what nothing uses any more, and sort."""
        dynamic = set(self.placement.dynamic)
        for (node, index), spec in self.placement.weights.items():
            if node in dynamic:
                write_dynamic(self, node)
            elif self.settings.matmul_nbits is not None:
                write_nbits(self, node, spec, self.settings.matmul_nbits)
            else:
                self._weight(node, index, spec)
        for (node, index), weight in self.placement.biases.items():
            self._bias(node, index, weight)
        for (add, index), matmul in self.placement.added_biases.items():
            self._bias(add, index, 1, matmul)
        for value, spec in self.placement.activations.items():
            self._activation(value, spec)
        drop_borders(self.graph)
        unused = [name for name, value in self.graph.initializers.items() if not list(value.uses())]
        for name in unused:
            if not self.graph.initializers[name].is_graph_output():
                del self.graph.initializers[name]
        self.graph.sort()

    def _activation(self, value: ir.Value, spec: TensorSpec) -> None:
        name = value.name or ""
        # Bodies of If and Loop, which may read the tensor too, stay as they are.
        uses = [use for use in value.uses() if use.node.graph is self.graph and FACTOR not in use.node.meta]
        if self.settings.quantize_fp16:
            # ONNX Runtime would fuse a Concat of decoded tensors into a QLinearConcat, which refuses float16 scales.
            uses = [use for use in uses if use.node.op_type != "Concat"]
        # An input that is an output too goes from one to the other as it is.
        is_output = value.is_graph_output() and not value.is_graph_input()
        if self._is_float(value):
            uses, is_output = [use for use in uses if use.node in self.quantized], False
        params = CAST if spec.is_cast or spec.is_block else self.parameters.activations[self.placement.root(value)]
        down: list[ir.Node] = []
        for suffix, readers in self._readers(uses, is_output):
            new: list[ir.Node] = []
            if not down or self.settings.dedicated_pairs:
                new = down = self._down(value, name, params, spec)
            up = self._up(down[-1].outputs[0] if down else value, name, params, spec)
            for node in [*(down if self.settings.dedicated_pairs else ()), *up]:
                node.name, node.outputs[0].name = f"{node.name}{suffix}", f"{node.outputs[0].name}{suffix}"
            self._insert(value.producer(), [*new, *up])
            result = up[-1].outputs[0]
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

    def _insert(self, producer: ir.Node | None, nodes: list[ir.Node]) -> None:
        if producer is None:
            self.graph.insert_before(self.graph[0], nodes)
        else:
            self.graph.insert_after(producer, nodes)

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
        self.replaced[node] = new[-1]
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

    def _down(self, value: ir.Value, name: str, params: QParams, spec: TensorSpec) -> list[ir.Node]:
        """The nodes from an activation to its codes; none for a block format, which has one node for both ways."""
        if spec.is_block:
            return []
        nodes = []
        if self.settings.clip_bfloat16 and is_bfloat16(spec):
            nodes.append(clip_bfloat16(self, value, name))
            value = nodes[0].outputs[0]
        if self.settings.cast_bfloat16 and is_bfloat16(spec):
            return nodes + cast_down(self, value, name, params, spec)
        inputs = [value, *self._scale_and_zero(name, params, spec)]
        return [*nodes, self._node("QuantizeLinear", inputs, name, spec)]

    def _up(self, codes: ir.Value, name: str, params: QParams, spec: TensorSpec) -> list[ir.Node]:
        """The nodes from codes back to float."""
        if spec.is_block:
            return [block_node(self.model, codes, name, spec)]
        if self.settings.cast_bfloat16 and is_bfloat16(spec):
            return cast_up(self, codes, name, params, spec)
        return [self._node("DequantizeLinear", [codes, *self._scale_and_zero(name, params, spec)], name, spec)]

    def _node(self, op_type: str, inputs: list[ir.Value], name: str, spec: TensorSpec, axis: int | None = None) -> Any:
        """QuantizeLinear or DequantizeLinear: of ONNX, of com.microsoft, or extended."""
        operator = linear_operator(op_type, spec, axis)
        if operator is None:
            return self._plain(op_type, inputs, name, spec, axis)
        return add_function_node(self.model, operator, inputs, f"{name}_{op_type}")

    def _plain(self, op_type: str, inputs: list[ir.Value], name: str, spec: TensorSpec, axis: int | None = None) -> Any:
        domain = self._domain(spec)
        attributes = {} if axis is None else {"axis": axis}
        if isinstance(spec.granularity, PerGroup):
            attributes["block_size"] = spec.granularity.size
        node = self.ir.node(op_type, inputs, attributes, domain=domain, name=f"{name}_{op_type}")
        node.outputs[0].name = f"{name}_{op_type}_Output"
        return node

    def _domain(self, spec: TensorSpec) -> str:
        kind = code_type(spec.dtype)
        if kind not in FIRST_OPSET:
            raise NotSupportedError(
                f"{spec.dtype} Q/DQ is not part of this version; possible: {', '.join(FIRST_OPSET)}."
            )
        blocked = spec.dtype.bits < 8 or isinstance(spec.granularity, PerGroup)
        contrib = not (blocked or self.settings.quantize_fp16) and (
            self.settings.contrib_domain or FIRST_OPSET[kind] > opset(self.model)
        )
        if contrib:
            self.model.opset_imports[CONTRIB] = 1
        return CONTRIB if contrib else ""

    def _scale_and_zero(self, name: str, params: QParams, spec: TensorSpec) -> tuple[ir.Value, ir.Value]:
        scale, zero = self._numbers(params, spec)
        return self.initializer(f"{name}_scale", scale), self.initializer(f"{name}_zero_point", zero)

    def _numbers(self, params: QParams, spec: TensorSpec) -> tuple[Array, Array]:
        """Scale and zero point as they are stored; the decoded tensor has the type of the scale."""
        scale = np.asarray(params.scale, np.float16 if self.settings.quantize_fp16 else np.float32)
        zero = np.zeros(scale.shape) if params.zero_point is None else params.zero_point
        return scale, np.asarray(zero).astype(self._kind(spec).numpy())

    def _kind(self, spec: TensorSpec) -> ir.DataType:
        return self.ir.DataType[code_type(spec.dtype)]

    def initializer(self, name: str, data: Array | ir.TensorProtocol) -> ir.Value:
        while name in self.ends:
            name += "_"
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = self.ir.Tensor(data, name=name) if isinstance(data, np.ndarray) else data
        value = self.ir.Value(name=name, const_value=tensor, type=self.ir.TensorType(tensor.dtype))
        value.shape = self.ir.Shape(tensor.shape.numpy())
        self.graph.initializers[name] = value
        return value

    def _weight(self, node: ir.Node, index: int, spec: TensorSpec) -> None:
        source = node.inputs[index]
        assert source is not None
        name = source.name or ""
        if spec.is_block:
            self._unique([block_node(self.model, source, name, spec)], node, index)
            return
        codes, scale, zero = self.encoded(node, index, spec)
        if self.settings.cast_bfloat16 and is_bfloat16(spec):
            self._unique(cast_up(self, codes, name, self.parameters.weights[node, index], spec), node, index)
            return
        axis = getattr(spec.granularity, "axis", None)
        nodes = []
        if self.settings.float_weights:
            nodes.append(self._node("QuantizeLinear", [source, scale, zero], name, spec, axis))
            codes = nodes[0].outputs[0]
        nodes.append(self._node("DequantizeLinear", [codes, scale, zero], name, spec, axis))
        self._unique(nodes, node, index)

    def encoded(self, node: ir.Node, index: int, spec: TensorSpec, transpose: bool = False) -> tuple[ir.Value, ...]:
        """Codes, scale and zero point of a constant operand, as initializers."""
        source, weights = node.inputs[index], self.parameters.weights
        assert source is not None
        name = self.stored_name(source.name or "", node, source, weights[node, index], spec, transpose)
        kind, shape = self._kind(spec), constant(source).shape

        def codes() -> ir.TensorProtocol:
            found = encode(constant(source), weights[node, index], spec, kind.numpy())
            return self.ir.tensor(np.ascontiguousarray(found.T) if transpose else found, dtype=kind)

        # Computed when they are written: memory holds one weight at a time, and an algorithm may change it till then.
        parts = [self.initializer(f"{name}_quantized", self.lazy(codes, kind, shape[::-1] if transpose else shape))]
        for part, suffix in enumerate(("scale", "zero_point")):
            parts.append(self.initializer(f"{name}_{suffix}", self._stored(node, index, spec, part)))
        return tuple(parts)

    def _stored(self, node: ir.Node, index: int, spec: TensorSpec, part: int) -> Any:
        """The scale (part 0) or zero point (1) of a weight."""

        def number() -> Array:
            return self._numbers(self.parameters.weights[node, index], spec)[part]

        first = self.ir.tensor(number())
        return self.lazy(lambda: self.ir.tensor(number()), first.dtype, first.shape.numpy())

    def stored_name(
        self, name: str, node: ir.Node, source: ir.Value, params: QParams, spec: TensorSpec, transpose: bool = False
    ) -> str:
        """A name for the integers of a constant: shared by all nodes that read it alike, under the same parameters."""
        zero = b"" if params.zero_point is None else np.asarray(params.zero_point).tobytes()
        key = (id(source), spec, np.asarray(params.scale).tobytes(), zero, transpose)
        if self.stored.setdefault(name, key) == key:
            return name
        return f"{name}_{node.name}"

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
        name, data_scale = source.name or "", np.asarray(params.activations[root].scale, np.float64)
        kind = DTYPES["int16" if self.settings.int16_bias else "int32"]

        def values() -> tuple[Array, Array]:
            bias, scale = channel_bias(constant(source), params.weights[owner, weight].scale)
            scale = np.asarray(data_scale * scale, np.float32)
            if self.settings.int16_bias:
                # The scale of the accumulator where the bias fits, else the finest at which it does.
                scale = np.asarray(np.maximum(scale, largest_bias(bias, scale) / kind.max), np.float32)
            return bias, scale

        def codes() -> ir.TensorProtocol:
            bias, scale = values()
            rounded = np.rint(bias.astype(np.float64) / scale)
            return self.ir.tensor(np.asarray(np.clip(rounded, kind.min, kind.max), kind.name))

        bias, scale = values()
        key = f"{node.name}_{name}"
        inputs = [
            self.initializer(f"{key}_quantized", self.lazy(codes, self.ir.DataType[code_type(kind)], bias.shape)),
            self.initializer(
                f"{key}_quantized_scale",
                self.lazy(lambda: self.ir.tensor(values()[1]), self.ir.DataType.FLOAT, scale.shape),
            ),
            self.initializer(f"{key}_quantized_zero_point", np.zeros(scale.shape, kind.name)),
        ]
        spec = replace(self.placement.weights[owner, weight], dtype=kind)
        axis = bias.ndim - 1 if scale.ndim else None
        self._unique([self._plain("DequantizeLinear", inputs, name, spec, axis)], node, index)

    def lazy(self, evaluate: Callable[[], ir.TensorProtocol], kind: ir.DataType, shape: Sequence[int]) -> Any:
        """A tensor that is computed each time it is read, as an algorithm may still change what it comes from."""
        return self.ir.LazyTensor(evaluate, dtype=kind, shape=self.ir.Shape(shape))

    def _unique(self, decoders: list[ir.Node], node: ir.Node, index: int) -> None:
        """Put decoders before the node that reads them; a second reader of one constant gets names of its own."""
        for decoder in decoders:
            if decoder.name in self.node_names:
                decoder.name = f"{decoder.name}_{node.name}"
                decoder.outputs[0].name = f"{decoder.name}_Output"
            self.node_names.add(decoder.name)
        self.graph.insert_before(node, decoders)
        node.replace_input_with(index, decoders[-1].outputs[0])
