"""`quark evaluate` of two folders."""

from __future__ import annotations

from dataclasses import replace

from quark.base.command_line import new_table, results
from quark.core.metrics import Comparison
from quark.jobs.evaluate import EvaluateFolders, MeasuredPipeline, held_out, verdict_on
from quark.jobs.folders.compared.measure import IN_BLOCKS, WHY_SLOW, MeasuredFolders
from quark.report.shown import text_table


def show_folders(measured: MeasuredFolders, request: EvaluateFolders) -> None:
    """Print what was measured, and write the page that is asked for."""
    console = results()
    _show(measured, request)
    if request.report is not None:
        # They import torch and matplotlib: where a page is asked for.
        from quark.commands.folders.report import folder_sections
        from quark.report.page import write_page

        title = f"{request.quantized.name} against {request.model.name}"
        console.print(f"Report: {write_page(request.report, title, folder_sections(measured))}")


def show_pipeline(measured: MeasuredPipeline, request: EvaluateFolders) -> None:
    """Print what was measured of the denoisers of a pipeline; a report is a page with pictures of both pipelines."""
    console = results()
    for name, each in measured.components.items():
        console.print(f"{name}:", highlight=False)
        _show(each, request)
        if name in measured.pictures:
            table = new_table("picture", "SQNR dB", title="Pictures")
            for picture, pair in measured.pictures[name].pictures.items():
                table.add_row(picture, f"{Comparison().update(*pair).sqnr:.2f}")
            console.print(table)
    if request.report is not None:
        from quark.commands.folders.report import pipeline_sections
        from quark.report.page import write_page

        title = f"{request.quantized.name} against {request.model.name}"
        console.print(f"Report: {write_page(request.report, title, pipeline_sections(measured))}")


def _show(measured: MeasuredFolders, request: EvaluateFolders) -> None:
    """Print what was measured."""
    console = results()
    both, outputs, *others = measured.tables(request.layers)
    console.print(text_table(both))
    console.print(f"Verdict: {verdict_on(measured, held_out(request))}", highlight=False, soft_wrap=True)
    console.print(WHY_SLOW if measured.seconds else IN_BLOCKS, highlight=False, soft_wrap=True)
    outputs = replace(outputs, title=f"{outputs.title} of {held_out(request).name}")
    for table in (outputs, *others):
        console.print(text_table(table))
