"""`quark convert`: a quantized folder or GGUF file in another format, or a GGUF file as a folder of float values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.base.command_line import results
from quark.base.progress import log_to
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import takes
from quark.goals.upload import say_upload
from quark.jobs.convert import CONVERT, ConvertRequest, require_quantized_model, resolve_conversion, run_conversion


@takes(CONVERT, Annotated[Path, typer.Argument(help="A quantized folder, a GGUF file, or a safetensors file in FP8.")])
def convert(request: ConvertRequest) -> None:
    """Write a quantized model in another format, with exactly the same values. The float model is not needed.

    If a format cannot store the same values, this is an error, unless --requantize names a scheme.

    A GGUF file becomes a model folder of float values, unless --format says otherwise.

    Values of its blocks are rounded to the type of the folder; --dtype float32 keeps all of them.

    Example: quark convert ./llama-uint4 --format compressed-tensors -o ./llama-ct

    Example: quark convert ./llama-uint4 --format gguf --requantize q4_k_m -o llama.gguf

    A safetensors file with weights in FP8 becomes one of float values: codes, times the scale of the tensor if any.

    Example: quark convert llama.gguf -o ./llama-float

    Example: quark convert flux-fp8.safetensors -o flux.safetensors
    """
    model = request.model
    require_quantized_model(model)
    say_first("Converting", model, request.requantize, output=request.output)
    job = resolve_conversion(request)
    check_log_file(request.log_file, str(request.output), [model])
    with log_to(request.log_file):
        made = run_conversion(job)
        say_upload(made.path)
    how = f"values rounded again to {request.requantize}" if request.requantize else "values unchanged"
    how = f"values rounded to {made.rounded}" if made.rounded else how
    line = f"{model} -> {request.output} ({job.request.format}): {made.size / 1e6:.2f} MB, {how}"
    results().print(line, highlight=False, soft_wrap=True)
