"""`quark plan`: which layer would get what, and how large the result would be, without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.base.command_line import new_table, results
from quark.base.garbage import without_collection
from quark.base.progress import log_to
from quark.commands.options.kinds import require_model
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import option_for, takes
from quark.commands.results.tables import choice_rows, serve_lines, show_choice
from quark.errors import UsageError
from quark.jobs import FileJob, FileRequest, FolderJob, FolderRequest, request_of, resolve
from quark.jobs.denoisers import DenoiserJob
from quark.jobs.request import QUANTIZE, is_onnx, options_of
from quark.jobs.words import usage

OF_THE_RESULT = (
    "output", "force", "report", "write_recipe", "save_imatrix", "weight_format", "pack_method", "max_shard_size",
    "stream", "process_timeout",
)  # fmt: skip
"""The options of a request that say what is written beside the layers, and how: of a plan there is nothing to write."""
OF_FOLDERS_ALONE = ("algorithm", "samples")
"""Options of either kind of model that the plan of an ONNX file has nothing to show of."""
OF_FILES = "--config, --for, --effort, --bits, --calib, --exclude"
MODEL_HELP = "Folder of a Hugging Face model (config.json is enough), a GGUF file, or an ONNX file."
SCHEME_HELP = "A scheme or a configuration; `quark schemes` lists them."


def _asked(model: Path, said: Mapping[str, Any]) -> FolderRequest | FileRequest:
    """The request, before the libraries load: a wrong word is answered at once."""
    if not is_onnx(model):
        return request_of(model, said)
    if unused := {*OF_FOLDERS_ALONE} & {*said}:
        raise UsageError(f"--{min(unused)} does not apply to the plan of an ONNX file. Possible: {OF_FILES}.")
    if "goal" in said:
        return request_of(model, said)
    if {"bits", "size", "candidates", "sensitivity"} & {*said}:
        raise UsageError(
            "The bits of an ONNX file are chosen by a configuration. Possible: --config NAME, or --for GOAL --bits N."
        )
    return request_of(model, {"config" if name == "scheme" else name: value for name, value in said.items()})


@takes(
    QUANTIZE,
    Annotated[Path, typer.Argument(help=MODEL_HELP)],
    [name for name in options_of(FolderRequest) if name not in OF_THE_RESULT],
    _asked,
    scheme=Annotated[str | None, option_for("scheme", "--scheme", "--config", help=SCHEME_HELP, rich_help_panel=None)],
)
def plan(request: FolderRequest | FileRequest) -> None:
    """Show how each layer of a model would be quantized, and how large the result would be.

    It has the options of `quark quantize`, except for those of the output.

    With --bits or --size it reads the weights, and needs calibration data or a file of sensitivities.

    Example: quark plan ./llama --scheme mxfp4

    Example: quark plan ./llama --for llama.cpp --bits 8

    Example: quark plan model.onnx --config A8W8

    Example: quark plan ./llama --bits 4.25 --calib heldout.txt --sensitivity llama.json
    """
    named = vars(request)
    require_model(request.model)
    check_log_file(request.log_file, str(request.model), [request.calib, named.get("sensitivity")])
    with usage():
        job = resolve(request)
    amount = f"{request.bits:g} bits" if request.bits is not None else named.get("size")
    goal = f"for {request.goal}" if request.goal else None
    say_first("Planning", request.model, request.scheme or named.get("config") or amount, goal)
    with log_to(request.log_file):
        _plan_file(job) if isinstance(job, FileJob) else _plan_folder(job)


def _plan_file(job: FileJob) -> None:
    from quark.commands.onnx_files.plan import plan_file

    request, console = job.request, results()
    if job.choice is not None:
        console.print(choice_rows(job.choice))
    plan_file(request, job.config)
    if job.choice is not None:
        console.print(serve_lines(job.choice, "OUT.onnx", request.model), highlight=False, soft_wrap=True)


def _plan_folder(job: FolderJob) -> None:
    # These import torch: after the arguments are parsed, so that --help is instant.
    from quark.jobs.denoisers import DenoiserJob
    from quark.jobs.kinds import kind_of

    # Soon at its end, and with nothing large in memory but what a budget measures.
    measured = job.request.bits is not None or job.request.size is not None
    with nullcontext() if measured else without_collection(), kind_of(job).configured(job) as parts:
        for name, part in parts.items():
            if name:
                results().print(f"{name}:", highlight=False)
            _show_denoiser(part) if isinstance(part, DenoiserJob) else _show_model(part)


def _show_denoiser(job: DenoiserJob) -> None:
    table, console = new_table("layers", "get", "values"), results()
    for what, layers, values in job.rows():
        table.add_row(layers, what, f"{values / 1e6:.2f} M")
    console.print(table)
    rest = len(job.source.tensors) - len(job.plan)
    console.print(f"{job.source.kind.name}: {rest} other tensors stay in float", highlight=False)
    if job.lacks is not None:
        console.print("data: needed, and not given (--calib)", highlight=False)


def _show_model(job: FolderJob) -> None:
    from quark.jobs.configure_folder import servers_say, with_budget
    from quark.jobs.folders.bit_budget import choose_for_budget
    from quark.jobs.folders.models import check_loading, inputs_of, skeleton_of
    from quark.torch.checkpoint.carried import carried_beside
    from quark.torch.flows.check_plan import check_data, check_plan
    from quark.torch.flows.predicted_size import carried_said

    request, console = job.request, results()
    check_loading(request.load)
    skeleton_of(job.folder)  # of which there is a plan
    job.export.check(job.schemes, job.folder)
    if job.choice is not None:
        console.print(choice_rows(job.choice))
    if job.budget is not None:
        job.check_data()
        found = choose_for_budget(request, job.folder, job.budget, job.config, job.calibration)
        job = with_budget(job, *found)
        show_choice(*found)
    assert job.plan is not None
    plan, calibration, config = job.plan, job.calibration, job.config
    meta, made, before, after = plan.meta, plan.layers, plan.before, plan.after
    layers = made.table(meta, carried_beside(meta, job.folder))
    undecoded = check_plan(meta, config, made, job.form, job.reader, job.folder)
    split = servers_say(job)
    inputs = inputs_of(request.model, meta)
    lacks = job.lacks is not None or (calibration.is_default and not inputs.reads_text)
    data = None if lacks or job.budget is not None else calibration.samples_of(inputs)
    check_data(meta, made, data)
    console.print(layers)
    console.print(f"size: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})", highlight=False)
    if (said := carried_said(plan)) is not None:
        console.print(said, highlight=False, soft_wrap=True)
    if undecoded is not None:
        console.print(f"readers: {undecoded}", highlight=False, soft_wrap=True)
    if split is not None:
        console.print(f"servers: {split}", highlight=False, soft_wrap=True)
    if lacks:
        console.print("data: needed, and not given (--calib)", highlight=False)
    elif data is not None:
        console.print(f"data: {calibration.described(data, inputs.taken)}", highlight=False, soft_wrap=True)
    if job.choice is not None:
        out = {"gguf": "OUT.gguf", "onnx": "OUT/quark_model.onnx"}.get(job.form, "OUT")
        console.print(serve_lines(job.choice, out, request.model), highlight=False, soft_wrap=True)
