"""`quark plan`: which layer would get what, and how large the result would be, without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.base.command_line import new_table, results
from quark.base.garbage import without_collection
from quark.base.progress import log_to
from quark.commands.options.kinds import require_model
from quark.commands.options.log_file import check_log_file, say_first
from quark.commands.options.of_request import option_for, takes
from quark.commands.results.tables import choice_rows, choice_table, serve_lines
from quark.errors import UsageError
from quark.jobs import FileJob, FileRequest, FolderJob, FolderRequest, request_of, resolve
from quark.jobs.request import QUANTIZE, is_adapter, is_gguf, is_onnx, is_pipeline, options_of
from quark.jobs.words import usage

OF_THE_RESULT = (
    "output", "force", "report", "write_recipe", "save_imatrix", "weight_format", "pack_method", "max_shard_size",
    "stream",
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


def _plan_denoiser(job: FolderJob) -> None:
    from quark.jobs.denoisers import configure_denoiser

    made, console = configure_denoiser(job), results()
    table = new_table("layers", "get", "values")
    for what, layers, values in made.rows():
        table.add_row(layers, what, f"{values / 1e6:.2f} M")
    console.print(table)
    rest = len(made.source.tensors) - len(made.plan)
    console.print(f"{made.source.kind.name}: {rest} other tensors stay in float", highlight=False)
    if made.lacks is not None:
        console.print("data: needed, and not given (--calib)", highlight=False)


def _with_shapes(model: Path) -> Path:
    """The folder whose config says the shapes: that of the base of an adapter, that of the model of an encoder."""
    from quark.jobs.folders.sentence_encoders import is_sentence_encoder, model_of
    from quark.torch.flows.adapters import base_of

    if is_sentence_encoder(model):
        return model_of(model)
    return base_of(model) if is_adapter(model) else model


def _plan_folder(job: FolderJob) -> None:
    # These import torch: after the arguments are parsed, so that --help is instant.
    from quark.jobs.denoisers import is_for_comfyui
    from quark.jobs.run_folder import parts_of

    if is_for_comfyui(job):
        _plan_denoiser(job)
    elif is_pipeline(job.request.model):
        for name, part in parts_of(job).items():
            results().print(f"{name}:", highlight=False)
            _plan_folder(part)
    elif is_gguf(job.request.model):
        _plan_gguf(job)
    else:
        # Soon at its end, and with nothing large in memory but what a budget measures.
        if _reads_weights(job):
            _plan_model(job)
        else:
            with without_collection():
                _plan_model(job)


def _plan_gguf(job: FolderJob) -> None:
    """As `_plan_folder`, of the folder that is made of a GGUF file; with values where layers are measured."""
    from quark.jobs.configure_folder import check_before_values
    from quark.jobs.folders.gguf_files import fill, opened_gguf

    with opened_gguf(job.request.model, job.request.dtype) as made:
        job = replace(job, request=replace(job.request, model=made.path))
        if _reads_weights(job):
            check_before_values(job)
            fill(made)
        _plan_folder(job)


def _reads_weights(job: FolderJob) -> bool:
    """Whether a plan measures layers: those of a budget."""
    return job.request.bits is not None or job.request.size is not None


def _plan_model(job: FolderJob) -> None:
    from quark.jobs.configure_folder import configure, plan_of, servers_say
    from quark.jobs.folders.bit_budget import choose_for_budget
    from quark.jobs.folders.models import check_loading, inputs_of, load_meta_model
    from quark.jobs.run_folder import export_of
    from quark.torch.checkpoint.sources.carried import carried_beside
    from quark.torch.checkpoint.stored_types import source_folder
    from quark.torch.flows.check_plan import check_data, check_plan
    from quark.torch.flows.predicted_size import carried_said

    job = replace(job, request=replace(job.request, model=_with_shapes(job.request.model)))
    request, console = job.request, results()
    check_loading(request.load)
    configured = configure(job, aloud=True)
    export_of(job).check(configured.schemes)
    config, calibration = configured.config, configured.calibration
    if configured.choice is not None:
        console.print(choice_rows(configured.choice))
    if configured.budget is not None:
        configured.check_data()
        found = choose_for_budget(request, configured.budget, config, calibration)
        config = configured.completed(*found)
        console.print(choice_table(*found))
    plan = configured.plan if config is configured.config else None
    if plan is None:
        plan = plan_of(load_meta_model(request.model), config, job.form)
    meta, made, before, after = plan.meta, plan.layers, plan.before, plan.after
    beside = carried_beside(meta, source_folder(meta))
    layers = made.table(meta, beside)
    undecoded = check_plan(meta, config, made, job.form, job.reader)
    split = servers_say(configured, plan)
    inputs = inputs_of(request.model, meta)
    lacks = configured.lacks is not None or (calibration.is_default and not inputs.reads_text)
    data = None if lacks or configured.budget is not None else calibration.samples_of(inputs)
    check_data(meta, made, data)
    console.print(layers)
    console.print(f"size: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})", highlight=False)
    if (said := carried_said(meta, made, job.form)) is not None:
        console.print(said, highlight=False, soft_wrap=True)
    if undecoded is not None:
        console.print(f"readers: {undecoded}", highlight=False, soft_wrap=True)
    if split is not None:
        console.print(f"servers: {split}", highlight=False, soft_wrap=True)
    if lacks:
        console.print("data: needed, and not given (--calib)", highlight=False)
    elif data is not None:
        console.print(f"data: {calibration.described(data, inputs.taken)}", highlight=False, soft_wrap=True)
    if configured.choice is not None:
        out = {"gguf": "OUT.gguf", "onnx": "OUT/quark_model.onnx"}.get(job.form, "OUT")
        console.print(serve_lines(configured.choice, out, request.model), highlight=False, soft_wrap=True)
