"""`quark evaluate`: float and quantized model side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.base.progress import log_to
from quark.commands.options.kinds import check_options, folder_option, onnx_option, require
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
from quark.errors import ConfigError
from quark.jobs.request import is_onnx
from quark.report.page import check_page

Float = Annotated[Path, typer.Argument(metavar="FLOAT", help="Folder or ONNX file of the float model.")]
Quantized = Annotated[
    Path, typer.Argument(metavar="QUANTIZED", help="Folder, GGUF or ONNX file of the same, quantized.")
]
Layers = Annotated[int, typer.Option(min=0, help="How many of the worst layers to show.")]

Data = Annotated[
    Path | None, typer.Option(help="Held-out data: text, a folder of images, audio or arrays, .npz, .npy (ONNX).")
]
Text = Annotated[Path | None, folder_option(help="Held-out text file: the same as --data.")]
Length = Annotated[int, folder_option(min=2, help="Tokens in a window.")]
Windows = Annotated[int, folder_option(min=0, help="Most windows or other samples; 0: all.")]

Samples = Annotated[int | None, onnx_option(min=1, help="Most samples; all by default.")]
Threads = Annotated[int, onnx_option(min=1, help="Threads of ONNX Runtime.")]


def evaluate(
    context: typer.Context,
    float_model: Float,
    quantized: Quantized,
    layers: Layers = 10,
    report: ReportFile = None,
    log_file: LogFileOption = None,
    data: Data = None,
    text: Text = None,
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
    """Compare outputs, size, latency and the damage of each layer, and of language models the perplexity.

    Example: quark evaluate ./llama ./llama-uint4 --text heldout.txt

    Example: quark evaluate model.onnx model-a8w8.onnx --data samples.npz

    Example: quark evaluate model.onnx model-a8w8.onnx --data samples.npz --report out.html
    """
    check_options(context, float_model)
    check_page(report, float_model, quantized, data, text)
    check_log_file(log_file, str(quantized), [float_model, data, text, report])
    say_first("Comparing", quantized, f"with {float_model}")
    # Each flow imports its libraries: after the arguments are parsed, so that --help is instant.
    if is_onnx(float_model):
        from quark.commands.onnx_files.evaluate import evaluate_onnx
        from quark.jobs.run_file import calibration_reader

        reader = calibration_reader(float_model, require(data, "--data", float_model), batch_size, mean, std)
        reader = require(reader, "--data", float_model)
        with log_to(log_file):
            evaluate_onnx(float_model, quantized, reader, samples, layers, threads, report)
        return
    from quark.commands.folders.evaluate import evaluate_folders

    if data and text:
        raise ConfigError("--data and --text are the same option; give one of them.")
    held_out = require(data or text, "--data or --text", float_model)
    load = {"trust_remote_code": trust_remote_code, "keep_unexpected": keep_unexpected}
    with log_to(log_file):
        evaluate_folders(
            float_model, quantized, held_out, length=length, windows=windows, layers=layers, device=device,
            dtype=dtype, load=load, page=report,
        )  # fmt: skip
