"""`--report` of ONNX files: the page of two models."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from quark.commands.results.tables import counted
from quark.jobs.evaluate import MeasuredFiles
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.padding import without_padding
from quark.onnx.calibration.data.readers import samples
from quark.onnx.evaluation.compare_models import ComparedLayer
from quark.onnx.evaluation.graph_parts import GraphParts
from quark.onnx.evaluation.layer_weights import LayerWeights, value_ranges
from quark.onnx.evaluation.ort_fusion import KINDS, Fusion, inspect_fusion, kernel_graph
from quark.onnx.graph.proto_file import read_header
from quark.onnx.search.recovery.search import element_types
from quark.report.figures import MOST_BARS, bars, graph, histogram
from quark.report.page import Figure, PageTable, Section

HISTOGRAM_SAMPLES = 8
MOST_NODES = 2500
"""Nodes of a graph that is drawn: a browser takes long for more, and nobody finds anything."""


def onnx_sections(measured: MeasuredFiles, words: str = "") -> list[Section]:
    """The page of two files.

    Args:
        measured: What was measured, its reader at the beginning.
        words: What was done, where that is known.
    """
    model, quantized = measured.request.model, measured.request.quantized
    weights = LayerWeights(model, quantized)
    return [
        Section("What was done", words, [_what_was_done(measured)]),
        _costs(measured),
        damage_section(model, measured.report.layers, weights),
        _ranges(measured, weights),
        _kernels(quantized, inspect_fusion(quantized)),
    ]


def _what_was_done(measured: MeasuredFiles) -> PageTable:
    import onnx_ir as ir  # after quark.onnx, which says what brings a package that is missing

    proto = read_header(measured.request.quantized)
    types = element_types(ir.from_proto(proto))
    opsets = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in proto.opset_import)
    rows = [
        ("float model", str(measured.request.model)),
        ("quantized model", str(measured.request.quantized)),
        *(("element type", f"{name}: {count} {kind}") for (name, kind), count in sorted(types.items())),
        ("operators", opsets),
        ("measured on", counted(measured.report.samples, "sample")),
    ]
    return PageTable(("", ""), rows)


def _costs(measured: MeasuredFiles) -> Section:
    report, threads = measured.report, measured.request.threads
    sizes, seconds = [size / 1e6 for size in measured.sizes], report.latency
    rows = [
        ("float", f"{sizes[0]:.2f}", "", f"{seconds[0] * 1e3:.3f}", ""),
        ("quantized", f"{sizes[1]:.2f}", f"{sizes[1] / sizes[0]:.1%}", f"{seconds[1] * 1e3:.3f}",
         f"{seconds[0] / seconds[1]:.2f}"),
    ]  # fmt: skip
    latency = f"latency ms ({threads} thread{'s' if threads > 1 else ''})"
    outputs = [
        (name, f"{found.sqnr:.2f}", f"{found.psnr:.2f}", f"{found.cosine:.6f}", f"{found.l2:.6g}")
        for name, found in report.outputs.items()
    ]
    headers = ("output", "SQNR dB", "PSNR dB", "cosine", "L2")
    unlike = f"Not compared, as their shapes differ: {', '.join(report.unlike)}." if report.unlike else ""
    return Section(
        "Size, latency, outputs",
        unlike,
        [
            PageTable(("", "size MB", "of float", latency, "times as fast"), rows),
            PageTable(headers, outputs, f"Outputs over {counted(report.samples, 'sample')}"),
            *([] if measured.task is None else [measured.task.table()]),
        ],
    )


def damage_section(float_model: Path, layers: Sequence[ComparedLayer], weights: LayerWeights) -> Section:
    """Return a section with the loss of each layer, in the order of the graph."""
    order = {name: i for i, node in enumerate(read_header(float_model).graph.node) for name in node.output}
    stored = {layer.tensor: weights.sqnr(layer.tensor) for layer in layers}
    lossy = [layer for layer in layers if layer.sqnr < math.inf or stored[layer.tensor] is not None]
    drawn = sorted(lossy[:MOST_BARS], key=lambda layer: order[layer.tensor])
    rows = []
    for layer in sorted(layers, key=lambda layer: order[layer.tensor]):
        weight = stored[layer.tensor]
        note = "up to the scales of its channels" if layer.rescaled else ""
        rows.append((layer.tensor, layer.op_type, "" if weight is None else f"{weight:.1f}", f"{layer.sqnr:.1f}", note))
    numbers = {name: math.nan if value is None else value for name, value in stored.items()}
    values = [(layer.tensor, (numbers[layer.tensor], layer.sqnr)) for layer in drawn]
    some = "" if len(drawn) == len(layers) else f" Of {len(layers)} tensors the {len(drawn)} worst that lose are drawn."
    words = (
        "SQNR in dB, in the order of the graph: 6 dB more is half the error. That of an output counts the errors of "
        f"the layers before, too; that of a weight is its own.{some}"
    )
    headers = ("tensor", "op", "weight SQNR dB", "output SQNR dB", "")
    figures = [Figure(bars(values, ("weight", "output"), "SQNR dB"), tall=True)] if values else []
    return Section("Damage by layer", words, [PageTable(headers, rows, "As a table", folded=True)], figures)


def _ranges(measured: MeasuredFiles, weights: LayerWeights) -> Section:
    request, header = measured.request, read_header(measured.request.model)
    inputs = model_inputs(header)
    feeds = list(itertools.islice(samples(without_padding(measured.reader, header), inputs), HISTOGRAM_SAMPLES))
    ranges = value_ranges(request.model, request.quantized, measured.report.layers, feeds, weights)
    figures = [Figure(histogram(each), each.caption) for each in ranges]
    words = f"Float values over {len(feeds)} samples, worst output first; lines where the codes end."
    return Section("Ranges of the worst layers", words if figures else "", figures=figures)


def _kernels(quantized: Path, fusion: Sequence[Fusion]) -> Section:
    nodes = kernel_graph(quantized, list(fusion))
    counts = Counter(KINDS[node.kind] for node in nodes)
    words = f"What ONNX Runtime's CPU provider runs: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}."
    if len(nodes) > MOST_NODES:
        words += f" A graph of {len(nodes)} nodes is not drawn."
    parts = GraphParts.of(nodes)
    left_out = f" {counted(parts.of_sizes, 'node')} that compute sizes alone are left out." if parts.of_sizes else ""
    folded = f"Parts in integers and in float, in the order of the graph; what repeats is drawn once.{left_out}"
    figures = [Figure(svg, folded, tall=True) for svg in parts.drawn()]
    if len(nodes) <= MOST_NODES:
        figures.append(Figure(graph(nodes, KINDS), "All nodes, each below those that it reads.", tall=True))
    left = [(row.node, row.op_type, row.kernel, row.reason, row.advice) for row in fusion if not row.integer]
    headers = ("node", "op", "runs as", "why", "what to do")
    return Section(
        "Integer and float nodes",
        words,
        [PageTable(headers, left, "Quantized, but computed in float", folded=True)],
        figures,
    )
