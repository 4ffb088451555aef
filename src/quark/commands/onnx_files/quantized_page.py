"""`quark quantize --report` of an ONNX file: the page of what was just quantized, measured on its calibration data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quark.commands.results.quantized import write_quantized_page
from quark.jobs import FileRequest
from quark.jobs.evaluate import EvaluateFiles, measure_files
from quark.report.page import Figure, PageTable, Section

if TYPE_CHECKING:
    from quark.jobs.run_file import FileResult
    from quark.onnx.search.recovery.search import Recovery


def page_of_file(request: FileRequest, result: FileResult) -> None:
    """Write the page of an ONNX file that was made of another, if one is asked for and there are data."""
    if request.report is None or result.reader is None:
        return
    from quark.commands.onnx_files.report import onnx_sections

    result.reader.rewind()
    evaluation = EvaluateFiles(model=request.model, quantized=result.path, samples=request.samples)
    measured = measure_files(evaluation, result.reader)
    result.reader.rewind()
    words = f"Quantized by {result.name}{result.written}.\nMeasured on the calibration data."
    sections = onnx_sections(measured, words)
    if result.recovery is not None:
        sections.insert(2, _recovery(result.recovery))
    write_quantized_page(request, sections)


def _recovery(recovery: Recovery) -> Section:
    from quark.report.figures import search_path  # imports numpy: after --help

    steps = [
        (trial.step, trial.seconds, math.nan if trial.after is None else trial.after, trial.result == "kept")
        for trial in recovery.trials
    ]
    rows = [
        (trial.step, *("" if value is None else recovery.metric.text(value) for value in (trial.before, trial.after)),
         f"{trial.seconds:.1f}", trial.result)
        for trial in recovery.trials
    ]  # fmt: skip
    where = f"On {recovery.last_looked} others" if recovery.last_looked else "On the same"
    if recovery.by_turns:
        where = f"On all {recovery.by_turns}, each with a file that was not calibrated with it,"
    plain, score, least = map(recovery.metric.text, (recovery.plain, recovery.score, recovery.least))
    became = f"the file keeps {score}" if math.isnan(recovery.plain) else f"{plain} became {score}"
    words = (
        f"Steps were tried one on top of the other, and kept where {recovery.metric.name} gained by them on "
        f"{recovery.held_out} samples that calibration did not see. {where} {became}; new data most often "
        f"show {least} or more."
    )
    table = PageTable(("step", "before", "after", "seconds", "result"), rows)
    return Section("Recovery", words, [table], [Figure(search_path(steps, recovery.metric.name, recovery.target))])
