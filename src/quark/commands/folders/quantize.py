"""`quark quantize` of a folder: a model of transformers in, a quantized one out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.command_line import results
from quark.commands.folders.bit_budget import Budget, choice_table, choose_for_budget
from quark.commands.folders.calibration import Calibration
from quark.commands.folders.export import GGUF, ONNX, Export
from quark.commands.folders.flows import write_folder
from quark.commands.folders.quantized_page import page_of_folder
from quark.commands.recipes.recipe import RECIPE, Recipe
from quark.commands.results.quantized import say_how_to_evaluate, size_line
from quark.errors import ConfigError, NotSupportedError
from quark.goals.efforts import DEFAULT_TEXT

if TYPE_CHECKING:
    from quark.commands.folders.imatrix import Imatrices
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable

MIX_ALGORITHM = "qronos"
"""What rounds a mix of block types where there is calibration data, and no --algorithm."""


def quantize_folder(
    model: Path,
    scheme: str | Budget,
    *,
    calibration: Calibration,
    exclude: list[str] | None,
    layer: list[str] | None,
    algorithm: list[Any] | None,
    kv_cache: str | None,
    attention: str | None,
    device: str,
    dtype: str,
    export: Export,
    stream: bool | None,
    load: Mapping[str, bool],
    imatrix: Imatrices,
    page: Path | None = None,
    recipe: Recipe | None = None,
) -> Recipe | None:
    """Load (with `load` for `load_model`), quantize, export, say what it took; return the recipe with what was read."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.commands.folders.models import folder_bytes
    from quark.torch.model.model_folder import read_config

    calib = calibration.path
    export.check_output(model, calib)
    kind = read_config(model)["model_type"] if kv_cache or attention else "auto"
    budget, of_all = (scheme, _any_scheme()) if isinstance(scheme, Budget) else (None, scheme)
    mixed = isinstance(scheme, str) and is_mix(scheme, export.form)
    if budget is not None:
        _refuse_beside_budget(budget, [kv_cache, attention], load)
    title = scheme.named() if isinstance(scheme, Budget) else scheme
    in_file = mixed or (budget is not None and export.form == GGUF)  # block types, which are no schemes
    imatrix.check(in_file, calib, algorithm)
    if mixed:
        _refuse_beside_mix(of_all, [kv_cache, attention])
        solver = algorithm or ([MIX_ALGORITHM] if calib else None)
        config = mix_config(model, of_all, exclude, layer, solver, load["trust_remote_code"], imatrix.read)
    elif budget is not None:
        config = budget_base(budget, exclude, layer, algorithm or _solver_of(budget, calib))
    else:
        config = scheme_config(of_all, exclude, layer, kind, kv_cache, attention, algorithm)
    read_config(model)
    named = [*([] if in_file else budget.candidates if budget else [of_all])]
    export.check(model, [*named, *(item.rpartition("=")[2] for item in layer or [])])
    calibration = with_default(calibration, of_all, layer, [kv_cache, attention], config, budget)
    console, start, before, chosen = results(), time.perf_counter(), folder_bytes(model), None
    if budget is not None:
        config, chosen = _chosen(model, budget, config, calibration, device, layer, imatrix.read)
    recipe, export = _with_recipe(recipe, export, calibration)
    save = partial(imatrix.save, calib=calib)
    after, errors = write_folder(model, config, calibration, device, dtype, export, stream, load, save)
    console.print(size_line(title, before, after, start), highlight=False)
    _say_how_to_evaluate(model, export, calib)
    load_as = {"device": device, "dtype": dtype, **load}
    page_of_folder(page, model, export.output, calib, load_as, _summary(title, algorithm), chosen, errors)
    return recipe


def _say_how_to_evaluate(model: Path, export: Export, calib: Path | None) -> None:
    """The line that measures what was written; an ONNX file is compared with another ONNX file, which there is not."""
    if export.form != ONNX:
        say_how_to_evaluate(model, export.made(model), calib)


def _refuse_beside_mix(mix: str, schemes: list[str | None]) -> None:
    """Raise ConfigError for schemes of a cache or of attention, which a mix of GGUF has no place for."""
    if any(schemes):
        raise ConfigError(f"--kv-cache and --attention do not apply to --scheme {mix}: GGUF files hold weights.")


def _summary(title: str, algorithm: list[Any] | None) -> str:
    """What was done, in a sentence; algorithms are names, or configs."""
    names = [each if isinstance(each, str) else each.name for each in algorithm or []]
    return f"Quantized by {', with '.join([title, *names])}."


def _with_recipe(recipe: Recipe | None, export: Export, calibration: Calibration) -> tuple[Recipe | None, Export]:
    """The recipe with the data that are read, and the export that puts it beside the model."""
    if recipe is None:
        return None, export
    recipe = replace(recipe, read={"calib": DEFAULT_TEXT}) if calibration.is_default else recipe
    return recipe, replace(export, attachments={RECIPE: recipe.text(in_folder=True)})


def _refuse_beside_budget(budget: Budget, inside: list[str | None], load: Mapping[str, bool]) -> None:
    """Raise for options under which a budget cannot be kept, or layers not be measured."""
    if any(inside):
        raise NotSupportedError(
            f"{budget.named()} chooses the schemes of weights; --kv-cache and --attention give layers schemes of their "
            "own. Possible: --scheme and --layer."
        )
    if any(load.values()):
        given = ", ".join(f"--{name.replace('_', '-')}" for name, value in load.items() if value)
        raise ConfigError(
            f"{given} with {budget.named()}: block by block, a class of transformers is needed that holds all."
        )


def _any_scheme() -> str:
    """A scheme for the config that a budget completes: what it says of all layers is replaced."""
    from quark.torch.bit_budget.measure import FITS_ALL

    return FITS_ALL


def _solver_of(budget: Budget, calib: Path | None) -> list[Any] | None:
    """What rounds the chosen types where no --algorithm says it."""
    return [MIX_ALGORITHM] if calib and budget.export_format == GGUF else None


def budget_base(
    budget: Budget, exclude: list[str] | None, layers: list[str] | None, algorithms: list[Any] | None = None
) -> Any:
    """The config that a budget completes."""
    config = scheme_config(_any_scheme(), exclude, layers, algorithms=algorithms)
    # GGUF files hold the head in a block type too, which templates leave in float.
    return replace(config, exclude=exclude or []) if budget.export_format == GGUF else config


def _chosen(
    model: Path,
    budget: Budget,
    base: Any,
    calibration: Calibration,
    device: str,
    layers: list[str] | None,
    imatrix: Path | None,
) -> tuple[Any, tuple[SensitivityTable, BudgetChoice]]:
    """The config of what a budget chooses, which is shown, and the table behind it."""
    table, choice = choose_for_budget(model, budget, base, calibration, device)
    results().print(choice_table(table, choice))
    return config_of_choice(model, budget, table, choice, base, layers, imatrix), (table, choice)


def config_of_choice(
    model: Path,
    budget: Budget,
    table: SensitivityTable,
    choice: BudgetChoice,
    base: Any,
    layers: list[str] | None,
    imatrix: Path | None = None,
) -> Any:
    """The config of what a budget chose, with the algorithms of `base`."""
    if budget.export_format == GGUF:
        return mix_config(model, choice.schemes, base.exclude, layers, base.algo_config, imatrix=imatrix)
    return table.config(choice, base)


def with_default(
    calibration: Calibration,
    scheme: str | None,
    layers: list[str] | None,
    inside: list[str | None],
    config: Any,
    budget: Budget | None = None,
) -> Calibration:
    """The calibration data, or the text of the package where there are none and something needs them.

    Args:
        calibration: What is asked for.
        scheme, layers, inside: Of all layers, of some, and of what is inside attention: names of schemes.
        config: With the algorithms.
        budget: That takes the place of the scheme.
    """
    why = _reason_for_data(scheme, layers, inside, config)
    if why is None and budget is not None and budget.is_measured:
        why = budget.named()
    return calibration if why is None else calibration.or_default(why)


def _reason_for_data(scheme: str | None, layers: list[str] | None, inside: list[str | None], config: Any) -> str | None:
    """What needs calibration data: a scheme with static activations, or an algorithm; None where nothing does."""
    from quark.core.schemes import scheme_of
    from quark.torch.algorithms import algorithms_of
    from quark.torch.config.block_mixes import MIXES

    names = (*filter(None, [scheme]), *(item.rpartition("=")[2] for item in layers or []))
    static = [name for name in names if name not in MIXES and scheme_of(name).needs_data] + [
        name for name in inside if name
    ]
    if static:
        return f"the scheme {static[0]!r}, which has static activation scales,"
    algorithms = algorithms_of(config.algo_config or [])
    reading = [algorithm.config.name for algorithm in algorithms if algorithm.reads_inputs or algorithm.learns]
    return f"the algorithm {reading[0]!r}" if reading else None


def is_mix(scheme: str, form: str) -> bool:
    """Whether a scheme is a mix of block types. Raises ConfigError for one beside another format than GGUF."""
    from quark.torch.config.block_mixes import MIXES

    if scheme in MIXES and form != GGUF:
        raise ConfigError(f"--scheme {scheme}: only GGUF files hold its block types. Possible: --export-format {GGUF}.")
    return scheme in MIXES


def config_of(
    model: Path,
    scheme: str,
    form: str,
    exclude: list[str] | None = None,
    layers: list[str] | None = None,
    algorithms: list[Any] | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The config of a scheme or of a mix of block types, for the model of a folder."""
    if is_mix(scheme, form):
        return mix_config(model, scheme, exclude, layers, algorithms, trust_remote_code)
    return scheme_config(scheme, exclude, layers, algorithms=algorithms)


def mix_config(
    model: Path,
    scheme: str | Mapping[str, str],
    exclude: list[str] | None,
    layers: list[str] | None,
    algorithms: list[Any] | None,
    trust_remote_code: bool = False,
    imatrix: Path | None = None,
) -> Any:
    """The config of a mix of block types, or of a type for each layer, for the model of a folder."""
    from quark.commands.folders.models import load_meta_model
    from quark.torch import gguf_config

    skeleton = load_meta_model(model, trust_remote_code)
    return gguf_config(skeleton, scheme, algorithms, exclude or [], _layer_rules(layers), imatrix)


def _layer_rules(layers: list[str] | None) -> dict[str, str]:
    """Pattern -> scheme of --layer. Raises ConfigError for another form."""
    rules = {}
    for item in layers or []:
        pattern, separator, name = item.rpartition("=")
        if not separator:
            raise ConfigError(f"--layer takes PATTERN=SCHEME, got {item!r}; for one: '*.down_proj=int8_wo'.")
        rules[pattern] = name
    return rules


def scheme_config(
    scheme: str,
    exclude: list[str] | None,
    layers: list[str] | None,
    kind: str = "auto",
    kv_cache: str | None = None,
    attention: str | None = None,
    algorithms: list[Any] | None = None,
) -> Any:
    """The config of a scheme with overrides. Raises ConfigError for a wrong name or form."""
    from quark.torch import LLMTemplate

    template = LLMTemplate.get(kind)
    default = list(template.exclude_layers_name)
    return template.get_config(
        scheme,
        algorithms,
        kv_cache_scheme=kv_cache,
        attention_scheme=attention,
        layer_config=_layer_rules(layers),
        exclude_layers=default + (exclude or []),
    )
