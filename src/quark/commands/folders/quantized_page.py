"""`quark quantize --report` of a model folder: the page of what was quantized, measured on its calibration data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quark.commands.results.quantized import write_quantized_page
from quark.errors import ConfigError
from quark.goals.efforts import HELD_OUT_TEXT
from quark.jobs import FolderRequest
from quark.jobs.evaluate import EvaluateFolders, evaluate_folders, evaluate_pipeline
from quark.report.figures import MOST_BARS
from quark.report.page import Figure, PageTable, Section

if TYPE_CHECKING:
    from quark.jobs.run_folder import FolderResult
    from quark.torch.algorithms.base import BlockErrors
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable

WINDOWS, LENGTH = 16, 256
"""Of a calibration text: how many windows are measured, and their tokens."""
PACKAGE = "the package's held-out text"
BUDGETS = 24
"""Points on the line of what budgets give."""


def page_of_folder(request: FolderRequest, result: FolderResult) -> None:
    """Write the page of a folder that was made of another; nothing without a page.

    Its figures are in the model card too, if nothing that made the folder has read data.
    """
    if request.report is None:
        return
    from quark.commands.folders.report import folder_sections, pipeline_sections

    output, fitted = Path(request.output), result.job.why or request.imatrix or request.sensitivity
    asked = EvaluateFolders(
        model=request.model, quantized=output, data=request.calib or HELD_OUT_TEXT, windows=WINDOWS, length=LENGTH,
        device=request.device, dtype=request.dtype, trust_remote_code=request.trust_remote_code,
        keep_unexpected=request.keep_unexpected, stream=request.stream,
        card=request.calib is None and not fitted and not result.parts,
    )  # fmt: skip
    if result.parts:
        words = "Measured on the calibration data."
        sections = pipeline_sections(evaluate_pipeline(replace(asked, report=request.report)), words)
        write_quantized_page(request, sections)
        return
    measured = evaluate_folders(asked)
    names = [each if isinstance(each, str) else each.name for each in result.job.algorithms]
    words = f"Quantized by {', with '.join([result.job.title, *names])}."
    verdict = "" if result.verdict is None else f"Verdict: {result.verdict}\n"
    sections = folder_sections(
        measured, f"{verdict}{words}\nMeasured on {'the calibration data' if request.calib else PACKAGE}."
    )
    if result.errors:
        sections.insert(2, errors_section(result.errors))
    if result.budget is not None:
        sections.insert(2, budget_section(*result.budget))
    write_quantized_page(request, sections)


def errors_section(errors: Sequence[BlockErrors]) -> Section:
    """Return a section with the errors of each algorithm in the output of each block, in the order of the model."""
    from quark.report.figures import bars
    from quark.torch.algorithms.base import OUTPUT_ERROR

    words = (
        "The error of a block's output, or of the model's, quantized as it will be, on some tokens of the calibration "
        "data: SQNR in dB without and with the algorithm; of one that learns from the whole model, the divergence of a "
        "predicted token in millinats. A named algorithm leaves alone what it would make worse."
    )
    rows = [
        (each.block or "all", each.algorithm, _shown(each.before, each.measure), _shown(each.after, each.measure),
         "kept" if each.kept else "left alone", f"{each.seconds:.1f}")
        for each in errors
    ]  # fmt: skip
    headers = ("block", "algorithm", "without", "with", "result", "seconds")
    outputs = [each for each in errors if each.measure == OUTPUT_ERROR]
    known = [each for each in outputs if min(each.before, each.after) > 0]  # NaN where a block returns no tensor
    values = [
        (f"{each.block or 'all'} ({each.algorithm})", tuple(-20 * math.log10(x) for x in (each.before, each.after)))
        for each in known[:MOST_BARS]
    ]
    figures = [Figure(bars(values, ("without", "with"), "SQNR dB"), tall=True)] if values else []
    return Section("What algorithms gained", words, [PageTable(headers, rows, "As a table", folded=True)], figures)


def _shown(error: float, measure: str) -> str:
    """A relative error as SQNR, a divergence as it is."""
    from quark.torch.algorithms.base import DIVERGENCE

    if measure == DIVERGENCE:
        return f"{1000 * error:.3g} millinats"
    return f"{-20 * math.log10(error):.1f} dB" if error > 0 else ""


def budget_section(table: SensitivityTable, choice: BudgetChoice) -> Section:
    """Return a section with the choice of a budget, among what one scheme for all, and other budgets, would give."""
    from quark.report.figures import heat_map, scatter

    uniform = {name: found for name in table.candidates if (found := table.uniform(name)) is not None}
    low, high = (pick(found.bits for found in uniform.values()) for pick in (min, max))
    line = []
    for i in range(BUDGETS + 1):
        with suppress(ConfigError):  # less than the smallest choice takes
            other = table.choose(bits=low + (high - low) * i / BUDGETS)
            line.append((other.size / 1e6, other.loss))
    points = [(name, found.size / 1e6, found.loss) for name, found in uniform.items()]
    points.append(("chosen", choice.size / 1e6, choice.loss))
    rows = [
        (group.layers[0], str(len(group.layers)), choice.schemes[group.layers[0]],
         f"{group.sizes[choice.schemes[group.layers[0]]] / 1e6:.3f}",
         f"{group.losses[choice.schemes[group.layers[0]]]:.3g}")
        for group in table.groups
    ]  # fmt: skip
    words = (
        f"Chosen: {choice.bits:.3f} bits for each weight, {choice.size / 1e6:.2f} MB. The loss is predicted: the KL "
        "divergence of the outputs to second order. The line is what other budgets would give."
    )
    headers = ("first layer", "layers", "scheme", "MB", "loss")
    drawn = scatter(points, "size, MB", "predicted loss, nats", log=True, line=line, marked="chosen")
    bits = {
        layer: 8 * group.sizes[choice.schemes[layer]] / group.weights
        for group in table.groups for layer in group.layers
    }  # fmt: skip
    losses = {layer: group.losses[choice.schemes[layer]] for group in table.groups for layer in group.layers}
    figures = [
        Figure(drawn),
        Figure(heat_map(bits, "bits of a weight", low_is_worst=False), "Where the bits went."),
        Figure(heat_map(losses, "predicted loss, nats", low_is_worst=False), "Where the loss is, by group of layers."),
    ]
    tables = [PageTable(headers, rows, "What each group got", folded=True)]
    return Section("Bit budget", words, tables, [figure for figure in figures if figure.svg])
