"""The result of `quark compare`: a row for each scheme, as a table and as a page."""

from __future__ import annotations

import math
from dataclasses import replace

from quark.base.command_line import results
from quark.jobs.compare import ComparedSchemes, ComparisonJob
from quark.report.figures import scatter
from quark.report.page import Figure, Section, write_page
from quark.report.shown import text_table


def show(job: ComparisonJob, compared: ComparedSchemes) -> None:
    """Print the table, and write the page that is asked for."""
    request, rows, words = job.request, compared.schemes, job.words(compared.samples)
    (table,) = compared.tables()
    console = results()
    console.print(text_table(replace(table, title=f"Schemes of {request.model.name}, {words}")))
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
        "Size against accuracy", f"{request.model}: {words}.", [replace(table, title="")], [Figure(drawn)]
    )
    console.print(f"Report: {write_page(request.report, f'Schemes of {request.model.name}', [section])}")
