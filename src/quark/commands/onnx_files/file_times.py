"""file_times: what a quantized file takes here, node by node, beside the float model that it decodes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.errors import CalibrationError
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.graph.model_file import infer_shapes, read
from quark.onnx.operators import QDQ
from quark.onnx.qdq.remove_qdq import remove_qdq
from quark.onnx.search.latency.kernels import ProfiledModel, Timer, timed
from quark.onnx.search.latency.node_groups import group_nodes, side_of

SECONDS = 3.0


@dataclass(frozen=True)
class NodeTimes:
    """Nodes that run together.

    Attributes:
        nodes: Their names.
        op_types: Their op types.
        float_seconds: What they take in the float model.
        file_seconds: What they take in the file.
    """

    nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    float_seconds: float
    file_seconds: float


@dataclass(frozen=True)
class FileTimes:
    """The times of a file, measured or estimated.

    Attributes:
        nodes: Those that read decoded tensors, with what runs together with them; what is lost most first.
        conversions: Seconds of QuantizeLinear and DequantizeLinear.
        float_seconds: Kernels of the float model.
        file_seconds: Kernels of the file.
        by_node: Name of a node -> its share of the seconds of the kernels of the file that compute it.
    """

    nodes: tuple[NodeTimes, ...]
    conversions: float
    float_seconds: float
    file_seconds: float
    by_node: Mapping[str, float] = field(default_factory=dict)


def file_times(path: Path, reader: Any = None, threads: int = 1, timer: Timer = timed) -> FileTimes:
    """Time the kernels of a quantized file and of its float model, which run by turns.

    Args:
        path: The file.
        reader: Samples, of which the first is run; None for one of noise, of a batch of 1.
        threads: Within an operator.
        timer: Instead of the clock.

    Raises:
        FormatError: It is no ONNX file, or ONNX Runtime does not load it.
        CalibrationError: It fails on the sample; there is none, and an axis other than the first has no size.
    """
    model = read(path)
    if reader is None:
        _require_sizes(path, model)
    float_model = model.clone()
    remove_qdq(float_model)
    for each in (model, float_model):
        infer_shapes(each)
    feed = next(iter(Samples(RandomDataReader(model) if reader is None else reader, model_inputs(model), 1)))
    runs = [ProfiledModel(each, feed, threads) for each in (float_model, model)]
    names = _by_name(float_model)
    in_float, in_file = (
        side_of(each, run.kernels, seconds, names)
        for each, run, seconds in zip((float_model, model), runs, timer(runs, SECONDS), strict=True)
    )
    quantized = {name for name, node in _by_name(model).items() if name in names and any(map(_is_decoded, node.inputs))}
    groups = group_nodes(float_model, quantized, in_float, in_file)
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        members[groups.find(name)].append(name)
    before, after = groups.seconds(in_float), groups.seconds(in_file)
    rows = [
        NodeTimes(
            tuple(found), tuple(names[name].op_type for name in found), before.get(group, 0.0), after.get(group, 0.0)
        )
        for group, found in members.items()
        if not quantized.isdisjoint(found)
    ]
    rows.sort(key=lambda row: (row.float_seconds - row.file_seconds, row.nodes))
    conversions = sum(in_file.seconds[kernel.name] for kernel in in_file.kernels if kernel.op_type in QDQ)
    return FileTimes(tuple(rows), conversions, in_float.total(), in_file.total(), dict(in_file.of_nodes()))


def _by_name(model: ir.Model) -> dict[str, ir.Node]:
    return {node.name or "": node for node in model.graph}


def _require_sizes(path: Path, model: ir.Model) -> None:
    """An image of 1 x 1 takes no time: what is the faster there says nothing of real ones. Of a batch, 1 is usual."""
    for entry in model_inputs(model).values():
        if entry.shape is None or not all(isinstance(size, int) for size in entry.shape[1:]):
            raise CalibrationError(
                f"{path} takes {entry}: times depend on the sizes that are left open. Possible: --data with samples "
                "as they come."
            )


def _is_decoded(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"
