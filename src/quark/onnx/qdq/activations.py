"""ActivationWriter: Q/DQ around the tensors that nodes write and read.

The producer of a graph output y gets `{y}_QuantizeLinear_Input`, so that the output keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.calibration.qparams import CAST
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op, replace_output
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.dual_pairs import REQUANTIZED
from quark.onnx.placement.placement import FACTOR, Operand, Placement
from quark.onnx.qdq.qdq_nodes import QdqNodes
from quark.onnx_ops.graph_writer import GraphWriter

MOVED_THROUGH = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Op types that ONNX Runtime copies the Q/DQ pair before them to the tensor after them."""


class ActivationWriter:
    """Writes the Q/DQ of one model's activations.

    Args:
        writer: Of its graph.
        settings: How many pairs, and of which form.
        placement: What is quantized.
        qparams: Of the tensor that stands for each class.
    """

    def __init__(
        self, writer: GraphWriter, settings: Settings, placement: Placement, qparams: Mapping[ir.Value, QParams]
    ) -> None:
        self.writer, self.settings, self.placement, self.qparams = writer, settings, placement, qparams
        self._quantized = set(placement.nodes)
        self._by_name = {value.name: value for value in placement.activations}

    def write(self, value: ir.Value, spec: TensorSpec) -> None:
        """Put Q/DQ between a tensor and its readers; none where it has these codes already."""
        if self._is_repeated(value, spec):
            return
        name = value.name or ""
        uses, is_output = self.reads(value)
        params = CAST if spec.is_cast or spec.is_block else self.qparams[self.placement.root(value)]
        codes: ir.Value | None = None
        for suffix, readers in self._pairs(uses, is_output):
            if codes is None or self.settings.qdq.dedicated_pairs:
                own_suffix = suffix if self.settings.qdq.dedicated_pairs else ""
                codes = QdqNodes(self.writer, self.settings, name, own_suffix).quantize(value, params, spec)
            result = QdqNodes(self.writer, self.settings, name, suffix).dequantize(codes, params, spec)
            self.writer.insert_after(value.producer())
            result.type, result.shape = value.type, value.shape
            for node, index in readers:
                node.replace_input_with(index, result)
            if is_output and not suffix:
                value.name, result.name = f"{name}_QuantizeLinear_Input", name
                replace_output(self.writer.graph, value, result)

    def _is_repeated(self, value: ir.Value, spec: TensorSpec) -> bool:
        """Return True where a tensor is quantized a second time as it was the first time."""
        producer = value.producer()
        source = None if producer is None else self._by_name.get(producer.meta.get(REQUANTIZED, ""))
        if source is None or self.placement.activations.get(source) != spec or not spec.has_zero_point:
            return False
        first, second = (self.qparams[self.placement.root(one)] for one in (source, value))
        return bool(first.scale == second.scale and first.zero_point == second.zero_point)

    def reads(self, value: ir.Value) -> tuple[list[Operand], bool]:
        """Return the uses of the quantized tensor, and whether it is an output of the graph."""
        # Bodies of If and Loop, which may read the tensor too, stay as they are.
        graph = self.writer.graph
        uses = [(node, index) for node, index in value.uses() if node.graph is graph and FACTOR not in node.meta]
        uses = [(node, index) for node, index in uses if not _moves_into_body(node)]
        if self.settings.qdq.quantize_fp16:
            # ONNX Runtime would fuse a Concat of decoded tensors into a QLinearConcat, which refuses float16 scales.
            uses = [(node, index) for node, index in uses if node.op_type != "Concat"]
        if self._stays_float(value):
            return [(node, index) for node, index in uses if node in self._quantized], False
        # An input that is an output too goes from one to the other as it is.
        return uses, value.is_graph_output() and not value.is_graph_input()

    def _stays_float(self, value: ir.Value) -> bool:
        """Return True where other float nodes should go on reading this tensor itself."""
        target, producer = TARGETS[self.settings.qdq.target], value.producer()
        if not target.float_islands:
            return False
        return producer is None or producer not in self._quantized or producer.op_type in target.float_output

    def _pairs(self, uses: list[Operand], is_output: bool) -> list[tuple[str, list[Operand]]]:
        """(suffix, uses) of each pair; the one without a suffix is that of the graph output."""
        nodes = list(dict.fromkeys(node for node, _ in uses))
        dedicated = self.settings.qdq.dedicated_pairs or self.settings.qdq.dedicated_dequantize
        if not dedicated or len(nodes) + is_output <= 1:
            return [("", uses)] if uses or is_output else []
        pairs = [(f"_{number}", [use for use in uses if use[0] is node]) for number, node in enumerate(nodes, 1)]
        return [("", []), *pairs] if is_output else pairs


def _moves_into_body(node: ir.Node) -> bool:
    """Return True where ONNX Runtime 1.31 would move the pair before a node into a body, of which it dies."""
    if not is_op(node, *MOVED_THROUGH):
        return False
    readers = [use.node for use in node.outputs[0].uses()]
    return any(reader.graph is not node.graph or _moves_into_body(reader) for reader in readers)
