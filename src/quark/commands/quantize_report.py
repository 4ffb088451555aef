"""`quark quantize --report`: the page of what was just written, measured on its calibration data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.command_line import results
from quark.errors import ConfigError
from quark.files import check_apart
from quark.report.page import Figure, PageTable, Section, check_page, write_page

if TYPE_CHECKING:
    from quark.onnx.calibration.data.path_reader import PathDataReader
    from quark.onnx.evaluation.recovery.search import Recovery
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable

WINDOWS, LENGTH = 16, 256
"""Of a calibration text: how many windows are measured, and their tokens."""
BUDGETS = 24
"""Points on the line of what budgets give."""


def check_report(page: Path | None, model: Path, output: str, calib: Path | None, form: str, force: bool) -> None:
    """Find what would stop the page before anything is quantized.

    Raises:
        ConfigError: There are no data to measure on, or what is written cannot be loaded again.
        MissingDependencyError, OutputExistsError, OutputError: See `check_page`.
    """
    if page is None:
        return
    if calib is None:
        raise ConfigError(
            "--report measures outputs on calibration data, and there are none. Possible: --calib, or afterwards "
            "`quark evaluate FLOAT QUANTIZED --data DATA --report FILE`."
        )
    if form in ("gguf", "onnx"):
        raise ConfigError(f"--report compares folders, and --export-format {form} is a file. Possible: no --report.")
    check_page(page, model, calib, overwrite=force)
    check_apart(page, output)


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
    from quark.commands.report_onnx import onnx_sections
    from quark.onnx.evaluation.compare_models import compare_models

    reader.rewind()
    report = compare_models(model, output, reader, samples)
    reader.rewind()
    sections = onnx_sections(model, output, report, reader, 1, f"{words}\nMeasured on the calibration data.")
    if recovery is not None:
        sections.insert(2, _recovery(recovery))
    _write(page, output, model, sections)


def size_line(title: str, before: int, after: int, start: float, rest: str = "") -> str:
    """What the command says at its end: bytes before and after, and the time since `start` of perf_counter."""
    return f"{title}: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB in {time.perf_counter() - start:.1f} s{rest}"


def page_of_folder(
    page: Path | None,
    model: Path,
    output: Path,
    calib: Path | None,
    load: Mapping[str, Any],
    words: str,
    budget: tuple[SensitivityTable, BudgetChoice] | None,
) -> None:
    """Write the page of a folder that was made of another, and figures into its model card; nothing without a page."""
    if page is None or calib is None:
        return
    from quark.commands.measure_torch import measure_folders
    from quark.commands.models import inputs_of, load_model
    from quark.commands.report_torch import folder_sections
    from quark.torch.writers.model_card import add_figures

    before, after = (load_model(folder, **load) for folder in (model, output))
    inputs = inputs_of(model, before)
    found = measure_folders(model, output, before, after, inputs.read(calib, WINDOWS, LENGTH))
    sections = folder_sections(model, output, found, inputs, f"{words}\nMeasured on the calibration data.")
    if budget is not None:
        sections.insert(2, budget_section(*budget))
    _write(page, output, model, sections)
    add_figures(output, _figures(found))


def _figures(found: Any) -> dict[str, str]:
    """What a model card says of the measurement."""
    lines = {f"SQNR of {name}": f"{output.comparison.sqnr:.2f} dB" for name, output in found.comparison.outputs.items()}
    if found.comparison.perplexity:
        first, second = found.comparison.perplexity
        lines["Perplexity, float and quantized"] = f"{first:.3f}, {second:.3f}"
    if found.comparison.divergence:
        import torch

        lines["Mean KL divergence of a token"] = (
            f"{float(torch.cat(list(found.comparison.divergence)).mean()):.4g} nats"
        )
    return {name: f"{value} (calibration data)" for name, value in lines.items()}


def _write(page: Path, output: Path, model: Path, sections: list[Section]) -> None:
    written = write_page(page, f"{output.name}, made of {model.name}", sections, overwrite=True)
    results().print(f"Report: {written}", highlight=False)


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


def budget_section(table: SensitivityTable, choice: BudgetChoice) -> Section:
    """What the budget chose, among what one scheme for all, and other budgets, would give."""
    from quark.report.figures import scatter

    alike = {name: found for name in table.candidates if (found := table.uniform(name)) is not None}
    low, high = (pick(found.bits for found in alike.values()) for pick in (min, max))
    line = []
    for i in range(BUDGETS + 1):
        with suppress(ConfigError):  # less than the smallest choice takes
            other = table.choose(bits=low + (high - low) * i / BUDGETS)
            line.append((other.size / 1e6, other.loss))
    points = [(name, found.size / 1e6, found.loss) for name, found in alike.items()]
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
    return Section("Bit budget", words, [PageTable(headers, rows, "What each group got", folded=True)], [Figure(drawn)])
