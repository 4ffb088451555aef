"""A goal chooses for a request, within the limits that its layers set. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quark.base.log import logger
from quark.core.schemes import in_smaller_groups
from quark.errors import ConfigError, NotSupportedError, QuarkError, ShapeError, UsageError
from quark.goals import GOALS, GoalChoice, GoalRequest, choose
from quark.goals.choice import is_known
from quark.goals.efforts import check_effort
from quark.goals.goal import RuntimeGoal
from quark.jobs.folders.bit_budget import named_candidates, size_within
from quark.jobs.folders.gguf_files import as_folder
from quark.jobs.folders.schemes import config_of
from quark.jobs.request import FileRequest, FolderRequest, is_gguf
from quark.jobs.words import COMFYUI

if TYPE_CHECKING:
    from quark.torch.checkpoint.opened import OpenedFolder


def chosen(
    request: FolderRequest | FileRequest, has_data: bool, open: Callable[[], OpenedFolder] | None = None
) -> GoalChoice | None:
    """Return the choice of --for; None without it. Raises as `choose` does, and for --effort alone.

    Args:
        request: What was asked for.
        has_data: Whether there are calibration data.
        open: Gives the folder of a request for a folder.
    """
    if request.goal is None:
        if request.effort is not None:
            check_effort(request.effort)
            raise ConfigError(f"--effort goes with --for, which is not given. Possible: --for {', '.join(GOALS)}.")
        return None
    asked = GoalRequest(
        goal=request.goal, scheme=request.scheme, bits=request.bits, effort=request.effort,
        algorithms=request.algorithm, has_data=has_data,
    )  # fmt: skip
    if isinstance(request, FileRequest):
        _check_tried(request)
        return choose(replace(asked, onnx=True, scheme=request.scheme or request.config))
    budget, scheme, cache, goal = _asks_for_mix(request), request.scheme, request.kv_cache, GOALS[request.goal]
    if request.size is not None and not budget:
        budget = goal.folder is None or goal.folder.mixed is not None
        scheme = None if budget else _widest(request, open, goal, request.size)
    cache_forms = None
    if cache is not None:
        # They import torch: after the arguments are parsed, and where a cache is asked for.
        from quark.torch.config.llm_template import cache_spec
        from quark.torch.formats import FORMATS

        spec = cache_spec(cache)
        cache_forms = {name for name, form in FORMATS.items() if form.holds_cache(spec)}
    return choose(replace(
        asked, scheme=scheme, form=request.export_format, budget=budget,
        candidates=named_candidates(request.candidates),
        cache=cache, cache_forms=cache_forms,
    ))  # fmt: skip


def _check_tried(request: FileRequest) -> None:
    """Raise NotSupportedError for a configuration that there is, and of which no goal has a fact."""
    from quark.onnx.config.preset_rows import QROWS, ROWS  # imports onnx: the model is such a file

    name, goal = request.scheme or request.config, request.goal
    if goal is None or goal not in GOALS or name is None or is_known(name, True):
        return
    if name in ROWS or name in QROWS:
        known = sorted({fact.scheme for fact in GOALS[goal].loaded(True)})
        raise NotSupportedError(
            f"The configuration {name} was not tried in {GOALS[goal].program}. Possible: --config {name} without "
            f"--for, or one that was tried: {', '.join(known)}."
        )


def _asks_for_mix(request: FolderRequest) -> bool:
    """Return True where layers are to have schemes of their own. Raises for words that do not go with --size."""
    measured = bool(request.candidates) or request.sensitivity is not None
    if request.size is not None and (request.scheme is not None or request.bits is not None):
        raise ConfigError("--size chooses the scheme of a model folder. Possible: --size, --bits or --scheme.")
    if measured and request.size is None and request.bits is None:
        raise UsageError("--candidates and --sensitivity belong to --bits or --size, which are not given.")
    return measured


def _schemes_by_form(goal: RuntimeGoal, form: str | None) -> Iterator[tuple[str, list[str]]]:
    """The form of each number of bits, and its schemes, those in smaller groups last."""
    loaded = {(fact.form, fact.scheme) for fact in goal.loaded(False)}
    for written, usual in goal.folder.bits.values() if goal.folder is not None else ():
        if form in (None, written):
            yield written, [usual, *(name for name in in_smaller_groups(usual) if (written, name) in loaded)]


def _widest(request: FolderRequest, open: Callable[[], OpenedFolder] | None, goal: RuntimeGoal, size: str) -> str:
    """The largest of a goal's schemes by bits that keeps a model within a size. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.jobs.folders.models import open_folder, skeleton_of
    from quark.torch.flows.predicted_size import plan_of

    if is_gguf(request.model):
        with as_folder(request.model, request.dtype, weights=False) as made:
            return _widest(replace(request, model=made), partial(open_folder, made), goal, size)
    assert open is not None
    folder = open()
    skeleton_of(folder)
    limit = size_within(size, request.model)
    sizes: dict[str, int] = {}
    refused: ShapeError | None = None
    rows = list(_schemes_by_form(goal, request.export_format))
    if COMFYUI in dict(rows):
        raise UsageError(f"--size is not chosen for with --for {goal.name}. Possible: --bits or --scheme.")
    for form, schemes in rows:
        for scheme in schemes:
            config = config_of(request, folder, scheme, form)
            try:
                sizes[scheme] = plan_of(folder, config, form).after
                break
            except ShapeError as error:
                refused = refused or error
    if refused is not None and not sizes:
        raise refused
    fitting = {scheme: size for scheme, size in sizes.items() if size <= limit}
    if not fitting:
        shown = ", ".join(f"{scheme} {size / 1e6:.2f} MB" for scheme, size in sizes.items())
        raise ConfigError(f"--size {size} is less than any scheme of --for {goal.name} gives: {shown}.")
    return max(fitting, key=fitting.__getitem__)


def choice_for_kind(choice: GoalChoice, folder: OpenedFolder) -> GoalChoice:
    """The choice for the kind of model of a folder; see `GoalChoice.of_other_model`. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.jobs.folders.models import inputs_of, skeleton_if_readable
    from quark.torch.model.folder_files import lists_modules

    meta = skeleton_if_readable(folder) if folder.is_read else None
    if meta is None or inputs_of(folder.path, meta).continues_text:
        return choice
    return choice.of_other_model(type(meta).__name__, lists_modules(folder.path, folder.path.parent))


def fitted_choice(choice: GoalChoice, request: FolderRequest, folder: OpenedFolder) -> GoalChoice:
    """The choice for the layers of a folder; see `GoalChoice.fitted`. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.jobs.folders.models import skeleton_of
    from quark.torch.model.passes import prepare
    from quark.torch.plan import chooser, divides

    def fits(scheme: str) -> bool:
        config = config_of(request, folder, scheme, choice.form)
        try:
            skeleton_of(folder)
            meta = folder.copy()
            prepare(meta, chooser(config, meta).wanted)
            return divides(config, meta)
        except QuarkError:  # which the work itself meets, or does not: of a checkpoint in FP8 there is no plan
            return True

    fitted = choice.fitted(fits)
    if fitted.scheme != choice.scheme:
        logger.info("%s instead of %s: its groups divide this model.", fitted.scheme, choice.scheme)
    return fitted
