"""Quantizes a model with random data, to see its graph, size and speed; the accuracy means nothing."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.flow import quantize
from quark.onnx.graph.model_file import refuse_quantized


def random_quantize(model: ir.Model, config: str, exclude_nodes: str) -> int:
    """Quantize with a named configuration; return how many nodes read dequantized tensors.

    Args:
        model: The model, changed in place.
        config: Name of a configuration.
        exclude_nodes: Names of nodes or patterns, separated by ";".
    """
    refuse_quantized(model)
    options = get_default_config(config)
    options.extra_options["UseRandomData"] = True
    options.nodes_to_exclude = [name for name in exclude_nodes.split(";") if name]
    quantize(model, lower(options))
    readers = {use.node for node in model.graph if node.op_type == "DequantizeLinear" for use in node.outputs[0].uses()}
    return len(readers)
