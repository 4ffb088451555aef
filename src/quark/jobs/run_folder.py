"""Run: a job of a folder. A model of transformers in, a quantized one out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.files import move_file, move_folder
from quark.base.log import logger
from quark.errors import FormatError
from quark.goals.efforts import DEFAULT_TEXT, FAST
from quark.jobs.configure_folder import configure, servers_say, with_budget
from quark.jobs.folders.best_effort import say_completed
from quark.jobs.folders.bit_budget import choose_for_budget
from quark.jobs.folders.card import figures_from
from quark.jobs.folders.compared.job_verdict import require_verdict, verdict_of
from quark.jobs.folders.compared.next_steps import next_steps
from quark.jobs.folders.compared.verdict import Gates, ModelVerdict
from quark.jobs.folders.flows import write_folder
from quark.jobs.folders.job import FolderJob
from quark.jobs.recipes.recipe import Recipe, RecipeInFolder, read_beside
from quark.jobs.request import LENGTH

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
        verdict: What it cost the model; None where that was not measured, and of a whole pipeline.
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
    verdict: ModelVerdict | None = None

    def check_kept(self) -> None:
        """Raise DamageError where it is outside of the bounds of the request, and was kept by --keep-anyway."""
        for result in (self, *self.parts.values()):
            if result.verdict is not None:
                Gates.of(result.job.request).check(result.verdict, f"{self.path} was kept, as --keep-anyway asks.")


def run_model(job: FolderJob, named: Path) -> FolderResult:
    """Quantize the folder of a model, and write the result; the recipe calls the model `named`.

    Raises QuarkError as `configure` and the flow do.
    """
    job.export.check_output(job.request.calib)  # before the model is looked at
    with read_beside(named) as of_model:  # from here on: torch takes a second to import, on one core
        job = job if job.config is not None else configure(job)
        job.check_data()
        require_verdict(job)
        with _place_until_verdict(job) as inside:
            result = _run_beside(inside, named, of_model)
            result = replace(result, verdict=_with_verdict(inside, result))
        return replace(result, path=job.export.path)


@contextmanager
def _place_until_verdict(job: FolderJob) -> Iterator[FolderJob]:
    """Yield the job with another output, which becomes its own when the body ends, where there are bounds on a verdict.

    A killed run goes on there with the same command. With an error nothing is left but blocks that are finished.
    """
    request, output = job.request, Path(job.request.output)
    if not Gates.of(request) or request.keep_anyway:
        yield job
        return
    place = output.absolute().with_name(f"{output.name}.unchecked")
    inside = replace(job, request=replace(request, output=str(place / output.name), force=True))
    try:
        yield inside
    except Exception:
        if not any(place.glob("*.partial")):
            shutil.rmtree(place, ignore_errors=True)
        raise
    made = place / output.name
    (move_file if made.is_file() else move_folder)(made, output)
    shutil.rmtree(place, ignore_errors=True)
    logger.info("It is within the bounds, and was moved to %s.", output)


def _with_verdict(job: FolderJob, result: FolderResult) -> ModelVerdict | None:
    """The verdict on what was made, which is logged, and is in its model card; None where there is none.

    Raises DamageError where it is outside of the bounds of the request.
    """
    verdict = verdict_of(job, job.export, result.seconds)
    if verdict is None:
        return None
    logger.info("Verdict: %s", verdict)
    if result.budget is not None and verdict.kl is not None:
        chosen = result.budget[1]
        predicted = chosen.solved if job.algorithms else chosen.loss
        logger.info("The budget predicted %.3g nats; %.3g were measured.", predicted, verdict.kl)
    if not verdict.is_good:
        for step in next_steps(job):
            logger.info("To lose less: %s", step)
    if verdict.held_out and verdict.comparison is not None and verdict.path is not None and result.path.is_dir():
        from quark.torch.writers.model_card import add_figures  # imports torch

        with suppress(FormatError):  # a card that travels whole, as its front matter cannot be read
            add_figures(result.path, figures_from(verdict.comparison, verdict.samples, verdict.path, LENGTH))
    if not job.request.keep_anyway:
        Gates.of(job.request).check(verdict)
    return verdict


def _run_beside(job: FolderJob, named: Path, of_model: Callable[[], str]) -> FolderResult:
    """Quantize and write a job that is configured, beside the thread that makes the digest of the model."""
    from quark.jobs.folders.models import folder_bytes

    request = job.request
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
        if job.plan is not None:
            weights = sum(each.numel() for each in job.plan.meta.parameters())
            logger.info("%.3g bits for each weight of the whole model.", 8 * job.plan.after / weights)
    if (request.exclude or request.layer) and (said := servers_say(job)) is not None:
        logger.info("Servers: %s", said)
    recipe = replace(_recipe_of(job, named), of_model=of_model)
    recipe.of_data  # noqa: B018 - raises: an error of theirs is one of the command line
    export = replace(job.export, attachments=RecipeInFolder(recipe))
    after, errors = write_folder(job, export)
    return FolderResult(export.path, before, after, time.perf_counter() - start, job, chosen, errors, recipe)


def _recipe_of(job: FolderJob, named: Path) -> Recipe:
    """The recipe, with the data that are read where none were given, and with what was chosen for this machine."""
    request, choice, found = replace(job.request, model=named), job.choice, dict[str, Any]()
    if choice is not None and choice.decided_here:
        found["effort"] = choice.effort
        if choice.effort == FAST and choice.algorithms:
            found["algorithm"] = choice.algorithms
    if choice is not None and choice.distills:
        found |= {"algorithm": choice.algorithms, **({"synthetic": choice.texts} if choice.texts else {})}
    if job.budget is not None and choice is None and request.algorithm is None and job.algorithms:
        found["algorithm"] = tuple(job.algorithms)  # with the table, which is there by then, it would be none
    if found:
        request = replace(request, **found, said=request.said | {*found})
    return Recipe.of(request, {"calib": DEFAULT_TEXT} if job.calibration.is_default else {})
