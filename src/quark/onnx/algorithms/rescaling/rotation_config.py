"""The file that says what QuaRot rotates, instead of what the graph says.

    {"R1_pairs": [{"prev_nodes": [writers], "next_nodes": [readers], "norm_node": the norm between them}, ...]}

Writers and readers are linear layers (Gemm or MatMul with a constant weight), writers also the Gather of an embedding.
The norm is any of the nodes that it is made of, and may be left out. All pairs belong to one residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.base.json_objects import plain_json
from quark.errors import ConfigError, did_you_mean
from quark.onnx.graph.channels import ChannelConstant, bias_of, is_linear, weight_by_input, weight_by_output
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import is_constant
from quark.onnx.graph.norms import find_norms
from quark.onnx.graph.residual_stream import ResidualStream

KEYS = ("prev_nodes", "next_nodes", "norm_node")


def read_streams(path: str, graph: ir.Graph) -> list[ResidualStream]:
    """The stream that a file describes.

    Raises:
        ConfigError: The file cannot be read, names what the graph does not have, or constants of different widths.
    """
    pairs = _read(path)
    linear = {node.name or "": node for node in graph if is_linear(node)}
    writers = {**linear, **_tables(graph)}
    norms = {node.name or "": norm for norm in find_norms(graph) for node in norm.nodes}
    stream = ResidualStream(0)
    for pair in pairs:
        for name in pair["prev_nodes"]:
            stream.turned |= dict.fromkeys(_written(_named(name, writers, "prev_nodes", path)))
        readers = [_named(name, linear, "next_nodes", path) for name in pair["next_nodes"]]
        weights = tuple(weight_by_input(node) for node in readers)
        if pair.get("norm_node") is None:
            stream.turned |= dict.fromkeys(weights)
        else:
            norm = _named(pair["norm_node"], norms, "norm_node", path)
            stream.norms[norm] = (*stream.norms.get(norm, ()), *weights)
    widths = {constant.size for constant in stream.constants} - {1}
    if len(widths) != 1:
        raise ConfigError(f"{path}: the constants of R1_pairs are {sorted(widths)} wide; possible: one width.")
    (stream.width,) = widths
    return [stream]


def _read(path: str) -> list[Mapping[str, Any]]:
    """The pairs, each with lists of names."""
    try:
        data = plain_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"r_config_path: {path} cannot be read as JSON: {error}.") from None
    pairs = data.get("R1_pairs") if isinstance(data, dict) else None
    if not isinstance(pairs, list) or not pairs or len(data) != 1:
        raise ConfigError(f'{path}: expected {{"R1_pairs": [pairs]}} and nothing else.')
    for pair in pairs:
        known = isinstance(pair, dict) and set(pair) <= set(KEYS)
        lists = known and all(_is_names(pair.get(key)) for key in KEYS[:2])
        if not lists or not isinstance(pair.get("norm_node"), (str, type(None))):
            raise ConfigError(f"{path}: expected lists prev_nodes and next_nodes, and a norm_node; got {pair}.")
    return pairs


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _named(name: str, known: Mapping[str, Any], key: str, path: str) -> Any:
    if name not in known:
        raise ConfigError(f"{path}: {key} has {name!r}, which is none. {did_you_mean(name, known)}")
    return known[name]


def _tables(graph: ir.Graph) -> dict[str, ir.Node]:
    """The nodes that look up rows of a constant."""
    return {node.name or "": node for node in graph if is_op(node, "Gather") and is_constant(node.inputs[0])}


def _written(node: ir.Node) -> list[ChannelConstant]:
    """The constants of a writer: its table, or its weight and its bias."""
    if not is_linear(node):
        return [ChannelConstant(node, 0)]
    bias = bias_of(node)
    return [weight_by_output(node), *([bias] if bias is not None else [])]
