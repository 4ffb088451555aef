"""`--for` and `--effort`: a goal in place of a scheme, what was chosen for it, and the command that runs the result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from quark.command_line import new_table
from quark.commands.folders.bit_budget import asked_budget, named_candidates, size_within
from quark.commands.folders.calibration import Calibration
from quark.commands.options.kinds import require_model
from quark.commands.options.words import onnx_algorithms, torch_algorithms
from quark.commands.recipes.recipe import Recipe
from quark.core.schemes import in_smaller_groups
from quark.errors import ConfigError, QuarkError, ShapeError, UsageError
from quark.goals import GOALS, GoalChoice, choose
from quark.goals.efforts import FAST, check_effort
from quark.goals.facts import ONNX_FILE, Answer
from quark.log import logger

GoalOption = Annotated[
    str | None,
    typer.Option("--for", help=f"Program that is to run the result: {', '.join(GOALS)}. It chooses scheme and format."),
]
EffortOption = Annotated[
    str | None,
    typer.Option(help="With --for: fast, balanced (default with --calib) or best; which algorithms run, how long."),
]


def asked_choice(
    goal: str | None,
    effort: str | None,
    model: Path,
    onnx: bool,
    *,
    scheme: str | None,
    bits: float | None,
    size: str | None,
    form: str | None,
    algorithms: Sequence[str] | None,
    has_data: bool,
    trust_remote_code: bool = False,
    candidates: Sequence[str] | None = None,
    sensitivity: Path | None = None,
    kv_cache: str | None = None,
) -> GoalChoice | None:
    """What --for chooses; None without it. Raises as `choose` does, and for --effort alone."""
    if goal is None:
        if effort is not None:
            check_effort(effort)
            raise ConfigError(f"--effort goes with --for, which is not given. Possible: --for {', '.join(GOALS)}.")
        return None
    offer = GOALS[goal].folder
    mixes = offer is not None and offer.mixed is not None
    measured = bool(candidates) or sensitivity is not None
    if size is not None:
        if onnx or scheme is not None or bits is not None:
            raise ConfigError("--size chooses the scheme of a model folder. Possible: --size, --bits or --scheme.")
        if not mixes and not measured:
            scheme = _widest(goal, model, size, form, trust_remote_code)
    elif measured and bits is None:
        raise UsageError("--candidates and --sensitivity belong to --bits or --size, which are not given.")
    return choose(
        goal, onnx, scheme=scheme, bits=bits, form=form, effort=effort, algorithms=algorithms, has_data=has_data,
        budget=measured or (size is not None and scheme is None), candidates=named_candidates(candidates),
        cache=kv_cache, holding=_holding(kv_cache) if kv_cache is not None else None,
    )  # fmt: skip


def _holding(cache: str) -> set[str]:
    """The formats that have a place for a cache of a scheme."""
    # They import torch: after the arguments are parsed, and where a cache is asked for.
    from quark.torch.config.llm_template import cache_spec
    from quark.torch.formats import FORMATS

    spec = cache_spec(cache)
    return {name for name, form in FORMATS.items() if form.holds_cache(spec)}


def _widest(goal: str, model: Path, size: str, form: str | None, trust_remote_code: bool) -> str:
    """The largest of a goal's schemes by bits that keeps a model within a size. Reads no weights."""
    # The flow imports torch: after the goal is known.
    from quark.commands.folders.models import load_meta_model
    from quark.commands.folders.quantize import config_of
    from quark.torch.flows.predicted_size import planned

    offer = GOALS[goal].folder
    if offer is None:
        choose(goal, onnx=False)  # which says what is possible
        raise AssertionError(goal)
    limit = size_within(size, model)
    rows = [row for row in offer.bits.values() if form in (None, row[0])]
    loaded = {(fact.form, fact.scheme) for fact in GOALS[goal].loaded(False)}
    sizes: dict[str, int] = {}
    refused: ShapeError | None = None
    for made, usual in rows:
        for scheme in [usual, *(name for name in in_smaller_groups(usual) if (made, name) in loaded)]:
            config = config_of(model, scheme, made, trust_remote_code=trust_remote_code)
            try:
                sizes[scheme] = planned(load_meta_model(model, trust_remote_code), config, made)[1]
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


def fitted_choice(
    choice: GoalChoice,
    model: Path,
    exclude: list[str] | None = None,
    layers: list[str] | None = None,
    trust_remote_code: bool = False,
) -> GoalChoice:
    """The choice for the layers of a folder; see `GoalChoice.fitted`. Reads no weights.

    Args:
        choice: From `asked_choice`.
        model: A folder.
        exclude, layers, trust_remote_code: As the command takes them.
    """
    # The flow imports torch: after the goal is known.
    from quark.commands.folders.models import load_meta_model
    from quark.commands.folders.quantize import config_of
    from quark.torch.model.model_folder import read_config
    from quark.torch.model.passes import prepare
    from quark.torch.plan import chooser, divides

    def fits(scheme: str) -> bool:
        config = config_of(model, scheme, choice.form, exclude, layers, trust_remote_code=trust_remote_code)
        try:
            meta = load_meta_model(model, trust_remote_code)
            prepare(meta, chooser(config, meta).wanted)
            return divides(config, meta)
        except QuarkError:  # which the work itself meets, or does not: of a checkpoint in FP8 there is no plan
            return True

    choice = choice.for_type(read_config(model)["model_type"])
    found = choice.fitted(fits)
    if found is not choice:
        logger.info("%s in the place of %s: its groups divide this model.", found.scheme, choice.scheme)
    return found


def choice_rows(choice: GoalChoice) -> Table:
    """What was chosen, and why."""
    table = new_table("", "chosen", "why", title=f"For {choice.goal.program}")
    for row in choice.rows():
        table.add_row(*row)
    return table


def serve_line(choice: GoalChoice, path: Path | str) -> str:
    """The last line: how to run what was made."""
    return f"run it: {choice.command(str(path))}"


def facts_table(goal: str, onnx: bool) -> Table:
    """Every scheme that somebody looked at for a goal."""
    table = new_table("scheme", "format", "answer", "known by", title=f"In {GOALS[goal].program}")
    for fact in sorted(GOALS[goal].facts(onnx), key=lambda fact: fact.answer is Answer.REFUSED):
        table.add_row(fact.scheme, fact.form, f"{fact.answer.value} in {fact.version}", fact.known_by.value)
    return table


def onnx_config(choice: GoalChoice) -> str | None:
    """The configuration for an ONNX file; None where the flow finds it itself, which it does for this processor."""
    return None if choice.goal.name == "onnxruntime" and not choice.given else choice.scheme


def quantize_path(
    model: Path,
    choice: GoalChoice,
    data: Any,
    output: str,
    exclude: list[str],
    samples: int | None,
    force: bool,
    algorithms: Sequence[str] | None = None,
    bits: float | None = None,
) -> Path:
    """Quantize a folder or an ONNX file as was chosen; returns what a program opens.

    `algorithms` and `bits` were asked for.
    """
    require_model(model)
    choice = choice if choice.form == ONNX_FILE else fitted_choice(choice, model, exclude)
    if choice.form == ONNX_FILE:
        from quark.commands.onnx_files.quantize import calibration_reader, quantize_onnx
        from quark.commands.onnx_files.recover import recovery_of

        is_path = isinstance(data, (str, os.PathLike))
        reader = calibration_reader(model, Path(data), None, None, None) if is_path else data
        quantize_onnx(
            model, output, onnx_config(choice), reader, samples, exclude, choice.target, None, force,
            recovery=recovery_of(choice.effort, reader is not None), algorithms=onnx_algorithms(algorithms),
            quick=choice.effort != FAST,
        )  # fmt: skip
        return Path(output)
    from quark.commands.folders.export import Export
    from quark.commands.folders.imatrix import Imatrices
    from quark.commands.folders.quantize import quantize_folder

    asked = {
        "model": model, "output": output, "goal": choice.goal.name, "effort": choice.effort, "calib": data,
        "samples": samples, "exclude": exclude or None,
        **({"scheme": choice.scheme} if choice.mixed is None else {"bits": bits}),
        "algorithm": list(choice.algorithms) or None, "export_format": choice.form,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    export = Export(Path(output), choice.form, "real_quantized", "reorder", "5GB", force)
    budget = None
    if choice.mixed is not None:
        budget = asked_budget(model, None, bits, None, list(choice.mixed), None, choice.form, choice.goal)
    quantize_folder(
        model, budget or choice.scheme, exclude=exclude,
        calibration=Calibration(None if data is None else Path(data), samples),
        layer=None, algorithm=torch_algorithms(choice.algorithms) or None, kv_cache=None, attention=None,
        imatrix=Imatrices(), device="cpu", dtype="auto", export=export, stream=None,
        load={"trust_remote_code": False, "keep_unexpected": False}, recipe=Recipe(given),
    )  # fmt: skip
    return export.made(model)
