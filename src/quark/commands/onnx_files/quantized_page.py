"""`quark quantize --report` of an ONNX file: the page of what was just quantized, measured on its calibration data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from quark.commands.results.quantized import write_quantized_page
from quark.report.page import Figure, PageTable, Section

if TYPE_CHECKING:
    from quark.onnx.calibration.data.path_reader import PathDataReader
    from quark.onnx.search.recovery.search import Recovery


def page_of_file(
    page: Path,
    model: Path,
    output: Path,
    reader: PathDataReader,
    samples: int | None,
    words: str,
    recovery: Recovery | None,
) -> None:
    """Write the page of an ONNX file that was made of another; it replaces a page that is there."""
    from quark.commands.onnx_files.report import onnx_sections
    from quark.onnx.evaluation.compare_models import compare_models

    reader.rewind()
    report = compare_models(model, output, reader, samples)
    reader.rewind()
    sections = onnx_sections(model, output, report, reader, 1, f"{words}\nMeasured on the calibration data.")
    if recovery is not None:
        sections.insert(2, _recovery(recovery))
    write_quantized_page(page, output, model, sections)


def _recovery(found: Recovery) -> Section:
    """The path of a recovery."""
    from quark.report.figures import search_path  # imports numpy: after --help

    steps = [
        (trial.step, trial.seconds, math.nan if trial.after is None else trial.after, trial.result == "kept")
        for trial in found.trials
    ]
    rows = [
        (trial.step, *("" if value is None else found.metric.text(value) for value in (trial.before, trial.after)),
         f"{trial.seconds:.1f}", trial.result)
        for trial in found.trials
    ]  # fmt: skip
    words = (
        f"Steps were tried one on top of the other, and kept where {found.metric.name} gained by them on "
        f"{found.held_out} samples that calibration did not see: {found.metric.text(found.plain)} became "
        f"{found.metric.text(found.score)}."
    )
    table = PageTable(("step", "before", "after", "seconds", "result"), rows)
    return Section("Recovery", words, [table], [Figure(search_path(steps, found.metric.name, found.target))])
