"""`quark evaluate` of two ONNX files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from quark.base.command_line import new_table, results
from quark.commands.onnx_files.report import onnx_sections
from quark.commands.results.counted import counted
from quark.core.metrics import Comparison
from quark.onnx.calibration.data.inputs import file_bytes
from quark.onnx.calibration.data.path_reader import PathDataReader
from quark.onnx.evaluation.compare_models import ComparedLayer, compare_models
from quark.report.page import write_page


def evaluate_onnx(
    float_model: Path,
    quantized: Path,
    reader: PathDataReader,
    samples: int | None,
    layers: int,
    threads: int,
    page: Path | None = None,
) -> None:
    """Run both on the data, print the tables, and write the page."""
    report = compare_models(float_model, quantized, reader, samples, threads)
    sizes = (file_bytes(float_model), file_bytes(quantized))
    console = results()
    console.print(_summary(sizes, report.latency, threads))
    console.print(_outputs(report.outputs, f"{counted(report.samples, 'sample')} of {reader.path.name}"))
    if report.unlike:
        console.print(f"Not compared, as their shapes differ: {', '.join(report.unlike)}.", highlight=False)
    console.print(_worst_layers(report.layers[:layers]))
    if page is not None:
        reader.rewind()
        sections = onnx_sections(float_model, quantized, report, reader, threads)
        console.print(f"Report: {write_page(page, f'{quantized.name} against {float_model.name}', sections)}")


def _summary(sizes: tuple[int, int], latency: tuple[float, float], threads: int) -> Table:
    words = f"{threads} thread" + ("s" if threads > 1 else "")
    table = new_table("", "size MB", f"latency ms ({words})", title="Float against quantized")
    for name, size, seconds in zip(("float", "quantized"), sizes, latency, strict=True):
        change = "" if name == "float" else f" (x{latency[0] / seconds:.2f} speed)"
        table.add_row(name, f"{size / 1e6:.2f}", f"{seconds * 1e3:.3f}{change}")
    return table


def _outputs(outputs: Mapping[str, Comparison], words: str) -> Table:
    table = new_table("output", "cosine", "L2", "PSNR dB", "SQNR dB", title=f"Outputs over {words}")
    for name, found in outputs.items():
        table.add_row(name, f"{found.cosine:.6f}", f"{found.l2:.6g}", f"{found.psnr:.2f}", f"{found.sqnr:.2f}")
    return table


def _worst_layers(layers: Sequence[ComparedLayer]) -> Table:
    table = new_table("node", "op", "tensor", "SQNR dB", "cosine", "", title="Layers, worst output first")
    for layer in layers:
        note = "up to the scales of its channels" if layer.rescaled else ""
        cosine = "" if note else f"{layer.damage.cosine:.6f}"
        table.add_row(layer.node, layer.op_type, layer.tensor, f"{layer.sqnr:.1f}", cosine, note)
    return table
