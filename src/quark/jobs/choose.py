"""What a goal chooses for a request, and what its layers allow of that. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator

from quark.base.log import logger
from quark.core.schemes import in_smaller_groups
from quark.errors import ConfigError, QuarkError, ShapeError, UsageError
from quark.goals import GOALS, GoalChoice, choose
from quark.goals.efforts import check_effort
from quark.goals.goal import GoalDefaults
from quark.jobs.folders.bit_budget import named_candidates, size_within
from quark.jobs.request import FileRequest, FolderRequest


def chosen(request: FolderRequest | FileRequest, has_data: bool) -> GoalChoice | None:
    """What --for chooses; None without it. Raises as `choose` does, and for --effort alone."""
    if request.goal is None:
        if request.effort is not None:
            check_effort(request.effort)
            raise ConfigError(f"--effort goes with --for, which is not given. Possible: --for {', '.join(GOALS)}.")
        return None
    if isinstance(request, FileRequest):
        return choose(
            request.goal, True, scheme=request.scheme or request.config, bits=request.bits, effort=request.effort,
            algorithms=request.algorithm, has_data=has_data,
        )  # fmt: skip
    return _of_folder(request, request.goal, has_data)


def _of_folder(request: FolderRequest, goal: str, has_data: bool) -> GoalChoice:
    defaults, scheme = GOALS[goal].folder, request.scheme
    mixes = defaults is not None and defaults.mixed is not None
    measured = bool(request.candidates) or request.sensitivity is not None
    if request.size is not None:
        if scheme is not None or request.bits is not None:
            raise ConfigError("--size chooses the scheme of a model folder. Possible: --size, --bits or --scheme.")
        if not mixes and not measured:
            scheme = _widest(request, goal, request.size)
    elif measured and request.bits is None:
        raise UsageError("--candidates and --sensitivity belong to --bits or --size, which are not given.")
    cache = request.kv_cache
    return choose(
        goal, False, scheme=scheme, bits=request.bits, form=request.export_format, effort=request.effort,
        algorithms=request.algorithm, has_data=has_data,
        budget=measured or (request.size is not None and scheme is None),
        candidates=named_candidates(request.candidates),
        cache=cache, holding=_holding(cache) if cache is not None else None,
    )  # fmt: skip


def _holding(cache: str) -> set[str]:
    """The formats that have a place for a cache of a scheme."""
    # They import torch: after the arguments are parsed, and where a cache is asked for.
    from quark.torch.config.llm_template import cache_spec
    from quark.torch.formats import FORMATS

    spec = cache_spec(cache)
    return {name for name, form in FORMATS.items() if form.holds_cache(spec)}


def _rows(goal: str, defaults: GoalDefaults, form: str | None) -> Iterator[tuple[str, list[str]]]:
    """The form of each number of bits, and its schemes, those in smaller groups last."""
    loaded = {(fact.form, fact.scheme) for fact in GOALS[goal].loaded(False)}
    for made, usual in defaults.bits.values():
        if form in (None, made):
            yield made, [usual, *(name for name in in_smaller_groups(usual) if (made, name) in loaded)]


def _widest(request: FolderRequest, goal: str, size: str) -> str:
    """The largest of a goal's schemes by bits that keeps a model within a size. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.jobs.folders.models import load_meta_model
    from quark.jobs.folders.schemes import config_of
    from quark.torch.flows.predicted_size import planned

    defaults = GOALS[goal].folder
    if defaults is None:
        choose(goal, onnx=False)  # which says what is possible
        raise AssertionError(goal)
    limit = size_within(size, request.model)
    sizes: dict[str, int] = {}
    refused: ShapeError | None = None
    for made, schemes in _rows(goal, defaults, request.export_format):
        for scheme in schemes:
            config = config_of(request, scheme, made)
            try:
                sizes[scheme] = planned(load_meta_model(request.model, request.trust_remote_code), config, made)[1]
                break
            except ShapeError as error:
                refused = refused or error
    if refused is not None and not sizes:
        raise refused
    fitting = {scheme: size for scheme, size in sizes.items() if size <= limit}
    if not fitting:
        shown = ", ".join(f"{scheme} {size / 1e6:.2f} MB" for scheme, size in sizes.items())
        raise ConfigError(f"--size {size} is less than any scheme of --for {goal} gives: {shown}.")
    return max(fitting, key=lambda scheme: fitting[scheme])


def fitted_choice(choice: GoalChoice, request: FolderRequest) -> GoalChoice:
    """The choice for the layers of a folder; see `GoalChoice.fitted`. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.jobs.folders.models import load_meta_model
    from quark.jobs.folders.schemes import config_of
    from quark.torch.model.model_folder import read_config
    from quark.torch.model.passes import prepare
    from quark.torch.plan import chooser, divides

    model, trusted = request.model, request.trust_remote_code

    def fits(scheme: str) -> bool:
        config = config_of(request, scheme, choice.form)
        try:
            meta = load_meta_model(model, trusted)
            prepare(meta, chooser(config, meta).wanted)
            return divides(config, meta)
        except QuarkError:  # which the work itself meets, or does not: of a checkpoint in FP8 there is no plan
            return True

    choice = choice.for_type(read_config(model).get("model_type", ""))
    found = choice.fitted(fits)
    if found is not choice:
        logger.info("%s in the place of %s: its groups divide this model.", found.scheme, choice.scheme)
    return found
