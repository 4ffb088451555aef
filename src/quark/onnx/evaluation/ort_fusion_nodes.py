"""A quantized node and what surrounds it, as the reasons of `ort_fusion_rules.py` ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from quark.errors import FormatError
from quark.onnx.graph.check_proto import bodies_of
from quark.onnx.graph.model_file import CONSTANT_KINDS
from quark.onnx.operators import PRODUCTS

ENCODERS, DECODERS = frozenset({"QuantizeLinear"}), frozenset({"DequantizeLinear"})
INTEGER_LAYERS = frozenset({"Conv", *PRODUCTS})
"""Layers with integer kernels in the runtime: it has none of ConvTranspose."""
SMALLEST: dict[int, int] = {TensorProto.UINT8: 0, TensorProto.INT8: -128}
_BIAS_TOLERANCE = 0.01


class QuantizedGraph:
    """A graph with its edges."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self.folder, self.nodes = folder, graph.node
        self.outputs = {value.name for value in graph.output}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in graph.node for name in node.output}
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            if node.op_type == "Constant" and len(node.attribute) == 1:
                self.constants.update((name, tensor) for name in node.output if (tensor := _stored(node.attribute[0])))
            if node.op_type in ENCODERS | DECODERS and (len(node.input) < 2 or not node.output):
                raise FormatError(
                    f"{node.name or node.op_type} needs an input and a scale, and has {list(node.input)}."
                )
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)

    def decoder(self, name: str) -> onnx.NodeProto | None:
        """The DequantizeLinear that makes a tensor."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type in DECODERS else None

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value of a constant."""
        tensor = self.constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor, str(self.folder))

    @cached_property
    def weight_scales(self) -> Counter[float]:
        """How many constants have each scale, of those with a single one."""
        decoders = [n for n in self.producers.values() if n.op_type in DECODERS and n.input[0] in self.constants]
        scales = [self.array(node.input[1]) for node in decoders]
        return Counter(scale.item() for scale in scales if scale is not None and scale.size == 1)

    def kind(self, node: onnx.NodeProto) -> int:
        """Element type (of TensorProto) of the integers of a Q or DQ node; uint8 where it names none."""
        for name in (*node.input[2:3], *node.input[:1]):
            if name in self.constants:
                return int(self.constants[name].data_type)
        named = [int(a.i) for a in node.attribute if a.name == "output_dtype"]
        return named[0] if named and named[0] else int(TensorProto.UINT8)


def quantized_graphs(
    graph: onnx.GraphProto, folder: Path = Path(), around: QuantizedGraph | None = None
) -> Iterator[tuple[QuantizedGraph, dict[str, onnx.TensorProto]]]:
    """Yield a graph and the bodies within it, each with what is around it, and the constants that are its own.

    Args:
        graph: The graph.
        folder: Where external data lie.
        around: The graph that it is a body in.
    """
    quantized = QuantizedGraph(graph, folder)
    own = quantized.constants
    if around is not None:
        quantized.constants = around.constants | own
        quantized.producers = around.producers | quantized.producers
    yield quantized, own
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from quantized_graphs(body, folder, quantized)


def _stored(attribute: onnx.AttributeProto) -> onnx.TensorProto | None:
    """Return the array that a Constant has in one attribute; None where that is no dense array."""
    if attribute.name == "value":
        return attribute.t
    kind = CONSTANT_KINDS.get(attribute.name)
    return numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), kind)) if kind else None


class QuantizedNode:
    """One quantized node, as the rows ask for it."""

    def __init__(self, node: onnx.NodeProto, graph: QuantizedGraph) -> None:
        self.node, self.graph, self.op = node, graph, node.op_type
        self.reads = [(i, name, graph.decoder(name)) for i, name in enumerate(node.input) if name]
        constant = graph.constants
        self.decoders = [d for _, _, d in self.reads if d is not None and d.input[0] not in constant]
        self.stored = {i: d for i, _, d in self.reads if d is not None and d.input[0] in constant}
        self.types = {graph.kind(d) for d in self.decoders}

    @cached_property
    def operands(self) -> list[int]:
        """Indices of the inputs that hold data: not shapes, indices, conditions or a bias."""
        count = {**dict.fromkeys(INTEGER_LAYERS, 2), "Where": 3}.get(self.op, 1)
        every = range(len(self.node.input)) if self.op in ("Add", "Mul", "Concat") else range(count)
        return [i for i in every if i < len(self.node.input) and not (self.op == "Where" and i == 0)]

    @cached_property
    def float_input(self) -> str:
        """The first operand that is no constant and comes without DequantizeLinear."""
        found = (n for i, n, d in self.reads if i in self.operands and d is None and n not in self.graph.constants)
        return next(found, "")

    @cached_property
    def float_constant(self) -> str:
        """The first operand that is a float constant; that of a Conv the runtime quantizes itself."""
        if self.op == "Conv":
            return ""
        found = (n for i, n, d in self.reads if i in self.operands and d is None and n in self.graph.constants)
        return next(found, "")

    @cached_property
    def readers(self) -> list[onnx.NodeProto]:
        return self.graph.consumers.get(self.node.output[0], [])

    @cached_property
    def float_reader(self) -> str:
        """Who reads the output without QuantizeLinear."""
        named = [node.name or node.op_type for node in self.readers if node.op_type not in ENCODERS]
        return named[0] if named else "the caller of the model" if self.node.output[0] in self.graph.outputs else ""

    @cached_property
    def follower(self) -> onnx.NodeProto | None:
        """The node that alone reads the output, where it is no QuantizeLinear."""
        alone = len(self.readers) == 1 and self.node.output[0] not in self.graph.outputs
        return self.readers[0] if alone and self.readers[0].op_type not in ENCODERS else None

    @property
    def activation(self) -> str:
        """Op type of the follower whose output is quantized."""
        follower = self.follower
        quantized = follower is not None and any(n.op_type in ENCODERS for n in self._readers(follower))
        return follower.op_type if follower is not None and quantized else ""

    def _readers(self, node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        return self.graph.consumers.get(node.output[0], [])

    @property
    def bias(self) -> str:
        """The fault of the bias; "" where nothing is wrong."""
        found = self._bias_operand
        if found is None:
            return ""
        owner, index = found
        decoder = owner.stored.get(index)
        if decoder is None:
            # A float bias of a Conv the runtime quantizes itself.
            return "is in float" if self.op != "Conv" and owner.node.input[index] in self.graph.constants else ""
        if self.graph.kind(decoder) != TensorProto.INT32:
            return "is not int32"
        wrong = self._bias_scale_error(decoder)
        return f"has a scale {wrong:.0%} off input scale * weight scale" if wrong > _BIAS_TOLERANCE else ""

    @property
    def _bias_operand(self) -> tuple[QuantizedNode, int] | None:
        """The node that adds a bias, this one or the Add after it, and the position of the bias there."""
        if self.op == "MatMul" and self.follower is not None and self.follower.op_type == "Add":
            return QuantizedNode(self.follower, self.graph), 1 - list(self.follower.input).index(self.node.output[0])
        return (self, 2) if self.op in ("Conv", "Gemm") and len(self.node.input) > 2 else None

    def _bias_scale_error(self, decoder: onnx.NodeProto) -> float:
        """How far the scale of a bias is off that of the input times that of the weight, as a share; 0 if unknown."""
        decoders = [decoder, *self.decoders[:1], self.stored.get(1)]
        scales = [None if each is None else self.graph.array(each.input[1]) for each in decoders]
        if len(scales) < 3 or any(scale is None for scale in scales):
            return 0.0
        own, data, weight = (np.asarray(scale, np.float64) for scale in scales)
        return float(np.max(np.abs(own / (data * weight) - 1))) if own.shape in ((), weight.shape) else 0.0

    @property
    def mixed(self) -> bool:
        """True where operands of an elementwise op have different integer types."""
        return (
            self.op not in INTEGER_LAYERS and len(self.types | {self.graph.kind(d) for d in self.stored.values()}) > 1
        )

    @property
    def branch(self) -> str:
        """The first int8 tensor beside the node that more than one node reads."""
        decoders = [*self.decoders]
        for decoder in decoders:  # one more where a tensor is quantized twice
            encoder = self.graph.producers.get(decoder.input[0])
            source = None if encoder is None else self.graph.producers.get(encoder.input[0])
            decoders += [source] if source is not None and source.op_type in DECODERS else []
        encoders = [self.graph.producers.get(decoder.input[0]) for decoder in decoders]
        encoders += [n for reader in (self.node, self.follower) if reader for n in self._readers(reader)]
        for encoder in encoders:
            if encoder is None or encoder.op_type not in ENCODERS or self.graph.kind(encoder) != TensorProto.INT8:
                continue
            if sum(len(list(self._readers(decoder))) for decoder in self._readers(encoder)) > 1:
                return str(encoder.input[0])
        return ""

    @property
    def clips_by_itself(self) -> bool:
        """True where quantizing after the Relu or Clip clips at zero, so that the Relu has no effect of its own."""
        encoder = (
            next((n for n in self._readers(self.follower) if n.op_type in ENCODERS), None) if self.follower else None
        )
        zero = None if encoder is None or len(encoder.input) < 3 else self.graph.array(encoder.input[2])
        return encoder is not None and zero is not None and float(zero.min()) == SMALLEST.get(self.graph.kind(encoder))

    @property
    def transposed(self) -> bool:
        return any(a.name == "transB" and a.i for a in self.node.attribute)

    @property
    def shared_weight(self) -> bool:
        """True where another node reads the same decoded weight, or the runtime merges equal scales of two weights."""
        decoders = list(self.stored.values())
        scales = [self.graph.array(d.input[1]) for d in decoders]
        merged = any(s is not None and s.size == 1 and self.graph.weight_scales[s.item()] > 1 for s in scales)
        return merged or any(len(self.graph.consumers.get(d.output[0], [])) > 1 for d in decoders)
