"""`quark evaluate` of two ONNX files."""

from __future__ import annotations

from quark.base.command_line import results
from quark.commands.onnx_files.report import onnx_sections
from quark.jobs.evaluate import MeasuredFiles
from quark.report.page import write_page
from quark.report.shown import text_table


def show_files(measured: MeasuredFiles) -> None:
    """Print what was measured, and write the page that is asked for."""
    request, report, reader, console = measured.request, measured.report, measured.reader, results()
    *tables, layers = measured.tables()
    for table in tables:
        console.print(text_table(table))
    if report.unlike:
        console.print(f"Not compared, as their shapes differ: {', '.join(report.unlike)}.", highlight=False)
    console.print(text_table(layers))
    if request.report is not None:
        reader.rewind()
        title = f"{request.quantized.name} against {request.model.name}"
        console.print(f"Report: {write_page(request.report, title, onnx_sections(measured))}")
