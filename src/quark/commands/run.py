"""`quark run`: a recipe made again, or for the first time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.__version__ import __version__
from quark.base.command_line import program
from quark.base.log import logger
from quark.commands.evaluate import evaluate_as
from quark.commands.options.of_request import said_on
from quark.commands.quantize import quantize, quantize_as
from quark.errors import CalibrationError, ConfigError, FormatError, UsageError
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs import request_of
from quark.jobs.evaluate import EVALUATE
from quark.jobs.options import key_of
from quark.jobs.recipes.recipe import data_digest, model_digest, said_by
from quark.jobs.request import options_of, request_for
from quark.report.page import check_page

PASS_ON = {"ignore_unknown_options": True}
"""Settings of the command: words that are no options of its own are those of `quark quantize`."""
ONE_OF = ("scheme", "bits", "size")
"""Options of which one takes the place of another."""


def _print_schema(asked: bool) -> None:
    if asked:
        from quark.jobs.recipes.recipe_schema import recipe_model  # pydantic is slow to import

        typer.echo(json.dumps(recipe_model().model_json_schema(), indent=2))
        raise typer.Exit


def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file, such as the quark_recipe.yaml in a quantized folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Options of `quark quantize`, which replace those of the recipe.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model to quantize, instead of that of the recipe.")] = None,
    schema: Annotated[
        bool,
        typer.Option("--schema", is_eager=True, callback=_print_schema, help="Print the JSON schema of recipes."),
    ] = False,
) -> None:
    """Quantize as a recipe says, and evaluate if it asks for that. Options of `quark quantize` may follow.

    Example: quark run ./llama-uint4/quark_recipe.yaml -o ./llama-again

    Example: quark run ./llama-uint4/quark_recipe.yaml --scheme int8 --samples 8 -o ./llama-int8
    """
    from quark.jobs.recipes.recipe_schema import checked_recipe, read_recipe, recipe_model  # pydantic is slow to import

    content = checked_recipe(read_recipe(recipe), recipe, recipe_model())
    # A model and an output have to be there.
    command: Any = typer.main.get_command(program(quantize))
    with command.make_context("quark run", ["MODEL", "--output=", *(overrides or ())]) as context:
        replaced = {name: value for name, value in said_on(context).items() if (name, value) != ("output", "")}
    options = _options(content)
    kept = {
        name: value
        for name, value in options.items()
        if name not in replaced and not (name in ONE_OF and set(ONE_OF) & set(replaced))
    }
    said = said_by(kept) | replaced
    if "output" not in said:
        raise UsageError(f"{recipe} does not say where the output goes. Possible: -o PATH.")
    source = model or Path(content["model"])
    _check_inputs(recipe, content.get("made_with") or {}, None if model else source, kept, replaced)
    evaluation = _checked_evaluation(content, source)
    quantize_as(request_of(source, said))
    if evaluation:
        evaluate_as(request_for(EVALUATE, source, said_by(evaluation, EVALUATE), quantized=Path(said["output"])))


def _options(content: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `quark quantize` that a recipe gives."""
    flat = {key: value for key, value in content.items() if not isinstance(value, dict) or key == "layers"}
    for section in ("data", "output", "evaluation"):
        flat |= {f"{section}.{key}": value for key, value in content.get(section, {}).items()}
    names = {key_of(each): name for name, each in options_of().items()}
    others = ("recipe", "model")
    return {
        names.get(key, key): value
        for key, value in flat.items()
        if key not in others and (key in names or not key.startswith("evaluation."))
    }


def _check_inputs(
    recipe: Path,
    made_with: Mapping[str, str],
    model: Path | None,
    options: Mapping[str, Any],
    replaced: Mapping[str, Any],
) -> None:
    """Raise where the model or the data are not those that the recipe was written with; None: another is asked for."""
    if made_with.get("quark") not in (None, __version__):
        logger.info(
            "%s was written by quark %s; this is %s, and what it makes may differ in bits.",
            recipe, made_with["quark"], __version__,
        )  # fmt: skip
    wanted = made_with.get("model")
    if model is not None and wanted is not None and model.exists() and (found := model_digest(model)) != wanted:
        raise FormatError(
            f"{model} is another model ({found[:19]}) than {recipe} was written with ({wanted[:19]}). Possible: that "
            "model, or --model to take this one."
        )
    for name, flag in (("calib", "--calib"), ("imatrix", "--imatrix")):
        # Data without a path are the text of the package.
        wanted, path = made_with.get(name), options.get(name, DEFAULT_TEXT)
        if wanted is not None and name not in replaced and (found := data_digest(Path(path))) != wanted:
            raise CalibrationError(
                f"{path} holds other data ({found[:19]}) than {recipe} was written with ({wanted[:19]}). Possible: "
                f"those data, or {flag} {path} to take these."
            )


def _refuse_code(evaluation: Mapping[str, Any]) -> None:
    """Raise ConfigError for an evaluation that runs code of others: a recipe may be from elsewhere."""
    if ":" in str(metric := evaluation.get("metric", "")):
        raise ConfigError(f"evaluation.metric: {metric} is code that runs. Possible: `quark evaluate --metric`.")
    if files := [task for task in evaluation.get("tasks", ()) if ".yaml" in task or ".yml" in task]:
        raise ConfigError(f"evaluation.tasks: {files[0]} may name code that runs. Possible: `quark evaluate --tasks`.")


def _checked_evaluation(content: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The options of `quark evaluate` that a recipe gives; none where it says only what the model may cost.

    Raises ConfigError or CalibrationError for what would stop the evaluation, before the model is made.
    """
    known = {key_of(each) for each in options_of(*EVALUATE).values()}
    of_quantize = {key_of(each) for each in options_of().values()}
    evaluation = {key: value for key, value in content.get("evaluation", {}).items() if key in known}
    if all(f"evaluation.{key}" in of_quantize for key in evaluation):
        return {}
    _refuse_code(evaluation)
    data = evaluation.get("data")
    if data is None:
        raise ConfigError("evaluation.data is missing. It names the held-out data.")
    if not Path(data).exists():
        raise CalibrationError(f"evaluation.data: {data} is not there.")
    if not (Path(data).is_file() or Path(data).is_dir()):
        raise CalibrationError(f"evaluation.data: {data} is a pipe or a device. Possible: a file or a folder.")
    report = evaluation.get("report")
    check_page(None if report is None else Path(report), model, Path(data))
    return evaluation
