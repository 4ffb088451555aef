"""The result of `quark compare`: a row for each scheme, as a table and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quark.base.command_line import new_table, results
from quark.jobs.compare import ComparedSchemes, ComparisonJob, SchemeResult
from quark.jobs.folders.compared.verdict import word_of_kl
from quark.report.figures import scatter
from quark.report.page import Figure, PageTable, Section, write_page


def show(job: ComparisonJob, compared: ComparedSchemes) -> None:
    """Print the table, and write the page that is asked for."""
    request, rows, words = job.request, compared.schemes, job.words(compared.samples)
    headers, cells = _cells(compared.float_model, rows)
    table = new_table(*headers, title=f"Schemes of {request.model.name}, {words}")
    for row in cells:
        table.add_row(*row)
    console = results()
    console.print(table)
    if request.report is None:
        return
    done = [row for row in rows if not row.reason]
    if any(row.kl is not None for row in done):
        points = [(row.name, row.size / 1e6, row.kl if row.kl is not None else math.nan) for row in done]
        drawn = scatter(points, "size, MB", "KL divergence, nats; lower is better", log=True)
    else:
        points = [(row.name, row.size / 1e6, row.sqnr) for row in done]
        drawn = scatter(points, "size, MB", "SQNR of the worst output, dB; higher is better", log=False)
    section = Section(
        "Size against accuracy", f"{request.model}: {words}.", [PageTable(headers, cells)], [Figure(drawn)]
    )
    console.print(f"Report: {write_page(request.report, f'Schemes of {request.model.name}', [section])}")


def _cells(float_row: SchemeResult, rows: Sequence[SchemeResult]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells of what was measured."""
    language = float_row.perplexity is not None
    timed = float_row.seconds is not None
    noted = any(row.reason for row in rows)
    headers = ["scheme", "size MB", "of float", "SQNR dB", *(["KL nats", "perplexity", "loss"] if language else [])]
    headers += [*(["latency ms"] if timed else []), *(["note"] if noted else [])]
    cells = []
    for row in (float_row, *rows):
        if row.reason:
            cells.append([row.name, *[""] * (len(headers) - 2), f"not possible: {row.reason}"])
            continue
        line = [row.name, f"{row.size / 1e6:.2f}", f"{row.size / float_row.size:.1%}"]
        line.append("" if row is float_row else f"{row.sqnr:.2f}")
        if language:
            line += ["" if row.kl is None else f"{row.kl:.4g}", f"{row.perplexity or math.nan:.3f}"]
            line.append("" if row.kl is None else word_of_kl(row.kl))
        if timed:
            line.append(f"{(row.seconds or math.nan) * 1e3:.3f}")
        cells.append(line + [""] * noted)
    return headers, cells
