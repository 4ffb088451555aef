"""Configure: what a job of a folder does to each layer, and what data it needs.

`quark plan` shows it, and `quark quantize` runs it: the plan is made here, once. Reads config.json and the shapes of
the weights; a budget is chosen later, of a table or of measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quark.base.log import logger, severity
from quark.errors import ConfigError, NotSupportedError, QuarkError, ShapeError
from quark.goals import GoalChoice
from quark.goals.choice import fusing_programs
from quark.goals.goal import GOALS
from quark.jobs.choose import choice_for_kind, fitted_choice
from quark.jobs.folders.best_effort import calibrated_choice, completed_choice
from quark.jobs.folders.bit_budget import Budget, asked_budget
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.gguf_files import dtype_named
from quark.jobs.folders.imatrix import Imatrices
from quark.jobs.folders.job import FolderJob
from quark.jobs.folders.schemes import in_file, is_mix, mix_config, scheme_config
from quark.jobs.request import FolderRequest
from quark.jobs.words import GGUF, algorithms_in, torch_algorithms

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable
    from quark.torch.checkpoint.opened import OpenedFolder

DEFAULT_ALGORITHM = "qronos"
"""The algorithm of a mix of block types, and of a budget, where data are read and nothing says how to round."""


def configure(job: FolderJob) -> FolderJob:
    """The job with what is done for it.

    Raises:
        QuarkError: What is asked for does not go together, or does not fit the model.
    """
    network = _check_library(job)
    if job.choice is not None:
        if not network:
            known = calibrated_choice(choice_for_kind(job.choice, job.folder), job.request, job.folder)
            job = replace(job, choice=known, form=known.form)
        logger.info("%s", job.choice)
    try:
        job = _laid_out(job)
    except ShapeError:
        fitted = None if job.choice is None else fitted_choice(job.choice, job.request, job.folder)
        if fitted is job.choice:
            raise
        job = _laid_out(replace(job, choice=fitted))
    why, choice, calibration = _reason_for_data(job), job.choice, Calibration.of(job.request)
    if choice is not None and choice.texts:
        calibration = replace(calibration, synthetic=choice.texts, asked=job.request.synthetic is not None)
    if why is not None and not network:  # of what a network of diffusers takes, the package has none
        calibration = calibration.or_default(why)
    return replace(job, calibration=calibration, why=why)


def _laid_out(job: FolderJob) -> FolderJob:
    """The job with scheme or budget, algorithms and config, and with its plan; without data."""
    request, form, choice = job.request, job.form, job.choice
    if choice is not None:
        choice = completed_choice(choice, request, job.folder)
    budget = asked_budget(request, form, choice) if choice is None or choice.mixed is not None else None
    scheme = choice.scheme if choice is not None else request.scheme
    if budget is not None:
        scheme = None
        _refuse_beside_budget(request, budget)
    mixed = in_file(scheme, budget, form)
    asked = choice.algorithms if choice is not None else request.algorithm
    Imatrices.of(request).check(mixed, request.calib, asked)
    algorithms = torch_algorithms(_usual_algorithms(request, budget, mixed) if asked is None else asked)
    config = _calibrated(request, _config(job, scheme, budget, algorithms or None))
    if choice is not None:
        from quark.jobs.folders.models import skeleton_of

        config = for_goal(lambda: skeleton_of(job.folder), config, choice, job.folder)
    job = replace(job, choice=choice, scheme=scheme, budget=budget, algorithms=algorithms, config=config)
    if budget is None:
        return planned(job)
    if choice is not None:
        with severity(3):  # what is chosen is said when it is
            planned(job)
    return job


def _usual_algorithms(request: FolderRequest, budget: Budget | None, mixed: bool) -> tuple[str, ...]:
    """The algorithms where nothing says how to round: one for a mix or a budget, if it reads data anyway."""
    measured = budget is not None and budget.is_measured
    if request.imatrix is None and (measured or ((mixed or budget is not None) and request.calib is not None)):
        return (DEFAULT_ALGORITHM,)
    if budget is not None and not measured:
        logger.info("To nearest, as a stored table needs no data. Possible: --algorithm %s.", DEFAULT_ALGORITHM)
    return ()


def planned(job: FolderJob) -> FolderJob:
    """The job with what its config gives each layer.

    Raises QuarkError where it does not fit the model, or the program of its goal would not load the result.
    """
    from quark.jobs.folders.models import skeleton_of
    from quark.torch.flows.check_plan import check_goal
    from quark.torch.flows.predicted_size import plan_of

    if not job.folder.is_read:
        return job
    skeleton_of(job.folder)
    plan = plan_of(job.folder, job.config, job.form, dtype_named(job.request.dtype))
    if job.choice is not None and _layers_decide(job.choice):
        check_goal(plan.meta, plan.layers, job.choice.goal, job.form)
    return replace(job, plan=plan)


def with_budget(job: FolderJob, table: SensitivityTable, choice: BudgetChoice) -> FolderJob:
    """The job with what its budget chose, with the algorithms of its config."""
    if job.form == GGUF:
        config = mix_config(job.request, job.folder, choice.schemes, job.config.algo_config)
        return planned(replace(job, config=_calibrated(job.request, config)))
    return planned(replace(job, config=table.config(choice, job.config)))


def check_before_values(job: FolderJob) -> None:
    """Raise QuarkError for what cannot be done with a folder whose tensors have no values yet. Nothing is logged."""
    with severity(3):  # what is said of it is said when it is done
        configure(job).check_data()


def _check_library(job: FolderJob) -> bool:
    """Return True where the folder is that of a network of diffusers.

    Raises ConfigError where it is of another library than the goal's, or the format's.
    """
    folder, goal = job.request.model, None if job.choice is None else job.choice.goal
    network = job.folder.is_network
    if job.request.component:
        raise ConfigError(
            f"--component {job.request.component[0]}: {folder} is one model, and no pipeline (model_index.json)."
        )
    if goal is not None and goal.networks != network:
        others = [name for name, row in GOALS.items() if row.folder is not None and row.networks == network]
        raise ConfigError(
            f"{folder} is a {'network of diffusers' if network else 'model of transformers'}, which {goal.program} "
            f"does not load by itself. Possible: --for {', '.join(others)}."
        )
    if network and job.form != "quark":
        raise ConfigError(
            f"--export-format {job.form}: {folder} is a network of diffusers, which loads the quark format. Possible: "
            "--export-format quark."
        )
    return network


def servers_say(job: FolderJob) -> str | None:
    """Return the words about a plan that gives parts of one layer of a server different schemes; else None.

    Of a job with a goal, or of a file that no server fuses layers of, nothing is said.
    """
    from quark.torch.flows.check_plan import split_said
    from quark.torch.formats import FORMATS

    if job.choice is not None or job.plan is None or job.form not in FORMATS:
        return None
    saying: dict[str, list[str]] = {}
    for program in fusing_programs(job.form, job.schemes):
        if (said := split_said(job.plan.meta, job.plan.layers, program)) is not None:
            saying.setdefault(said, []).append(program)
    each = (
        f"{'each of ' if len(programs) > 1 else ''}{', '.join(programs)} {said}" for said, programs in saying.items()
    )
    return " ".join(each) or None


def _config(job: FolderJob, scheme: str | None, budget: Budget | None, algorithms: list[Any] | None) -> Any:
    request, folder = job.request, job.folder
    if scheme is None:
        from quark.torch.bit_budget.measure import FITS_ALL  # with all that measures

        # What it says of all layers is replaced.
        config = scheme_config(request, folder, FITS_ALL, algorithms)
        if job.form != GGUF:
            return _of_linear_layers(folder, config)
        # GGUF files hold the head in a block type too, which templates leave in float.
        return replace(config, exclude=list(request.exclude or ()))
    if is_mix(scheme, job.form):
        if request.kv_cache or request.attention:
            raise ConfigError(f"--kv-cache and --attention do not apply to --scheme {scheme}: GGUF files hold weights.")
        return mix_config(request, folder, scheme, algorithms)
    return scheme_config(request, folder, scheme, algorithms, inside_attention=True)


def _of_linear_layers(folder: OpenedFolder, config: Any) -> Any:
    """The config of a budget, which chooses for linear layers alone: convolutions that nothing names are excluded."""
    from quark.jobs.folders.models import skeleton_of
    from quark.torch.bit_budget.rules import convolutions

    names = convolutions(skeleton_of(folder), config)
    if not names:
        return config
    logger.info(
        "%d convolutions stay in float, as a budget is of linear layers: %s%s. Possible: --layer PATTERN=int8_wo.",
        len(names), ", ".join(names[:2]), " ..." if names[2:] else "",
    )  # fmt: skip
    return replace(config, exclude=[*config.exclude, *names])


def _layers_decide(choice: GoalChoice) -> bool:
    """Return True where single layers decide if the program of a goal loads the result."""
    return choice.goal.fuses or choice.goal.heads is not None


def for_goal(model: Callable[[], Any], config: Any, choice: GoalChoice, folder: OpenedFolder | None = None) -> Any:
    """The config, without layers that the program of a goal builds in float.

    Args:
        model: Gives the model, with or without weights.
        config: A `quark.torch.QConfig`.
        choice: What its goal chose.
        folder: Of the model; None: it has none.

    Raises:
        NotSupportedError: An entry for some layers is about such layers alone.
    """
    from quark.torch.flows.float_layers import left_in_float

    return left_in_float(model(), config, choice.goal, folder) if _layers_decide(choice) else config


def check_module(meta: Any, config: Any, choice: GoalChoice) -> None:
    """Raise NotSupportedError where the program of a goal would not load what a config makes of a module.

    Args:
        meta: The module without weights; it is changed.
        config, choice: As for `for_goal`.
    """
    from quark.torch.flows.check_plan import check_goal
    from quark.torch.flows.predicted_size import plan_layers

    if _layers_decide(choice):
        layers = None
        with severity(3), suppress(QuarkError):  # which the work itself meets, and says
            layers = plan_layers(meta, config)
        if layers is not None:
            check_goal(meta, layers, choice.goal, choice.form)


def _calibrated(request: FolderRequest, config: Any) -> Any:
    """The config with what is asked for how statistics are taken."""
    return replace(config, calibrate_all_experts=request.calibrate_all_experts)


def _refuse_beside_budget(request: FolderRequest, budget: Budget) -> None:
    """Raise for options under which a budget cannot be kept, or layers not be measured."""
    if request.kv_cache or request.attention:
        raise NotSupportedError(
            f"{budget.named()} chooses the schemes of weights, and excludes --kv-cache and --attention. Possible: "
            "--scheme and --layer."
        )
    if request.trust_remote_code or request.keep_unexpected:
        given = "--trust-remote-code" if request.trust_remote_code else "--keep-unexpected"
        raise ConfigError(
            f"{given} with {budget.named()}: block by block, a class of transformers is needed that holds all."
        )


def _reason_for_data(job: FolderJob) -> str | None:
    """Return the part of a job that needs calibration data: a scheme with static activations, an algorithm, or a
    budget that is measured; None where nothing does.
    """
    from quark.core.schemes import scheme_of
    from quark.gguf import MIXES

    request, budget = job.request, job.budget
    names = (*filter(None, [job.scheme]), *(item.rpartition("=")[2] for item in request.layer or ()))
    static = [name for name in names if name not in MIXES and scheme_of(name).needs_data]
    if static:
        return f"the scheme {static[0]!r}, which has static activation scales,"
    for option, kind in (("--kv-cache", request.kv_cache), ("--attention", request.attention)):
        if kind:
            return f"{option} {kind}, whose scales are static,"
    reading = [each.config.name for each in algorithms_in(job.config) if each.reads_inputs or each.learns]
    if reading:
        return f"the algorithm {reading[0]!r}"
    return budget.named() if budget is not None and budget.is_measured else None
