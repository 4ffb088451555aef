"""`quark plan` of an ONNX file: which operators would be quantized, and what their weights would weigh.

    bytes of a weight = values * bits / 8 + scales * (4 + bytes of a zero point)

Block formats keep float weights in the file, as the documented layout has them. Of calibration data one sample is read,
and no kernels are timed: where these decide, less may be quantized.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from quark.base.command_line import new_table, results
from quark.core.spec import TensorSpec
from quark.errors import NothingToQuantizeError
from quark.jobs import FileRequest
from quark.jobs.run_file import CPU_TARGET, default_config, named_config, reader_of
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.data.inputs import file_bytes
from quark.onnx.config.serialized import as_scope
from quark.onnx.config.settings import Settings
from quark.onnx.flow.body_model import as_model, bodies_of
from quark.onnx.flow.prepare import prepare, prepare_body
from quark.onnx.graph.model_file import constant, load
from quark.onnx.graph.scopes import nodes_of
from quark.onnx.passes.store_float16 import LEAST_SIZE, store_float16
from quark.onnx.placement.place import place
from quark.onnx.placement.placement import Placement

SCALE = 4
"""Bytes of a scale."""


def plan_file(request: FileRequest, config: str | None) -> None:
    """Show what a configuration, or none, would do to a file.

    Raises:
        CalibrationError: The calibration data are not there, or the first sample does not fit the model.
        NothingToQuantizeError: Nothing would be quantized.
    """
    model, has_data = request.model, request.calib is not None
    if request.calib is not None:
        reader_of(request, request.calib).get_next()
    name = config or default_config(has_data, CPU_TARGET)
    settings = _settings(request, name)
    rows, saved = _counts_by_operator(model, settings)
    table = new_table("operator", "nodes", "quantized", "weights MB", "planned MB", title=f"{name} of {model.name}")
    for op_type, row in sorted(rows.items(), key=lambda item: (-item[1]["before"], item[0])):
        if row["quantized"]:
            sizes = (f"{row[key] / 1e6:.3f}" if row["before"] else "" for key in ("before", "after"))
            table.add_row(op_type, str(row["nodes"]), str(row["quantized"]), *sizes)
    console, before = results(), file_bytes(model)
    console.print(table)
    left = ", ".join(f"{op_type} {row['nodes']}" for op_type, row in sorted(rows.items()) if not row["quantized"])
    console.print(f"float: {left or 'nothing'}", highlight=False)
    console.print(
        f"size: {before / 1e6:.2f} MB -> about {(before - saved) / 1e6:.2f} MB ({(before - saved) / before:.1%})",
        highlight=False,
    )
    needed = not settings.specs.weights_apart
    data = "needed, and not given (--calib)" if needed and not has_data else "needed" if needed else "none are needed"
    console.print(f"data: {data}", highlight=False)
    if config is None and has_data:
        console.print(
            "Kernels are timed and up to a minute of recovery runs: nodes that gain nothing stay in float, others may.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _settings(request: FileRequest, name: str) -> Settings:
    """Those of a configuration, without what is excluded."""
    settings = ModelQuantizer(named_config(name)).settings
    exclude = (*settings.specs.exclude, *map(as_scope, request.exclude or ()))
    return replace(settings, specs=replace(settings.specs, exclude=exclude))


def _counts_by_operator(path: Path, settings: Settings) -> tuple[dict[str, Counter[str]], int]:
    """Operator -> its nodes, the quantized ones and bytes of weights before and after; and the bytes saved in all."""
    model = load(path)
    half = _float16_bytes(model)
    settings = prepare(model, settings)
    # A weight that became float32 on the way takes twice what it takes in the file.
    rows, saved = defaultdict[str, Counter[str]](Counter), _float16_bytes(model) - half
    for part, placement in _placed(model, settings):
        for node in part.graph:
            if node.op_type != "Constant":
                rows[node.op_type]["nodes"] += 1
        for node in placement.nodes:
            rows[node.op_type]["quantized"] += 1
        saved += _count_weights(part, placement, rows, bool(settings.passes.get(store_float16.__name__)))
    return rows, saved


def _float16_bytes(model: ir.Model) -> int:
    values = [
        value
        for graph in model.graphs()
        for value in (*graph.initializers.values(), *(output for node in graph for output in node.outputs))
    ]
    arrays = (constant(value) for value in values if value.dtype is ir.DataType.FLOAT16)
    return sum(array.nbytes for array in arrays if array is not None)


def _placed(model: ir.Model, settings: Settings) -> list[tuple[ir.Model, Placement]]:
    """The placement of a graph and, where the flow quantizes them, of its bodies as models of their own."""
    excluded = nodes_of(settings.specs.exclude, model, "exclude", bodies=True)
    bodies = [as_model(body, model).model for body in bodies_of(model.graph) if body.node not in excluded]
    nothing: NothingToQuantizeError | None = None
    placement = Placement()
    try:
        placement = place(model, settings)
    except NothingToQuantizeError as error:
        nothing = error
    found = [(model, placement)]
    if settings.specs.bodies or nothing is not None:
        inner = replace(settings, specs=replace(settings.specs, bodies=True, is_body=True))
        for body in bodies:
            prepare_body(body, inner)
            try:
                found += _placed(body, inner)
            except NothingToQuantizeError:
                found.append((body, Placement()))
    if nothing is not None and not any(placed.nodes for _, placed in found):
        raise nothing
    return found


def _count_weights(part: ir.Model, placement: Placement, rows: dict[str, Counter[str]], halves: bool) -> int:
    """Add the weights of a graph to the rows; return the bytes that it saves, each constant counted once.

    `halves`: whether large constants that stay in float are stored as float16.
    """
    seen, saved = set[ir.Value | None](), 0
    for (node, index), spec in placement.weights.items():
        value = node.inputs[index]
        before = constant(value).nbytes
        after = before if spec.is_block else planned_bytes(constant(value).shape, spec)
        rows[node.op_type].update(before=before, after=after)
        saved += 0 if value in seen else before - after
        seen.add(value)
    for value in part.graph.initializers.values() if halves else ():
        tensor = value.const_value
        if value not in seen and tensor is not None and tensor.dtype is ir.DataType.FLOAT and tensor.size >= LEAST_SIZE:
            saved += tensor.nbytes // 2
    return saved


def planned_bytes(shape: tuple[int, ...], spec: TensorSpec) -> int:
    """Bytes of the codes, the scales and the zero points of a weight."""
    scales = math.prod(spec.granularity.scale_shape(shape))
    return math.ceil(math.prod(shape) * spec.dtype.bits / 8) + math.ceil(scales * (SCALE + spec.dtype.bits / 8))
