"""The result of `quark compare`: a row for each scheme, as a table and as a page."""

from __future__ import annotations

import math
from dataclasses import replace

from quark.base.command_line import results
from quark.jobs.compare import ComparedSchemes, ComparisonJob
from quark.report.figures import scatter
from quark.report.page import Figure, Section, write_page
from quark.report.shown import text_table
from quark.report.text_chart import text_chart, unbeaten


def show(job: ComparisonJob, compared: ComparedSchemes) -> None:
    """Print the table and a chart of it, and write the page that is asked for."""
    request, words = job.request, job.words(compared.samples)
    (table,) = compared.tables()
    console = results()
    console.print(text_table(replace(table, title=f"Schemes of {request.model.name}, {words}")))
    done = [row for row in compared.schemes if not row.reason]
    by_kl = any(row.kl is not None for row in done)
    if by_kl:
        points = [(row.name, row.size / 1e6, row.kl if row.kl is not None else math.nan) for row in done]
        figure = "KL divergence, nats; lower is better"
    else:
        points = [(row.name, row.size / 1e6, row.sqnr) for row in done]
        figure = "SQNR of the worst output, dB; higher is better"
    best = unbeaten(points, low_is_best=by_kl)
    console.draw(text_chart(points, f"{figure}. *: no other is better and no larger.", "MB", log=by_kl, marked=best))
    if request.report is None:
        return
    drawn = scatter(points, "size, MB", figure, log=by_kl)
    section = Section(
        "Size against accuracy", f"{request.model}: {words}.", [replace(table, title="")], [Figure(drawn)]
    )
    console.print(f"Report: {write_page(request.report, f'Schemes of {request.model.name}', [section])}")
