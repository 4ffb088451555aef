"""Run: a job of a folder. A model of transformers in, a quantized one out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.files import atomic_folder, check_apart, check_folder
from quark.base.log import logger
from quark.errors import ConfigError
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs.configure_folder import Configured, check_before_values, configure, warn_of_servers
from quark.jobs.denoisers import configure_denoiser, is_for_comfyui
from quark.jobs.folders.best_effort import say_completed
from quark.jobs.folders.bit_budget import choose_for_budget
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.export import Export
from quark.jobs.folders.flows import FolderFlow, write_folder
from quark.jobs.folders.gguf_files import fill, opened_gguf
from quark.jobs.folders.imatrix import Imatrices
from quark.jobs.folders.pipeline import copy_rest, requests_of
from quark.jobs.folders.sentence_encoders import around, is_sentence_encoder
from quark.jobs.processes import refuse_processes
from quark.jobs.recipes.recipe import RECIPE, Recipe, RecipeInFolder, read_beside
from quark.jobs.request import FolderRequest, is_adapter, is_gguf, is_pipeline
from quark.jobs.resolve import FolderJob

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable


@dataclass(frozen=True)
class FolderResult:
    """What was made of a folder.

    Attributes:
        path: What a program opens.
        before, after: Bytes of the weights.
        seconds: What it took.
        configured: How it was made.
        budget: What a budget chose, and the table that it chose from; None without one.
        errors: The `quant_errors` of a model in memory.
        recipe: What makes it again.
        parts: Of a pipeline: component -> what was made of it.
    """

    path: Path
    before: int
    after: int
    seconds: float
    configured: Configured
    budget: tuple[SensitivityTable, BudgetChoice] | None
    errors: list[Any]
    recipe: Recipe
    parts: Mapping[str, FolderResult] = field(default_factory=dict)


def run_folder(job: FolderJob) -> FolderResult:
    """Quantize a folder, and write the result. Raises QuarkError as `configure` and the flow do."""
    # The flows import torch: when they run, so that --help is instant.
    if is_for_comfyui(job):
        return _for_comfyui(job)
    if is_gguf(job.request.model):
        return _of_gguf(job)
    if is_pipeline(job.request.model):
        return _pipeline(job)
    if is_sentence_encoder(job.request.model):
        return _around_model(job)
    if not is_adapter(job.request.model):
        return _run(job, job.request.model)
    from quark.torch.flows.adapters import base_of, merged

    adapter = job.request.model
    if job.request.report is not None:
        raise ConfigError(
            f"--report compares folders, and {adapter} is an adapter, whose whole model is gone when it is quantized. "
            "Possible: no --report."
        )
    export_of(job).check_output(job.request.calib)
    configure(replace(job, request=replace(job.request, model=base_of(adapter))))  # what is asked for, before the work
    with merged(adapter, Path(job.request.output)) as folder:
        return _run(replace(job, request=replace(job.request, model=folder)), adapter)


def _of_gguf(job: FolderJob) -> FolderResult:
    """As `run_folder`, of a GGUF file: of the folder that is made of it."""
    named, output = job.request.model, Path(job.request.output)
    check_apart(output, named)
    with opened_gguf(named, job.request.dtype, output) as made:
        job = replace(job, request=replace(job.request, model=made.path))
        export_of(job).check_output(job.request.calib)
        check_before_values(job)
        fill(made)
        return _run(job, named)


def _around_model(job: FolderJob) -> FolderResult:
    """As `run_folder`, of a sentence encoder whose model has a folder of its own."""
    named, output = job.request.model, Path(job.request.output)
    with around(named, output, job.form, job.request.force) as (model, place):
        inner = replace(job.request, model=model, output=str(place))
        result = _run(replace(job, request=inner), named)
    return replace(result, path=output)


def _run(job: FolderJob, named: Path) -> FolderResult:
    """As `run_folder`, of a folder that is whole; the recipe names the model `named`."""
    export_of(job).check_output(job.request.calib)  # before the model is looked at
    with read_beside(named) as of_model:  # from here on: torch takes a second to import, on one core
        return _run_beside(job, named, of_model)


def _run_beside(job: FolderJob, named: Path, of_model: Callable[[], str]) -> FolderResult:
    """As `_run`, beside the thread that makes the digest of the model."""
    from quark.jobs.folders.models import folder_bytes

    request = job.request
    export = export_of(job)
    configured = configure(job)
    configured.check_data()
    if request.calib is not None and configured.why is None and request.save_imatrix is None:
        logger.info("Nothing here needs calibration data: %s changes no value.", request.calib)
    export.check(configured.schemes)
    if configured.choice is not None:
        say_completed(configured.choice)
    start, before, chosen = time.perf_counter(), folder_bytes(request.model), None
    config = configured.config
    if configured.budget is not None:
        chosen = choose_for_budget(request, configured.budget, config, configured.calibration)
        if job.show is not None:
            job.show(*chosen)
        config = configured.completed(*chosen)
    warn_of_servers(configured, config)
    recipe = replace(_recipe_of(replace(request, model=named), configured), of_model=of_model)
    recipe.of_data  # noqa: B018 - raises: an error of theirs is one of the command line
    export = replace(export, attachments=RecipeInFolder(recipe))
    save_imatrix = partial(Imatrices.of(request).save, calib=request.calib)
    after, errors = write_folder(FolderFlow(request, config, configured.calibration, export, save_imatrix))
    seconds = time.perf_counter() - start
    return FolderResult(export.path, before, after, seconds, configured, chosen, errors, recipe)


def _for_comfyui(job: FolderJob) -> FolderResult:
    """As `run_folder`, of a denoiser that becomes one file."""
    start, request = time.perf_counter(), job.request
    made = configure_denoiser(job)
    made.check_data()
    made.write(made.file, request.force)
    configured = Configured(job, job.choice, made.scheme, None, (), None, Calibration())
    seconds, size = time.perf_counter() - start, made.file.stat().st_size
    return FolderResult(made.file, made.source.bytes, size, seconds, configured, None, [], Recipe.of(request, {}))


def _pipeline(job: FolderJob) -> FolderResult:
    """As `run_folder`, of the components of a pipeline, one after another; the others are copied."""
    refuse_processes("A pipeline of several models")
    start, request, output = time.perf_counter(), job.request, Path(job.request.output)
    check_apart(output, request.model, whole=True)
    check_apart(output, request.calib)
    check_folder(output, request.force)
    parts = parts_of(job)
    for part in parts.values():  # all are refused before the first is made
        configured = configure(part)
        configured.check_data()
        export_of(part).check(configured.schemes)
    recipe = Recipe.of(request)
    results: dict[str, FolderResult] = {}
    with atomic_folder(output, request.force) as folder:
        copy_rest(request.model, folder, [*parts])
        for name, part in parts.items():
            logger.info("Component %s:", name)
            results[name] = run_folder(replace(part, request=replace(part.request, output=str(folder / name))))
        (folder / RECIPE).write_text(recipe.text(in_folder=True), encoding="utf-8")
    first = next(iter(results.values()))
    choice = None if job.choice is None else job.choice.of_pipeline()
    configured, sizes = (
        replace(first.configured, choice=choice),
        [(each.before, each.after) for each in results.values()],
    )
    before, after = (sum(column) for column in zip(*sizes, strict=True))
    return FolderResult(output, before, after, time.perf_counter() - start, configured, None, [], recipe, results)


def parts_of(job: FolderJob) -> dict[str, FolderJob]:
    """The job of each component of a pipeline that is quantized. Raises ConfigError as `requests_of` does."""
    return {
        name: replace(job, request=request, choice=None if request.goal is None else job.choice)
        for name, request in requests_of(job.request).items()
    }


def export_of(job: FolderJob) -> Export:
    """Where and how the result of a job is written."""
    request = job.request
    return Export(
        request.model, Path(request.output), job.form, request.weight_format, request.pack_method,
        request.max_shard_size, request.force, reader=job.reader, goal=request.goal,
    )  # fmt: skip


def _recipe_of(request: FolderRequest, configured: Configured) -> Recipe:
    """The recipe, with the data that are read where none were given, and with what was chosen for this machine."""
    choice = configured.choice
    if choice is not None and choice.distills:
        found: dict[str, Any] = {
            "algorithm": choice.algorithms,
            **({"synthetic": choice.texts} if choice.texts else {}),
        }
        request = replace(request, **found, said=request.said | {*found})
    return Recipe.of(request, {"calib": DEFAULT_TEXT} if configured.calibration.is_default else {})
