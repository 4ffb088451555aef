"""`quark evaluate` of two folders."""

from __future__ import annotations

import math

from rich.table import Table

from quark.base.command_line import new_table, results
from quark.commands.results.tables import samples_in, task_table
from quark.core.metrics import Comparison
from quark.jobs.evaluate import EvaluateFolders, MeasuredPipeline, held_out, verdict_on
from quark.jobs.folders.compared.measure import IN_BLOCKS, WHY_SLOW, MeasuredFolders


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
    console.print(_summary(measured))
    console.print(f"Verdict: {verdict_on(measured, held_out(request))}", highlight=False, soft_wrap=True)
    console.print(WHY_SLOW if measured.seconds else IN_BLOCKS, highlight=False, soft_wrap=True)
    title = f"Outputs over {samples_in(measured)} of {held_out(request).name}"
    table = new_table("output", "SQNR dB", "cosine", "same top-1", title=title)
    for name, found in measured.comparison.outputs.items():
        agreement = f"{found.agreed / found.rows:.2%}" if found.rows else ""
        table.add_row(name, f"{found.comparison.sqnr:.2f}", f"{found.comparison.cosine:.6f}", agreement)
    console.print(table)
    for task in filter(None, (measured.task, measured.harness)):
        console.print(task_table(task))
    if measured.comparison.by_timestep:
        table = new_table("timesteps", "SQNR dB", title="Outputs by timestep")
        for bucket, sqnr in measured.comparison.by_timestep.rows():
            table.add_row(str(bucket), f"{sqnr:.2f}")
        console.print(table)
    table = new_table("layer", "weight SQNR dB", "output SQNR dB", title="Layers, worst output first")
    known = {name: pair for name, pair in measured.damage.items() if not math.isnan(pair[1])}
    for name, (weight, output) in sorted(known.items(), key=lambda item: item[1][1])[: request.layers]:
        table.add_row(name, f"{weight:.1f}", f"{output:.1f}")
    console.print(table)


def _summary(measured: MeasuredFolders) -> Table:
    perplexity, kl = measured.comparison.perplexity, measured.comparison.kl
    times = ["latency ms"] if measured.seconds else []
    of_text = [*(["perplexity"] if perplexity else []), *([] if kl is None else ["KL nats"])]
    table = new_table("", "size MB", *of_text, *times, title="Float against quantized")
    for index, name in enumerate(("float", "quantized")):
        cells = [f"{measured.sizes[index] / 1e6:.2f}"]
        if perplexity:
            change = f" ({perplexity[1] / perplexity[0] - 1:+.2%})" if index else ""
            cells.append(f"{perplexity[index]:.3f}{change}")
        if kl is not None:
            cells.append(f"{kl:.4g}" if index else "")
        table.add_row(name, *cells, *(f"{seconds * 1e3:.1f}" for seconds in measured.seconds[index : index + 1]))
    return table
