"""Next steps: what to try where a quantization cost a model much, each with its price in time or in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from quark.core.schemes import SCHEMES, in_smaller_groups
from quark.errors import QuarkError
from quark.gguf import MIXES
from quark.goals.efforts import BALANCED, BEST, FAST, steps_for
from quark.jobs.folders.job import FolderJob
from quark.jobs.folders.schemes import config_of
from quark.jobs.request import LENGTH, SAMPLES_OF_PACKAGE
from quark.jobs.words import torch_algorithms

WIDER = ("int8_wo", "fp8_wo")
"""Schemes of 8 bits, which need no data."""


def next_steps(job: FolderJob) -> list[str]:
    """The options that a job may be run with again, each as `--option value (price)`; the cheapest first."""
    found: list[str] = []
    for steps in (_solvers, _wider):
        with suppress(QuarkError):  # of a model whose blocks are not found there is no estimate
            found += steps(job)
    return found


def _solvers(job: FolderJob) -> Iterator[str]:
    """More time: the algorithms of the effort that follows the one that was taken."""
    choice = job.choice
    scheme = job.scheme if choice is None or choice.mixed is None else choice.defaults.default[1]
    if scheme not in SCHEMES and scheme not in MIXES:
        return
    assert scheme is not None
    taken = BALANCED if job.algorithms else FAST
    if choice is not None:
        taken = choice.effort
    following = {FAST: BALANCED, BALANCED: BEST}.get(taken)
    words = steps_for(scheme, following).algorithms if following else ()
    if words:
        flags = f"--effort {following}" if choice is not None else " ".join(f"--algorithm {word}" for word in words)
        data = "" if job.calibration.path is not None else ", calibrating on the text of the package, or --calib TEXT"
        yield f"{flags} (about {_time(job, words)} here{data})"


def _time(job: FolderJob, words: tuple[str, ...]) -> str:
    """Estimate the time that algorithms take for the model of a job on this machine, in words."""
    from quark.jobs.folders.models import skeleton_of
    from quark.torch.algorithms import algorithms_of
    from quark.torch.config.named_algorithms import algo_config_by_name
    from quark.torch.flows.effort_costs import duration, measured_speed, step_costs
    from quark.torch.model.batches import named_device

    meta, request = skeleton_of(job.folder), job.request
    configs = [algo_config_by_name(each) if isinstance(each, str) else each for each in torch_algorithms(words)]
    speed = measured_speed(meta, named_device(request.device))
    tokens = (request.samples or SAMPLES_OF_PACKAGE) * (request.length or LENGTH)
    return duration(step_costs(meta, algorithms_of(configs), tokens, 0, speed).total)


def _wider(job: FolderJob) -> Iterator[str]:
    """More bits: the next number that the program of the goal has, or smaller groups and 8 bits."""
    if job.budget is not None:
        if job.budget.bits is not None:
            yield f"--bits {job.budget.bits + 1:g} (a bit more of each weight)"
        return
    if job.scheme is None:
        return
    if job.choice is None:
        names = [*in_smaller_groups(job.scheme)[:1], *WIDER[:1]]
        options = [(f"--scheme {name}", job.form, name) for name in names if name != job.scheme]
    else:
        rows, scheme = job.choice.defaults.bits, job.scheme
        bits = next((n for n, (_, name) in rows.items() if scheme in (name, *in_smaller_groups(name))), None)
        wider = sorted((count, row) for count, row in rows.items() if bits is not None and bits < count < 16)
        options = [(f"--bits {count}", *row) for count, row in wider[:1]]
    for words, form, name in options:
        with suppress(QuarkError, KeyError):
            yield f"{words} ({_size(job, form, name) / 1e6:.0f} MB)"


def _size(job: FolderJob, form: str, scheme: str) -> int:
    """The bytes that the model of a job would have. Raises QuarkError where it cannot be so."""
    from quark.torch.flows.predicted_size import plan_of

    config: Any = config_of(job.request, job.folder, scheme, form)
    job.export.check([] if scheme in MIXES else [scheme])
    return plan_of(job.folder, config, form).after
