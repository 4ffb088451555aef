"""`quark compare`: what several schemes would make of a model, in size and accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.base.progress import log_to
from quark.commands.evaluate import Length, Samples, Threads, Windows
from quark.commands.options.kinds import check_options, require, require_model
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.shared import (
    BatchSize,
    Device,
    Dtype,
    KeepUnexpected,
    LogFileOption,
    Mean,
    ReportFile,
    Std,
    TrustRemoteCode,
)
from quark.commands.quantize import Model
from quark.errors import UsageError
from quark.jobs.request import is_onnx
from quark.jobs.words import check_words, members, scheme_names, usage
from quark.report.page import check_page


def compare(
    context: typer.Context,
    model: Model,
    schemes: Annotated[
        list[str],
        typer.Option(
            help="Schemes, mixes of GGUF, or named configurations of an ONNX file, and families of them (int4); with "
            "commas between them, or repeated."
        ),
    ],
    calib: Annotated[Path | None, typer.Option(help="Calibration data, as of `quark quantize`.")] = None,
    data: Annotated[Path | None, typer.Option(help="Held-out data to measure on. Default: --calib.")] = None,
    report: ReportFile = None,
    log_file: LogFileOption = None,
    length: Length = 256,
    windows: Windows = 64,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    keep_unexpected: KeepUnexpected = False,
    samples: Samples = None,
    batch_size: BatchSize = None,
    mean: Mean = None,
    std: Std = None,
    threads: Threads = 1,
) -> None:
    """Quantize a model by each of several schemes, and compare size and accuracy; no model is written.

    Example: quark compare ./llama --schemes int8_wo,uint4_wo_32 --calib heldout.txt

    Example: quark compare ./llama --schemes int4,int8,Q4_K_M --calib heldout.txt

    Example: quark compare model.onnx --schemes A8W8,XINT8 --calib samples.npz
    """
    check_options(context, model)
    require_model(model)
    names = _names(schemes, model)
    measured = require(data or calib, "--calib or --data", model)
    check_page(report, model, calib, data)
    check_log_file(log_file, str(model), [calib, data, report])
    say_first("Comparing schemes of", model, *names)
    words = f"measured on {measured}" if data else f"measured on {measured}, the calibration data"
    # Each flow imports its libraries: after the arguments are parsed, so that --help is instant.
    if is_onnx(model):
        from quark.commands.onnx_files.compare import compare_presets
        from quark.jobs.run_file import calibration_reader

        readers = [calibration_reader(model, each, batch_size, mean, std) for each in (calib, measured)]
        reader = require(readers[1], "--data", model)
        with log_to(log_file):
            compare_presets(model, names, readers[0], reader, samples, threads, words, report)
        return
    from quark.commands.folders.compare import compare_schemes

    load = {"trust_remote_code": trust_remote_code, "keep_unexpected": keep_unexpected}
    load_as = {"device": device, "dtype": dtype, **load}
    with log_to(log_file):
        compare_schemes(model, names, calib, measured, (length, windows), load_as, words, report)


def _names(schemes: list[str], model: Path) -> list[str]:
    """The schemes that were typed, each once; families of a model folder's are their members."""
    names = list(dict.fromkeys(name.strip() for item in schemes for name in item.split(",") if name.strip()))
    if not names:
        raise UsageError("--schemes names none. Possible: several with commas between them, as in int8_wo,mxfp4.")
    if not is_onnx(model):
        names = members(names, scheme_names())
        with usage():
            check_words(names)
    return names
