"""Held-out data: those that a quantized folder was not calibrated on, by the recipe that lies in it."""

from __future__ import annotations

from quark.errors import ConfigError
from quark.jobs.evaluate import EvaluateFiles, EvaluateFolders, held_out
from quark.jobs.recipes.recipe import data_digest
from quark.jobs.words import RECIPE


def check_held_out(request: EvaluateFolders | EvaluateFiles) -> None:
    """Raise ConfigError where a card would get figures of the calibration data, and FormatError for a damaged recipe.

    Args:
        request: What is to be measured; one without --card is not looked at, nor a folder without a recipe.
    """
    if isinstance(request, EvaluateFiles) or not request.card or not (request.quantized / RECIPE).is_file():
        return
    from quark.jobs.recipes.recipe_schema import read_recipe  # imports pydantic, which is slow

    data, made_with = held_out(request), read_recipe(request.quantized / RECIPE).get("made_with")
    calibrated = made_with.get("calib") if isinstance(made_with, dict) else None
    if calibrated is not None and calibrated == data_digest(data):
        raise ConfigError(
            f"--card: {data} has the data that {request.quantized} was calibrated on, by its {RECIPE}, and a card has "
            "figures of held-out data. Possible: other data, or no --card."
        )
