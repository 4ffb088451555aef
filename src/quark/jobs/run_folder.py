"""Run: a job of a folder. A model of transformers in, a quantized one out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs.configure_folder import configure, servers_say, with_budget
from quark.jobs.folders.best_effort import say_completed
from quark.jobs.folders.bit_budget import choose_for_budget
from quark.jobs.folders.flows import write_folder
from quark.jobs.folders.job import FolderJob
from quark.jobs.recipes.recipe import Recipe, RecipeInFolder, read_beside

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable


@dataclass(frozen=True)
class FolderResult:
    """The result for a folder.

    Attributes:
        path: What a program opens.
        before, after: Bytes of the weights.
        seconds: What it took.
        job: What was done.
        budget: What a budget chose, and the table that it chose from; None without one.
        errors: The `quant_errors` of a model in memory.
        recipe: What makes it again.
        parts: Of a pipeline: component -> what was made of it.
    """

    path: Path
    before: int
    after: int
    seconds: float
    job: FolderJob
    budget: tuple[SensitivityTable, BudgetChoice] | None
    errors: list[Any]
    recipe: Recipe
    parts: Mapping[str, FolderResult] = field(default_factory=dict)


def run_model(job: FolderJob, named: Path) -> FolderResult:
    """Quantize the folder of a model, and write the result; the recipe calls the model `named`.

    Raises QuarkError as `configure` and the flow do.
    """
    job.export.check_output(job.request.calib)  # before the model is looked at
    with read_beside(named) as of_model:  # from here on: torch takes a second to import, on one core
        return _run_beside(job if job.config is not None else configure(job), named, of_model)


def _run_beside(job: FolderJob, named: Path, of_model: Callable[[], str]) -> FolderResult:
    """Quantize and write a job that is configured, beside the thread that makes the digest of the model."""
    from quark.jobs.folders.models import folder_bytes

    request = job.request
    job.check_data()
    if request.calib is not None and job.why is None and request.save_imatrix is None:
        logger.info("Nothing here needs calibration data: %s changes no value.", request.calib)
    job.export.check(job.schemes, job.folder)
    if job.choice is not None:
        say_completed(job.choice)
    start, before, chosen = time.perf_counter(), folder_bytes(request.model), None
    if job.budget is not None:
        chosen = choose_for_budget(request, job.folder, job.budget, job.config, job.calibration)
        if job.show is not None:
            job.show(*chosen)
        job = with_budget(job, *chosen)
    if (request.exclude or request.layer) and (said := servers_say(job)) is not None:
        logger.info("Servers: %s", said)
    recipe = replace(_recipe_of(job, named), of_model=of_model)
    recipe.of_data  # noqa: B018 - raises: an error of theirs is one of the command line
    export = replace(job.export, attachments=RecipeInFolder(recipe))
    after, errors = write_folder(job, export)
    return FolderResult(export.path, before, after, time.perf_counter() - start, job, chosen, errors, recipe)


def _recipe_of(job: FolderJob, named: Path) -> Recipe:
    """The recipe, with the data that are read where none were given, and with what was chosen for this machine."""
    request, choice = replace(job.request, model=named), job.choice
    if choice is not None and choice.distills:
        found: dict[str, Any] = {
            "algorithm": choice.algorithms,
            **({"synthetic": choice.texts} if choice.texts else {}),
        }
        request = replace(request, **found, said=request.said | {*found})
    return Recipe.of(request, {"calib": DEFAULT_TEXT} if job.calibration.is_default else {})
