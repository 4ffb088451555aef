"""QuaRot's first rotation of an ONNX model (Ashkboos et al. 2024, arXiv:2404.00456): that of the residual stream.

    norm gain g   W <- diag(g) W     for the linear layers after, and the gain becomes 1
    norm bias c   b <- b + c W       where all of these have a bias; else it stays, as (c / g) Q
    reader        W <- Q^T W         of y = x W
    writer        W <- W Q, b <- b Q, embedding E <- E Q

Q is orthonormal, and keeps the mean where a norm subtracts it. All is computed in float64 and rounded once.

A file may say what is rotated, instead of what the graph says:

    {"R1_pairs": [{"prev_nodes": [writers], "next_nodes": [readers], "norm_node": the norm between them}, ...]}

Writers and readers are linear layers (Gemm or MatMul with a constant weight), writers also the Gather of an embedding.
The norm is any of the nodes that it is made of, and may be left out. All pairs belong to one residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.core.solvers.hadamard import Rotation
from quark.errors import ConfigError, StructureError, did_you_mean
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.samples import Samples, required
from quark.onnx.config.algo_configs import QuarotConfig
from quark.onnx.config.settings import Settings
from quark.onnx.graph.channels import ChannelConstant, bias_of, is_linear, weight_by_input, weight_by_output
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import is_constant
from quark.onnx.graph.norms import Normalization, find_norms
from quark.onnx.graph.residual_stream import ResidualStream, find_streams
from quark.onnx.graph.sessions import run_sample

TOLERANCE = 1e-3
"""Largest change of an output, relative to its largest value, that float32 arithmetic explains."""
SEED = 1
"""Of the random signs. A matrix that keeps the mean has signs of seed 0 where none are asked for."""


def rotate(model: ir.Model, config: QuarotConfig, settings: Settings, data: Samples | None) -> int:
    """Rotate every residual stream; return how many constants were rotated.

    Raises:
        ConfigError: r_matrix_dim does not fit a stream, or the file at r_config_path does not fit the model.
        CalibrationError: There is no data to prove the rotation on.
        StructureError: The outputs for the first sample are not what they were.
    """
    if config.r_config_path:  # scripts pass "" for no file
        streams = _read_streams(config.r_config_path, model.graph)
    else:
        streams, reasons = find_streams(model.graph)
        for reason in reasons:
            logger.info("QuaRot leaves a residual stream as it is: %s", reason)
    rotations = [_rotation(stream, config) for stream in streams]
    if not streams:
        return 0
    sample = next(iter(required(data, config)))
    before = _outputs(model, sample, settings)
    for stream, rotation in zip(streams, rotations, strict=True):
        _rotate(stream, rotation)
    _prove(before, _outputs(model, sample, settings))
    return sum(len(stream.constants) for stream in streams)


def _rotation(stream: ResidualStream, config: QuarotConfig) -> Rotation:
    """Q for a stream: blocks of r_matrix_dim where that divides the width; its default stands for the width itself."""
    size, width = config.r_matrix_dim, stream.width
    if size < 1 or width % size:
        if size != QuarotConfig.r_matrix_dim:
            raise ConfigError(
                f"r_matrix_dim={size}: the residual stream is {width} wide. Possible: {width}, a divisor of it, or the "
                f"default {QuarotConfig.r_matrix_dim}, which stands for any width."
            )
        size = width
    return Rotation(size, SEED if config.use_random_had else None, stream.centred)


def _rotate(stream: ResidualStream, rotation: Rotation) -> None:
    gains: dict[ChannelConstant, NumpyArray] = {}
    for norm, weights in stream.norms.items():
        gain = _taken_gain(norm, weights, rotation, stream.width)
        gains |= dict.fromkeys(weights, gain)
    for part in stream.constants:
        part.change(partial(_turned, rotation=rotation, gain=gains.get(part)), stream.width)


def _turned(rows: NumpyArray, rotation: Rotation, gain: NumpyArray | None) -> NumpyArray:
    turned: NumpyArray = rotation.apply(rows if gain is None else rows * gain)
    return turned


def _taken_gain(
    norm: Normalization, weights: tuple[ChannelConstant, ...], rotation: Rotation, width: int
) -> NumpyArray:
    """The gain of a norm, which keeps 1; its bias goes into the layers after, or stays, rotated."""
    gain = np.ones(width) if norm.gain is None else np.broadcast_to(norm.gain.array.reshape(-1), width)
    gain = gain.astype(np.float64)
    if norm.bias is not None and norm.bias.array.any():
        shift = np.broadcast_to(norm.bias.array.reshape(-1), width).astype(np.float64)
        biases = [bias_of(weight.node) for weight in weights]
        if all(bias is not None for bias in biases):
            for weight, bias in zip(weights, biases, strict=True):
                assert bias is not None
                _move(shift, weight, bias)
            shift = np.zeros(width)
        elif (gain == 0).any():
            raise StructureError(
                f"{norm.nodes[0].name} has a bias and a gain of 0 in {int((gain == 0).sum())} channels, and not all "
                "layers that read it have a bias to take it over: it cannot be rotated."
            )
        else:
            shift = rotation.apply(shift / gain)
        norm.bias.change(lambda _: shift[None], width)
    if norm.gain is not None:
        norm.gain.change(np.ones_like, width)
    return gain


def _move(shift: NumpyArray, weight: ChannelConstant, bias: ChannelConstant) -> None:
    """Let the bias of a layer take over what its weight makes of the shift; a Gemm has factors on both."""
    attributes = weight.node.attributes
    factor = attributes.get_float("alpha", 1.0)
    if bias.node is weight.node:
        beta = attributes.get_float("beta", 1.0)
        if not beta:
            raise StructureError(f"{weight.node.name} has beta=0, and so no bias to take over that of the norm.")
        factor /= beta
    moved = factor * (shift @ np.moveaxis(weight.array, weight.axis, 0).astype(np.float64))
    bias.change(partial(np.add, moved), len(moved))


def _outputs(model: ir.Model, sample: Feed, settings: Settings) -> dict[str, NumpyArray]:
    """The float outputs for a sample."""
    names = [value.name or "" for value in model.graph.outputs]
    with model_session(model, [], settings) as session:
        arrays = map(np.asarray, run_sample(session, names, sample))
        return {name: array for name, array in zip(names, arrays, strict=True) if array.dtype.kind == "f"}


def _prove(before: dict[str, NumpyArray], after: dict[str, NumpyArray]) -> None:
    """Raise StructureError where an output is not what it was."""
    for name, array in before.items():
        largest = float(np.abs(array).max(initial=0.0))
        change = float(np.abs(after[name] - array).max(initial=0.0)) / max(largest, 1e-30)
        if not change <= TOLERANCE:
            raise StructureError(
                f"QuaRot: the output {name} changes by {change:.2g} of its largest value where nothing should change: "
                "what is rotated does not belong together. Possible: other R1_pairs, or none, so that they are found."
            )


# The file of a rotation -----------------------------------------------------------------------------------------------


KEYS = ("prev_nodes", "next_nodes", "norm_node")


def _read_streams(path: str, graph: ir.Graph) -> list[ResidualStream]:
    """The stream that a file describes.

    Raises:
        ConfigError: The file cannot be read, names what the graph does not have, or constants of different widths.
    """
    pairs = _read_pairs(path)
    linear = {node.name or "": node for node in graph if is_linear(node)}
    writers = {**linear, **_tables(graph)}
    norms = {node.name or "": norm for norm in find_norms(graph) for node in norm.nodes}
    stream = ResidualStream(0)
    for pair in pairs:
        for name in pair["prev_nodes"]:
            stream.turned |= dict.fromkeys(_constants_of(_require_known(name, writers, "prev_nodes", path)))
        readers = [_require_known(name, linear, "next_nodes", path) for name in pair["next_nodes"]]
        weights = tuple(weight_by_input(node) for node in readers)
        if pair.get("norm_node") is None:
            stream.turned |= dict.fromkeys(weights)
        else:
            norm = _require_known(pair["norm_node"], norms, "norm_node", path)
            stream.norms[norm] = (*stream.norms.get(norm, ()), *weights)
    widths = {constant.size for constant in stream.constants} - {1}
    if len(widths) != 1:
        raise ConfigError(f"{path}: the constants of R1_pairs are {sorted(widths)} wide; possible: one width.")
    (stream.width,) = widths
    return [stream]


def _read_pairs(path: str) -> list[Mapping[str, Any]]:
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
        lists = [pair.get(key) for key in KEYS[:2]] if known else [None]
        named = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
        if not named or not isinstance(pair.get("norm_node"), (str, type(None))):
            raise ConfigError(f"{path}: expected lists prev_nodes and next_nodes, and a norm_node; got {pair}.")
    return pairs


def _require_known(name: str, known: Mapping[str, Any], key: str, path: str) -> Any:
    if name not in known:
        raise ConfigError(f"{path}: {key} has {name!r}, which is none. {did_you_mean(name, known)}")
    return known[name]


def _tables(graph: ir.Graph) -> dict[str, ir.Node]:
    """The nodes that look up rows of a constant."""
    return {node.name or "": node for node in graph if is_op(node, "Gather") and is_constant(node.inputs[0])}


def _constants_of(node: ir.Node) -> list[ChannelConstant]:
    """The constants of a writer: its table, or its weight and its bias."""
    if not is_linear(node):
        return [ChannelConstant(node, 0)]
    bias = bias_of(node)
    return [weight_by_output(node), *([bias] if bias is not None else [])]
