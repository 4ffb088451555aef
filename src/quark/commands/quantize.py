"""`quark quantize`: a model folder or an ONNX file in, a quantized one out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quark.base.command_line import results
from quark.base.progress import log_to
from quark.commands.options.kinds import require_model
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import takes
from quark.commands.results.quantized import check_report, say_how_to_evaluate, size_line
from quark.commands.results.tables import recovery_line, recovery_table, serve_lines, show_choice
from quark.goals.choice import GoalChoice
from quark.goals.upload import say_upload
from quark.jobs import FileJob, FileRequest, FolderJob, FolderRequest, resolve
from quark.jobs.processes import together
from quark.jobs.recipes.recipe import Recipe, check_recipe, save_recipe
from quark.jobs.request import QUANTIZE
from quark.jobs.words import ONNX, usage

Model = Annotated[
    Path,
    typer.Argument(
        help="Folder of a Hugging Face model, a GGUF file, or an ONNX file; with --for comfyui also a safetensors file."
    ),
]


@takes(QUANTIZE, Model)
def quantize(request: FolderRequest | FileRequest) -> None:
    """Quantize a model folder for vLLM, transformers or llama.cpp, or an ONNX file for ONNX Runtime, OpenVINO or NPUs.

    Example: quark quantize ./llama --for vllm -o ./llama-vllm

    Example: quark quantize ./llama --scheme uint4_wo_128 -o ./llama-uint4

    Example: quark quantize ./llama --bits 4.25 --calib heldout.txt -o ./llama-4.25

    Example: quark quantize ./llama --scheme q4_k_m --export-format gguf --calib heldout.txt -o llama-q4_k_m.gguf

    Example: quark quantize ./flux/transformer --for comfyui -o flux-fp8.safetensors

    Example: quark quantize model.onnx --for onnxruntime --calib samples.npz -o fast.onnx

    Example: quark quantize model.onnx --config A8W8 --calib samples.npz -o model-a8w8.onnx

    Example: quark quantize model.onnx --config A8W8 --calib samples.npz --recover --reach 30 -o best.onnx
    """
    quantize_as(request)


def quantize_as(request: FolderRequest | FileRequest) -> None:
    """Do what a request says, and print what came of it."""
    require_model(request.model)
    named = vars(request)
    read = [request.model, request.calib, request.report]
    read += [named.get(name) for name in ("imatrix", "sensitivity", "statistics", "profile", "save_imatrix")]
    check_log_file(request.log_file, request.output, read)
    amount = request.bits if request.bits is None else f"{request.bits:g} bits"
    words = [request.scheme, named.get("config"), amount, named.get("size")]
    goal = f"for {request.goal}" if request.goal else None
    first = next(filter(None, words), None)
    say_first("Quantizing", request.model, first, goal, *(request.algorithm or ()), output=request.output)
    with usage():
        job = resolve(request)
    check_report(request, job.form)
    check_recipe(request)
    files = {name: named.get(name) for name in ("report", "log_file", "write_recipe", "save_imatrix")}
    group = together(
        isinstance(job, FileJob), job.form, named.get("device", "cpu"), named.get("process_timeout"), **files
    )
    with log_to(request.log_file), group:
        # Each flow imports its libraries: after the arguments are parsed, so that --help is instant.
        choice, made = _file(job) if isinstance(job, FileJob) else _folder(job)
        say_upload(made)
        if choice is not None:
            results().print(serve_lines(choice, made, made), highlight=False, soft_wrap=True)


def _folder(job: FolderJob) -> tuple[GoalChoice | None, Path]:
    """Quantize a folder; return what its goal chose, and what a program opens."""
    from quark.commands.folders.quantized_page import page_of_folder
    from quark.jobs.kinds import kind_of

    request, console, kind = job.request, results(), kind_of(job)
    result = kind.run(replace(job, show=show_choice))
    for name, part in result.parts.items():
        console.print(f"{name}: {size_line(part.job.title, part.before, part.after, part.seconds)}", highlight=False)
    title = "all" if result.parts else result.job.title
    console.print(size_line(title, result.before, result.after, result.seconds), highlight=False)
    # There is no ONNX file to compare one with, ComfyUI alone runs its files, and an adapter is no model.
    if job.form != ONNX and kind.is_evaluated:
        say_how_to_evaluate(request.model, result.path, request.calib)
    page_of_folder(request, result)
    save_recipe(request.write_recipe, result.recipe)
    result.check_kept()
    return result.job.choice, result.path


def _file(job: FileJob) -> tuple[GoalChoice | None, Path]:
    """Quantize an ONNX file; return what its goal chose, and the file that was made."""
    from quark.commands.onnx_files.quantized_page import page_of_file
    from quark.jobs.run_file import run_file

    request, console = job.request, results()
    result = run_file(job)
    if result.recovery is not None:
        console.print(recovery_table(result.recovery))
        console.print(recovery_line(result.recovery), highlight=False)
    console.print(size_line(result.name, result.before, result.after, result.seconds, result.written), highlight=False)
    say_how_to_evaluate(request.model, result.path, getattr(result.reader, "path", None))
    page_of_file(request, result)
    save_recipe(request.write_recipe, Recipe.of(result.request))
    return job.choice, result.path
