"""`quark evaluate` of two ONNX files."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from quark.base.command_line import new_table, results
from quark.commands.onnx_files.report import onnx_sections
from quark.commands.results.tables import counted, task_table
from quark.jobs.evaluate import MeasuredFiles
from quark.onnx.evaluation.compare_models import ComparedLayer
from quark.report.page import write_page


def show_files(measured: MeasuredFiles) -> None:
    """Print what was measured, and write the page that is asked for."""
    request, report, reader, console = measured.request, measured.report, measured.reader, results()
    console.print(_summary(measured.sizes, report.latency, request.threads))
    title = f"Outputs over {counted(report.samples, 'sample')} of {reader.path.name}"
    table = new_table("output", "cosine", "L2", "PSNR dB", "SQNR dB", title=title)
    for name, found in report.outputs.items():
        table.add_row(name, f"{found.cosine:.6f}", f"{found.l2:.6g}", f"{found.psnr:.2f}", f"{found.sqnr:.2f}")
    console.print(table)
    if measured.task is not None:
        console.print(task_table(measured.task))
    if report.unlike:
        console.print(f"Not compared, as their shapes differ: {', '.join(report.unlike)}.", highlight=False)
    console.print(_worst_layers(report.layers[: request.layers]))
    if request.report is not None:
        reader.rewind()
        title = f"{request.quantized.name} against {request.model.name}"
        console.print(f"Report: {write_page(request.report, title, onnx_sections(measured))}")


def _summary(sizes: Sequence[int], latency: tuple[float, float], threads: int) -> Table:
    words = f"{threads} thread" + ("s" if threads > 1 else "")
    table = new_table("", "size MB", f"latency ms ({words})", title="Float against quantized")
    for name, size, seconds in zip(("float", "quantized"), sizes, latency, strict=True):
        change = "" if name == "float" else f" (x{latency[0] / seconds:.2f} speed)"
        table.add_row(name, f"{size / 1e6:.2f}", f"{seconds * 1e3:.3f}{change}")
    return table


def _worst_layers(layers: Sequence[ComparedLayer]) -> Table:
    table = new_table("node", "op", "tensor", "SQNR dB", "cosine", "", title="Layers, worst output first")
    for layer in layers:
        note = "up to the scales of its channels" if layer.rescaled else ""
        cosine = "" if note else f"{layer.damage.cosine:.6f}"
        table.add_row(layer.node, layer.op_type, layer.tensor, f"{layer.sqnr:.1f}", cosine, note)
    return table
