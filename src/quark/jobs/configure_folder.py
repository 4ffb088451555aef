"""Configure: the config of a job of a folder, and what data it needs.

`quark plan` shows it, and `quark quantize` runs it. Reads config.json and the shapes of the weights; a budget is chosen
later, of a table or of measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from quark.base.log import logger, severity
from quark.errors import CalibrationError, ConfigError, NotSupportedError, QuarkError
from quark.goals import GoalChoice
from quark.goals.choice import fusing_programs
from quark.goals.goal import GOALS
from quark.jobs.choose import fitted_choice
from quark.jobs.folders.best_effort import completed_choice
from quark.jobs.folders.bit_budget import Budget, asked_budget
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.imatrix import Imatrices
from quark.jobs.folders.schemes import is_mix, mix_config, scheme_config
from quark.jobs.request import FolderRequest
from quark.jobs.resolve import FolderJob
from quark.jobs.words import GGUF, torch_algorithms

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable

RECORDED = "calls of the network that quark.torch.record_steps recorded, or arrays by name (.npz)"
"""What a network of diffusers is calibrated with."""
MIX_ALGORITHM = "qronos"
"""What rounds a mix of block types where there is calibration data, and neither a goal nor --algorithm."""


@dataclass(frozen=True)
class FolderPlan:
    """What the layers of a folder get, from its config alone.

    Attributes:
        meta: The model without weights, as `planned` leaves it.
        layers: A `quark.torch.plan.Plan`.
        before, after: Bytes of all tensors, in float and quantized.
    """

    meta: Any
    layers: Any
    before: int
    after: int


def plan_of(meta: Any, config: Any, form: str) -> FolderPlan:
    """The plan of a config for a model without weights, which is prepared for it."""
    from quark.torch.flows.predicted_size import float_bytes, planned

    before = float_bytes(meta)
    layers, after = planned(meta, config, form)
    return FolderPlan(meta, layers, before, after)


def check_before_values(job: FolderJob) -> None:
    """Raise QuarkError for what cannot be done with a folder whose tensors have no values yet. Nothing is logged."""
    from quark.jobs.folders.models import load_meta_model

    with severity(3):  # what is said of it is said when it is done
        configured = configure(job)
        configured.check_data()
        if configured.plan is None and configured.budget is None:
            plan_of(load_meta_model(job.request.model), configured.config, job.form)


@dataclass(frozen=True)
class Configured:
    """A job with all that is known before weights are read.

    Attributes:
        job: The job.
        choice: What its goal chooses for the layers of this model; None without a goal.
        scheme: Of all layers; None with a budget.
        budget: In place of a scheme.
        algorithms: Names, and configs of those with parameters.
        config: A `quark.torch.QConfig`; with a budget the one that its choice completes.
        calibration: The data, or the text of the package where something needs them.
        why: What needs calibration data; None: nothing does.
        plan: Of `config`, where its goal looked at it.
    """

    job: FolderJob
    choice: GoalChoice | None
    scheme: str | None
    budget: Budget | None
    algorithms: Sequence[Any]
    config: Any
    calibration: Calibration
    why: str | None = None
    plan: FolderPlan | None = None

    @property
    def lacks(self) -> str | None:
        """What needs data where none are given and the package has none that the model takes; None: nothing does."""
        return self.why if self.calibration.path is None else None

    def check_data(self) -> None:
        """Raise CalibrationError where the job needs data that are not given. A plan needs none."""
        if self.lacks is not None:
            why = f"{self.lacks[0].upper()}{self.lacks[1:]}"
            raise CalibrationError(f"{why} needs calibration data: pass --calib, {RECORDED}.")

    @property
    def title(self) -> str:
        """What the layers get, in a word."""
        return self.budget.named() if self.budget is not None else self.scheme or ""

    @property
    def schemes(self) -> list[str]:
        """The names of schemes that are asked for; block types of GGUF files are none."""
        named = self.budget.candidates if self.budget is not None else (self.scheme or "",)
        layers = [item.rpartition("=")[2] for item in self.job.request.layer or ()]
        return [*([] if _in_file(self.scheme, self.budget, self.job.form) else named), *layers]

    def completed(self, table: SensitivityTable, choice: BudgetChoice) -> Any:
        """The config of what a budget chose, with the algorithms of `config`."""
        request = self.job.request
        if self.job.form == GGUF:
            return _calibrated(request, mix_config(request, choice.schemes, self.config.algo_config))
        return table.config(choice, self.config)


def configure(job: FolderJob, aloud: bool = False) -> Configured:
    """What is done for a job of a folder.

    Args:
        job: The job.
        aloud: Whether the log has what the plan says: for those that go on with it, and make none of their own.

    Raises:
        QuarkError: What is asked for does not go together, or does not fit the model.
    """
    request, form = job.request, job.form
    network = _check_library(job)
    model = _without_weights(request)
    choice = _choice_for(job, lambda: model()[0])
    budget = asked_budget(request, form, choice) if choice is None or choice.mixed is not None else None
    scheme = choice.scheme if choice is not None else request.scheme
    if budget is not None:
        scheme = None
        _refuse_beside_budget(request, budget)
    mixed = _in_file(scheme, budget, form)
    asked = choice.algorithms if choice is not None else request.algorithm
    if asked is None and mixed and request.calib is not None:
        asked = (MIX_ALGORITHM,)
    algorithms = torch_algorithms(asked)
    Imatrices.of(request).check(mixed, request.calib, choice.algorithms if choice is not None else request.algorithm)
    config = _calibrated(request, _config(job, scheme, budget, algorithms or None))
    plan = None
    if choice is not None:
        config, plan = _planned_for_goal(model, config, choice, aloud)
    why = _reason_for_data(request, scheme, budget, config)
    calibration = _calibration(request, choice)
    if why is not None and not network:  # of what a network of diffusers takes, the package has none
        calibration = calibration.or_default(why)
    return Configured(job, choice, scheme, budget, algorithms, config, calibration, why, plan)


def _choice_for(job: FolderJob, load_meta: Callable[[], Any]) -> GoalChoice | None:
    """What the goal of a job chooses for its model, and for this machine; None without a goal."""
    if job.choice is None:
        return None
    return completed_choice(fitted_choice(job.choice, job.request, load_meta), job.request, load_meta)


def _calibration(request: FolderRequest, choice: GoalChoice | None) -> Calibration:
    """The data that are asked for, with the texts that an effort chooses."""
    asked = Calibration.of(request)
    if choice is None or not choice.texts:
        return asked
    return replace(asked, synthetic=choice.texts, asked=request.synthetic is not None)


def _planned_for_goal(
    model: Callable[[], tuple[Any, int]], config: Any, choice: GoalChoice, aloud: bool
) -> tuple[Any, FolderPlan | None]:
    """What `for_goal` gives for a model of `_without_weights`."""
    config, plan = for_goal(lambda: model()[0], config, choice, aloud)
    return config, plan if plan is None else replace(plan, before=model()[1])


def _without_weights(request: FolderRequest) -> Callable[[], tuple[Any, int]]:
    """The function that gives the model without weights, which it makes once, and its bytes in float: before experts
    that share a tensor are taken apart.
    """
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.jobs.folders.models import load_meta_model
    from quark.torch.flows.predicted_size import float_bytes

    @cache
    def model() -> tuple[Any, int]:
        meta = load_meta_model(request.model, request.trust_remote_code)
        return meta, float_bytes(meta)

    return model


def _check_library(job: FolderJob) -> bool:
    """Whether the folder is that of a network of diffusers.

    Raises ConfigError where it is of another library than the goal's, or the format's.
    """
    from quark.torch.diffusion.component import is_component
    from quark.torch.model.model_folder import read_config

    folder, goal = job.request.model, None if job.choice is None else job.choice.goal
    network = is_component(read_config(folder))
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


def servers_say(configured: Configured, plan: FolderPlan) -> str | None:
    """What servers do with a plan that gives parts of what they make one layer different schemes; else None.

    Args:
        configured: The job; of one with a goal, or of a file that no server fuses layers of, nothing is said.
        plan: Of the config that runs.
    """
    from quark.torch.flows.check_plan import split_said
    from quark.torch.formats import FORMATS

    job = configured.job
    if configured.choice is not None or job.form not in FORMATS:
        return None
    saying: dict[str, list[str]] = {}
    for program in fusing_programs(job.form, configured.schemes):
        if (said := split_said(plan.meta, plan.layers, program)) is not None:
            saying.setdefault(said, []).append(program)
    each = (
        f"{'each of ' if len(programs) > 1 else ''}{', '.join(programs)} {said}" for said, programs in saying.items()
    )
    return " ".join(each) or None


def warn_of_servers(configured: Configured, config: Any) -> None:
    """Log what `servers_say` of a job in which some layers get something else than the others.

    Args:
        configured: The job.
        config: That runs.
    """
    from quark.jobs.folders.models import is_read, load_meta_model

    request = configured.job.request
    if configured.choice is not None or not (request.exclude or request.layer) or not is_read(request.model):
        return
    meta = load_meta_model(request.model, request.trust_remote_code)
    try:
        with severity(3):  # what a plan says is said when it is carried out
            plan = plan_of(meta, config, configured.job.form)
    except QuarkError:  # which the work itself meets
        return
    said = servers_say(configured, plan)
    if said is not None:
        logger.info("Servers: %s", said)


def _in_file(scheme: str | None, budget: Budget | None, form: str) -> bool:
    """Whether the layers get block types of a GGUF file, which are no schemes."""
    return is_mix(scheme, form) if scheme is not None else budget is not None and form == GGUF


def _config(job: FolderJob, scheme: str | None, budget: Budget | None, algorithms: list[Any] | None) -> Any:
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.torch.bit_budget.measure import FITS_ALL
    from quark.torch.model.model_folder import read_config

    request = job.request
    read_config(request.model)  # what is no model is said first
    if scheme is None:
        # What it says of all layers is replaced.
        config = scheme_config(request, FITS_ALL, algorithms)
        if job.form != GGUF:
            return _of_linear_layers(request, config)
        # GGUF files hold the head in a block type too, which templates leave in float.
        return replace(config, exclude=list(request.exclude or ()))
    if is_mix(scheme, job.form):
        if request.kv_cache or request.attention:
            raise ConfigError(f"--kv-cache and --attention do not apply to --scheme {scheme}: GGUF files hold weights.")
        return mix_config(request, scheme, algorithms)
    return scheme_config(request, scheme, algorithms, inside_attention=True)


def _of_linear_layers(request: FolderRequest, config: Any) -> Any:
    """The config of a budget, which chooses for linear layers alone: convolutions that nothing names are excluded."""
    from quark.jobs.folders.models import load_meta_model
    from quark.torch.bit_budget.rules import convolutions

    names = convolutions(load_meta_model(request.model, request.trust_remote_code), config)
    if not names:
        return config
    logger.info(
        "%d convolutions stay in float, as a budget is of linear layers: %s%s. Possible: --layer PATTERN=int8_wo.",
        len(names), ", ".join(names[:2]), " ..." if names[2:] else "",
    )  # fmt: skip
    return replace(config, exclude=[*config.exclude, *names])


def for_goal(
    load_meta: Callable[[], Any], config: Any, choice: GoalChoice, aloud: bool = False
) -> tuple[Any, FolderPlan | None]:
    """The config, without layers that the program of a goal builds in float, and its plan.

    Args:
        load_meta: Makes the model without weights.
        config: A `quark.torch.QConfig`.
        choice: What its goal chose.
        aloud: Whether the log has what the plan says.

    Returns:
        No plan where single layers do not decide whether the program loads the result, and where there is none.

    Raises:
        NotSupportedError: The program would not load the result.
    """
    from quark.torch.flows.check_plan import check_goal
    from quark.torch.flows.float_layers import left_in_float

    goal, form = choice.goal, choice.form
    if not goal.fuses and goal.heads is None:
        return config, None
    meta = load_meta()
    config = left_in_float(meta, config, goal)
    try:
        with severity(None if aloud else 3):  # what a plan says is said when it is carried out
            plan = plan_of(meta, config, form)
    except QuarkError:  # which the work itself meets, or does not: of a checkpoint in FP8 there is no plan
        return config, None
    check_goal(meta, plan.layers, goal, form)
    return config, plan


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


def _options_with_scales(request: FolderRequest) -> list[str]:
    """The options given that have static scales, whatever the scheme is."""
    given = (("--kv-cache", request.kv_cache), ("--attention", request.attention))
    return [f"{option} {kind}" for option, kind in given if kind]


def _reason_for_data(request: FolderRequest, scheme: str | None, budget: Budget | None, config: Any) -> str | None:
    """What needs calibration data: a scheme with static activations, an algorithm, or a budget that is measured; None
    where nothing does.
    """
    from quark.core.schemes import scheme_of
    from quark.gguf import MIXES
    from quark.torch.algorithms import algorithms_of

    names = (*filter(None, [scheme]), *(item.rpartition("=")[2] for item in request.layer or ()))
    static = [name for name in names if name not in MIXES and scheme_of(name).needs_data]
    if static:
        return f"the scheme {static[0]!r}, which has static activation scales,"
    if options := _options_with_scales(request):
        return f"{options[0]}, whose scales are static,"
    algorithms = algorithms_of(config.algo_config or [])
    reading = [algorithm.config.name for algorithm in algorithms if algorithm.reads_inputs or algorithm.learns]
    if reading:
        return f"the algorithm {reading[0]!r}"
    return budget.named() if budget is not None and budget.is_measured else None
