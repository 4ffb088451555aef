"""The quantized layers, which algorithms change once all scales are known, with those of the float model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.quantize import compute_qparams, dequantize, quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.calibration.byproducts import Byproducts
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.qparams import CAST, rescaled, scale_for_bias
from quark.onnx.decide import Decision, write
from quark.onnx.graph.channels import matmul_bias
from quark.onnx.graph.edit import set_initializer
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import ACTIVATIONS, rule_of


@dataclass(eq=False)
class QuantizedLayer:
    """A node whose constant weight is quantized.

    Attributes:
        node: In the quantized model.
        counterpart: In the float model, whose weights stay as they were.
        index: Which input the weight is.
        source: The float weight that the codes are computed from.
        bias: The float bias that codes are computed from, if there is one of the node's own, or of the Add after a
            MatMul.
        spec, params: Of the weight.
        output: Spec and qparams of the tensor that the node or its activation writes, where that has a scale.
        shared: Whether another node reads the same weight or bias, so that neither may be changed for this one.
    """

    node: ir.Node
    counterpart: ir.Node
    index: int
    source: ir.Value
    bias: ir.Value | None
    spec: TensorSpec
    params: QParams
    output: tuple[TensorSpec, QParams] | None
    shared: bool

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.counterpart.name or self.counterpart.op_type

    @property
    def weight(self) -> NumpyArray:
        """The float weight as it is now, float32."""
        return np.asarray(constant(self.source), np.float32)

    @weight.setter
    def weight(self, array: NumpyArray) -> None:
        set_initializer(self.source, np.ascontiguousarray(array, constant(self.source).dtype))

    @property
    def offset(self) -> NumpyArray | None:
        """The float bias as it is now, float32."""
        return None if self.bias is None else np.asarray(constant(self.bias), np.float32)

    @offset.setter
    def offset(self, array: NumpyArray) -> None:
        assert self.bias is not None
        set_initializer(self.bias, np.ascontiguousarray(array, constant(self.bias).dtype))

    @property
    def factor(self) -> float:
        """The factor of the bias: beta of a Gemm."""
        return self.counterpart.attributes.get_float("beta", 1.0) if self.counterpart.op_type == "Gemm" else 1.0

    @property
    def rounded(self) -> NumpyArray:
        """The weight that the quantized model computes with."""
        return decoded(self.weight, self.params, self.spec)

    @property
    def data(self) -> ir.Value:
        """The input of the node in the float model."""
        value = self.counterpart.inputs[0]
        assert value is not None
        return value

    @property
    def activation(self) -> ir.Node | None:
        """The Relu, Clip, LeakyRelu or PRelu that alone reads the output."""
        uses = list(self.counterpart.outputs[0].uses())
        follows = len(uses) == 1 and uses[0].idx == 0 and not self.counterpart.outputs[0].is_graph_output()
        return uses[0].node if follows and uses[0].node.op_type in ACTIVATIONS else None


@dataclass
class QuantizedLayers:
    """A quantized model whose weights algorithms still change.

    Attributes:
        decision: The quantized model, and what was decided.
        reference: The float model.
        data: Calibration data; None where there is none.
        byproducts: Those of the calibration of the float model.
        layers: The layers in the order of the graph.
    """

    decision: Decision
    reference: ir.Model
    data: Samples | None
    byproducts: Byproducts = field(default_factory=Byproducts)
    layers: list[QuantizedLayer] = field(default_factory=list)
    _replaced: dict[ir.Node, ir.Node] = field(default_factory=dict)

    def write(self, counterparts: Mapping[ir.Node, ir.Node]) -> None:
        """Note the layers, whose float weights become codes, and write the decision into the model.

        Args:
            counterparts: Each node of the model -> the same node of the float model.
        """
        self._find_layers(counterparts)
        self._replaced = write(self.decision)

    def input_of(self, layer: QuantizedLayer) -> ir.Value:
        """The input of a layer in the quantized model."""
        value = self._replaced.get(layer.node, layer.node).inputs[0]
        assert value is not None
        return value

    def output_of(self, layer: QuantizedLayer) -> ir.Value:
        """The output of a layer in the quantized model, before its activation."""
        return self._replaced.get(layer.node, layer.node).outputs[0]

    def set_params(self, layer: QuantizedLayer, params: QParams) -> None:
        """Give a weight another scale and zero point; an int32 bias bounds the scale from below."""
        source, offset = self.input_of(layer).producer(), layer.offset
        integers = source is not None and source.op_type == "DequantizeLinear" and np.ndim(params.scale) < 2
        if source is not None and offset is not None and integers:
            least = scale_for_bias(offset, params.scale, constant(source.inputs[1]))
            params = rescaled(params, layer.spec, np.maximum(params.scale, least))
        layer.params = self.decision.qparams.weights[layer.node, layer.index] = params

    def _find_layers(self, counterparts: Mapping[ir.Node, ir.Node]) -> None:
        placement, qparams = self.decision.placement, self.decision.qparams
        for (node, index), spec in placement.weights.items():
            if index != rule_of(node.op_type).weight or node in placement.dynamic:
                continue
            source = node.inputs[index]
            bias = bias_of(node)
            assert source is not None
            shared = any(len(value.uses()) > 1 for value in (source, bias) if value is not None)
            params = qparams.weights[node, index]
            output = self._output(node)
            self.layers.append(
                QuantizedLayer(node, counterparts[node], index, source, bias, spec, params, output, shared)
            )
        order = {node: position for position, node in enumerate(self.reference.graph)}
        self.layers.sort(key=lambda layer: order[layer.counterpart])

    def _output(self, node: ir.Node) -> tuple[TensorSpec, QParams] | None:
        """Spec and qparams of what a node, or the activation fused into it, writes."""
        placement, value = self.decision.placement, node.outputs[0]
        uses = list(value.uses())
        if value not in placement.activations and len(uses) == 1 and uses[0].node.op_type in ACTIVATIONS:
            value = uses[0].node.outputs[0]
        spec, root = placement.activations.get(value), placement.root(value)
        params = self.decision.qparams.activations.get(root, CAST)
        return None if spec is None else (spec, params)


def decoded(array: NumpyArray, params: QParams, spec: TensorSpec) -> NumpyArray:
    """The float values of the codes of an array; blocks find their scales themselves."""
    params = compute_qparams(array, spec) if spec.is_block else params
    return np.asarray(dequantize(quantize(array, params, spec), params, spec))


def bias_of(node: ir.Node) -> ir.Value | None:
    """The constant bias of a layer: its own, or that of the Add after a MatMul."""
    index = rule_of(node.op_type).bias
    value = node.inputs[index] if index is not None and index < len(node.inputs) else None
    if is_constant(value):
        return value
    added = matmul_bias(node)
    value = added[0].inputs[added[1]] if added is not None else None
    return value if value is not None and len(value.uses()) == 1 else None
