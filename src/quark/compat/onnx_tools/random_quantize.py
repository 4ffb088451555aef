"""Quantizes a model with random data, to see its graph, size and speed; the accuracy means nothing."""

from __future__ import annotations

import re

import onnx_ir as ir

from quark.errors import ConfigError
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.presets import get_default_config
from quark.onnx.graph.model_file import refuse_quantized
from quark.onnx.search.settle import quantize

SUBGRAPH = re.compile(r"\s*\[([^\[\]]*)\]\s*,?\s*\[([^\[\]]*)\]\s*")


def random_quantize(model: ir.Model, config: str, exclude_nodes: str, exclude_subgraphs: str = "") -> int:
    """Quantize with a named configuration; return how many nodes read dequantized tensors.

    Args:
        model: The model, changed in place.
        config: Name of a configuration.
        exclude_nodes: Names of nodes or patterns, separated by ";".
        exclude_subgraphs: Parts of the graph, from nodes to nodes, as "[a,b],[c];[d],[e]".

    Raises:
        ConfigError: A text is of another form.
    """
    refuse_quantized(model)
    options = get_default_config(config)
    options.extra_options["UseRandomData"] = True
    options.nodes_to_exclude = [name for name in exclude_nodes.split(";") if name]
    options.subgraphs_to_exclude = parse_subgraphs_list(exclude_subgraphs) if exclude_subgraphs.strip() else []
    quantize(model, lower(options))
    readers = {use.node for node in model.graph if node.op_type == "DequantizeLinear" for use in node.outputs[0].uses()}
    return len(readers)


def parse_subgraphs_list(exclude_subgraphs: str) -> list[tuple[list[str], list[str]]]:
    """The first and the last nodes of each part in "[a,b],[c];[d],[e]". Raises ConfigError for another form."""
    parts = []
    for text in exclude_subgraphs.split(";"):
        match = SUBGRAPH.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text.strip()!r} is no part of a graph; for one: '[first_a, first_b], [last]'.")
        first, last = ([name.strip() for name in names.split(",") if name.strip()] for names in match.groups())
        parts.append((first, last))
    return parts
