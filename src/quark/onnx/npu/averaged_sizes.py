"""How many values an average is of, where the model leaves that open: the calibration samples know it."""

from __future__ import annotations

import onnx_ir as ir

from quark.errors import ConfigError
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import axes_of
from quark.onnx.graph.model_file import infer_shapes
from quark.onnx.graph.sessions import run_sample
from quark.onnx.placement.select_nodes import select_nodes


def averaged(node: ir.Node) -> list[int | None] | None:
    """The sizes of the averaged axes, None for one that is open; None for a node that averages nothing, or all.

    An AveragePool says its size itself.
    """
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if node.op_type not in ("GlobalAveragePool", "ReduceMean"):
        return None
    if shape is None:
        return [None]
    axes = range(2, len(shape)) if node.op_type == "GlobalAveragePool" else axes_of(node)
    sizes = [shape[axis] for axis in (axes if axes is not None else range(len(shape)))]
    return [size if isinstance(size, int) else None for size in sizes]


def needs_samples(model: ir.Model, settings: Settings) -> bool:
    """Return True where sizes that a simulation needs are left open by the model."""
    if not {"AvgPool", "ReduceMean"} & set(settings.npu.conversions):
        return False
    infer_shapes(model)
    return bool(_open(model, settings))


def measure_sizes(model: ir.Model, settings: Settings, data: Samples) -> None:
    """Fix the shapes of what is averaged, as the first sample has them.

    Raises:
        ConfigError: The samples have several sizes, so that an average is of several numbers of values.
    """
    nodes = _open(model, settings)
    first = {name: array.shape[1:] for name, array in next(iter(data)).items()}
    for number, feed in enumerate(data):
        other = {name: array.shape[1:] for name, array in feed.items()}
        if other != first:
            name = next(name for name in first if other.get(name) != first[name])
            raise ConfigError(
                f"How many values {nodes[0].name} ({nodes[0].op_type}) averages is not fixed: of the input {name!r}, a "
                f"row is {list(first[name])} in the first sample and {list(other[name])} in sample {number}. Possible: "
                "samples of one size, exclude the node, or set ConvertAvgPoolToDPUVersion and "
                "ConvertReduceMeanToDPUVersion to False."
            )
    values = {value.name or "": value for node in nodes for value in node.inputs[:1] if value is not None}
    with model_session(model, list(values), settings) as session:
        arrays = run_sample(session, list(values), data[0])
    for value, array in zip(values.values(), arrays, strict=True):
        value.shape = ir.Shape([None, *array.shape[1:]] if array.ndim else [])


def _open(model: ir.Model, settings: Settings) -> list[ir.Node]:
    """The nodes that average an open number of values."""
    return [node for node in select_nodes(model, settings) if None in (averaged(node) or ())]
