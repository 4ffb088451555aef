"""The steps of an effort that depend on the machine, beyond what the words of a request say.

    calibration     of a goal where nothing is said: on the text of the package, in at most MOST_BY_DEFAULT seconds

and of `--effort best`, beyond its solver:

    rotation        before it, of 4-bit floats with inputs, where the program runs it and the model is in memory
    texts           where the model goes on writing a text and is in memory, as many as fit into MOST_SECONDS
    distillation    after them, where its float copy and what it learns fit into memory, too

Decided from shapes and a measured speed, before a weight is read; what is left out has its reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.errors import QuarkError, one_line
from quark.goals import GoalChoice, choose
from quark.goals.efforts import (
    BALANCED,
    DEFAULT_TEXT,
    DISTILLATION,
    EQUALIZE,
    EQUALIZED_ALONE,
    FAST,
    FEWEST_TEXTS,
    MOST_SECONDS,
    TEXTS,
)
from quark.jobs.request import LENGTH, SAMPLES, SAMPLES_OF_PACKAGE, FolderRequest
from quark.jobs.words import torch_algorithms

if TYPE_CHECKING:
    from quark.torch.checkpoint.opened import OpenedFolder
    from quark.torch.flows.effort_costs import StepCosts

_OWN_TEXTS = "texts of the model's own"
SHARE = 0.9
"""Of the free memory, so much at most: what is counted is the least that a job takes."""


MOST_BY_DEFAULT = 600.0
"""Seconds that calibrating may take by estimate where nobody asked for it."""
GAIN = "it leaves about a quarter of the loss of 4 bits"
"""Measured on a model of 135 million parameters: docs/reference/verdict.md."""


def calibrated_choice(choice: GoalChoice, request: FolderRequest, folder: OpenedFolder) -> GoalChoice:
    """The choice for a language model and this machine: with calibration where nothing is said, and there is time.

    Args:
        choice: What the words of the request choose.
        request: What was asked for.
        folder: Of the model.

    Returns:
        The choice with the text of the package as data; where that takes too long, equalized alone if the scheme is, or
        to nearest, which is logged with the price of calibrating.
    """
    said = _is_said(request, "effort", "algorithm", "calib", "imatrix", "sensitivity")  # the last two in place of data
    if choice.asked.has_data or said or not folder.is_read:
        return choice
    from quark.jobs.folders.models import inputs_of, skeleton_if_readable
    from quark.torch.calibration.distributed import from_first

    better, meta = choose(replace(choice.asked, has_data=True)), skeleton_if_readable(folder)
    if meta is None or better.algorithms == choice.algorithms:
        return choice
    inputs = inputs_of(folder.path, meta)
    if not inputs.continues_text:
        return choice
    why = from_first(_why_to_nearest(better, request, inputs, meta))
    if why is None:
        return replace(better, decided_here=True)
    if EQUALIZE in better.algorithms:  # which takes a small part of a solver's time
        steps, reasons = EQUALIZED_ALONE, {**better.reasons, "algorithms": EQUALIZED_ALONE.why}
        cheap = replace(better, algorithms=steps.algorithms, effort=FAST, reasons=reasons)
        if from_first(_why_to_nearest(cheap, request, inputs, meta)) is None:
            logger.info("Equalized and to nearest: solving too (--effort %s) %s.", BALANCED, why)
            return replace(cheap, decided_here=True)
    logger.info("To nearest: calibrating (--effort %s) %s.", BALANCED, why)
    return replace(choice, decided_here=True)


def _why_to_nearest(choice: GoalChoice, request: FolderRequest, inputs: Any, meta: Any) -> str | None:
    """Why a model is not calibrated where nobody asked for it; None: it is.

    Args:
        choice: With calibration.
        request: What was asked for.
        inputs: What the model takes.
        meta: The model without weights.
    """
    from quark.torch.flows.effort_costs import duration, free_memory
    from quark.torch.model.batches import named_device

    asked = _is_said(request, "samples", "length", "packing", "seed", "synthetic")
    try:
        inputs.read(DEFAULT_TEXT, 1, request.length or LENGTH)
    except QuarkError as error:  # such as a folder without a tokenizer
        if asked:
            raise
        return f"is not possible: {one_line(error).rstrip('.')}"
    device = named_device(request.device)
    tokens = (request.samples or SAMPLES_OF_PACKAGE) * (request.length or LENGTH)
    costs = _Costs(meta, choice, tokens, LENGTH, device).of(0, distilled=False)
    free = free_memory(device)
    if free is not None and costs.memory > SHARE * free:
        return f"needs about {costs.memory / 1e9:.1f} GB of memory; {GAIN}"
    if not asked and costs.total > MOST_BY_DEFAULT:
        return f"would take about {duration(costs.total)}; {GAIN}"
    return None


def _is_said(request: FolderRequest, *names: str) -> bool:
    """Look whether a request says one of some options."""
    return any(getattr(request, name) is not None for name in names)


def completed_choice(choice: GoalChoice, request: FolderRequest, folder: OpenedFolder) -> GoalChoice:
    """The choice with what its effort adds for the model of a folder and this machine."""
    if not choice.distills:
        return choice
    from quark.jobs.folders.models import skeleton_if_readable
    from quark.torch.model.batches import most_tokens, text_config

    meta = skeleton_if_readable(folder)
    if meta is None:
        return choice
    length = most_tokens(text_config(getattr(meta, "config", None)), request.length or LENGTH)
    tokens, why = (request.samples or SAMPLES) * length, _why_in_parts(request, folder)
    return completed_for(choice.rotated(why), meta, tokens, length, request.load.device, request.synthetic, why)


def completed_for(
    choice: GoalChoice,
    model: Any,
    tokens: int,
    length: int,
    device: str,
    asked: int | None = None,
    why: str | None = None,
) -> GoalChoice:
    """The choice with what its effort adds for a model, with or without weights, and this machine.

    Args:
        choice: The choice.
        model: Causal model of transformers, or any other, of which nothing is added.
        tokens: Of all calibration data, at most.
        length: Of the longest sample, in tokens.
        device: Computes.
        asked: How many texts are asked for; None: it is chosen.
        why: What else keeps the model from being in memory at once; None: nothing does.
    """
    from quark.torch.calibration.synthetic_data import writes_text
    from quark.torch.model.batches import named_device

    if not writes_text(model):
        why = f"{type(model).__name__} writes no text"
    if why is not None:
        return choice.completed(0, (), {f"{_OWN_TEXTS}, {DISTILLATION}": why})
    costs = _Costs(model, choice, tokens, length, named_device(device))
    count, why = (asked, "") if asked is not None else costs.texts()
    if not count:
        return choice.completed(0, (), {f"{_OWN_TEXTS}, {DISTILLATION}": why})
    refused = costs.why_not_distilled(count)
    left_out = {} if refused is None else {DISTILLATION: refused}
    if asked is None and count < TEXTS:
        left_out[f"{TEXTS - count} of {TEXTS} texts"] = why
    return choice.completed(count, () if refused else (DISTILLATION,), left_out)


def _why_in_parts(request: FolderRequest, folder: OpenedFolder) -> str | None:
    """Why a model is not in memory at once; None: it is."""
    from quark.jobs.folders.flows import fits_memory
    from quark.torch.calibration.distributed import world
    from quark.torch.flows.predicted_size import float_bytes

    if request.stream:
        return "--stream has one block in memory"
    if world() > 1:
        return "several processes work on the model"
    size = float_bytes(folder.skeleton, folder)
    return None if request.stream is False or fits_memory(size) else f"the model of {size / 1e9:.1f} GB is streamed"


class _Costs:
    """The estimated seconds of steps for a number of texts."""

    def __init__(self, model: Any, choice: GoalChoice, tokens: int, length: int, device: Any) -> None:
        from quark.torch.flows.effort_costs import measured_speed

        self.model, self.choice, self.tokens, self.length, self.device = model, choice, tokens, length, device
        self.speed = measured_speed(model, device)

    def of(self, texts: int, distilled: bool) -> StepCosts:
        from quark.torch.algorithms import algorithms_of
        from quark.torch.config.named_algorithms import algo_config_by_name
        from quark.torch.flows.effort_costs import step_costs

        words = [*self.choice.algorithms, *((DISTILLATION,) if distilled else ())]
        configs = [algo_config_by_name(c) if isinstance(c, str) else c for c in torch_algorithms(words)]
        return step_costs(self.model, algorithms_of(configs), self.tokens, texts * self.length, self.speed)

    def texts(self) -> tuple[int, str]:
        """The most texts of TEXTS, its half ... that are written and read in MOST_SECONDS, and why not all; else 0."""
        from quark.torch.flows.effort_costs import duration

        why, count = "", TEXTS
        while count >= FEWEST_TEXTS:
            costs = self.of(count, self.why_not_distilled(count) is None)
            if costs.total <= MOST_SECONDS:
                return count, why
            why = why or f"with all, this takes {costs}; {duration(MOST_SECONDS)} at most"
            count //= 2
        return 0, why

    def why_not_distilled(self, texts: int) -> str | None:
        """Why there is no distillation: memory; None where there is room."""
        from quark.torch.flows.effort_costs import free_memory

        needed, free = self.of(texts, True).memory, free_memory(self.device)
        if free is None or needed <= SHARE * free:
            return None
        return f"it takes at least {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def say_completed(choice: GoalChoice) -> None:
    """Log what an effort adds, and what it leaves out."""
    if choice.texts:
        logger.info("Beside the data, %d texts that the model writes itself.", choice.texts)
    for what, why in choice.left_out.items():
        logger.info("Left out of --effort %s: %s, as %s.", choice.effort, what, why)
