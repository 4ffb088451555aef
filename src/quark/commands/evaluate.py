"""`quark evaluate`: float and quantized model side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.base.progress import log_to
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import takes
from quark.jobs.evaluate import (
    EVALUATE,
    EvaluateFiles,
    EvaluateFolders,
    check_bounds,
    evaluate_files,
    evaluate_folders,
    evaluate_pipeline,
    held_out,
)
from quark.jobs.recipes.held_out import check_held_out
from quark.jobs.request import is_pipeline
from quark.report.page import check_page

Float = Annotated[Path, typer.Argument(metavar="FLOAT", help="Folder, GGUF file or ONNX file of the float model.")]
Quantized = Annotated[
    Path, typer.Argument(metavar="QUANTIZED", help="Folder, GGUF file or ONNX file of the quantized model.")
]


@takes(EVALUATE, Float, quantized=Quantized)
def evaluate(request: EvaluateFolders | EvaluateFiles) -> None:
    """Compare a quantized model with the float model: outputs, size, latency, layers, perplexity.

    Example: quark evaluate ./llama ./llama-uint4 --data heldout.txt

    Example: quark evaluate model.onnx model-a8w8.onnx --data samples.npz

    Example: quark evaluate model.onnx model-a8w8.onnx --data samples.npz --report out.html
    """
    evaluate_as(request)


def evaluate_as(request: EvaluateFolders | EvaluateFiles) -> None:
    """Measure what a request says, and print what came of it."""
    data = held_out(request)
    check_held_out(request)
    check_page(request.report, request.model, request.quantized, data)
    check_log_file(request.log_file, str(request.quantized), [request.model, data, request.report])
    say_first("Comparing", request.quantized, f"with {request.model}")
    with log_to(request.log_file):
        # They import the libraries of the flow: when it runs, so that --help is instant.
        if isinstance(request, EvaluateFiles):
            from quark.commands.onnx_files.evaluate import show_files

            show_files(evaluate_files(request))
        else:
            from quark.commands.folders.evaluate import show_folders, show_pipeline

            if is_pipeline(request.model) or is_pipeline(request.quantized):
                show_pipeline(evaluate_pipeline(request), request)
            else:
                measured = evaluate_folders(request)
                show_folders(measured, request)
                check_bounds(request, measured)
