"""The last lines of `quark quantize`, and a page when one was asked for."""

from __future__ import annotations

import shlex
from pathlib import Path

from quark.base.command_line import results
from quark.base.files import check_apart
from quark.base.log import logger
from quark.errors import ConfigError
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs import JobRequest
from quark.jobs.request import is_onnx
from quark.report.page import Section, check_page, write_page


def check_report(request: JobRequest, form: str) -> None:
    """Find what would stop the page before anything is quantized.

    Raises:
        ConfigError: There are no data to measure on, or what is written cannot be loaded again.
        MissingDependencyError, OutputExistsError, OutputError: See `check_page`.
    """
    if request.report is None:
        return
    if form in ("gguf", "onnx"):
        raise ConfigError(f"--report compares folders, and --export-format {form} is a file. Possible: no --report.")
    data = request.calib or _text_of_the_package(request)
    if data is None:
        raise ConfigError(
            "--report measures outputs on calibration data, and there are none. Possible: --calib, or afterwards "
            "`quark evaluate FLOAT QUANTIZED --data DATA --report FILE`."
        )
    check_page(request.report, request.model, data, overwrite=request.force)
    check_apart(request.report, request.output)


def _text_of_the_package(request: JobRequest) -> Path | None:
    """Return the text that a page measures on where no data are given; None for a model that does not read text."""
    if is_onnx(request.model) or not (request.model / "config.json").is_file():
        return None
    from quark.jobs.folders.models import inputs_of, open_folder, skeleton_of

    folder = open_folder(request.model, getattr(request, "trust_remote_code", False))
    return DEFAULT_TEXT if inputs_of(request.model, skeleton_of(folder)).reads_text else None


def size_line(title: str, before: int, after: int, seconds: float, rest: str = "") -> str:
    """Return the last line of a command: bytes before and after, and the time it took."""
    return f"{title}: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB in {seconds:.1f} s{rest}"


def say_how_to_evaluate(model: Path, quantized: Path | str, calib: Path | None) -> None:
    """Log the command that shows what the quantization cost.

    Args:
        model: The float model.
        quantized: What a program opens.
        calib: Calibration data: held-out data have that form.
    """
    data = f"HELDOUT{calib.suffix if calib else ''}"
    words = f"quark evaluate {shlex.quote(str(model))} {shlex.quote(str(quantized))} --data {data}"
    logger.info("What it cost, on data of yours that calibration did not read: %s", words)


def write_quantized_page(request: JobRequest, sections: list[Section]) -> None:
    """Write the page that is asked for, in place of one that is there, and say where it is."""
    if request.report is not None:
        title = f"{Path(request.output).name}, made of {request.model.name}"
        results().print(f"Report: {write_page(request.report, title, sections, overwrite=True)}", highlight=False)
