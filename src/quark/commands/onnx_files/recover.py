"""`quark quantize --recover`: what was asked for, and the table of what each step gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from quark.command_line import new_table, results
from quark.commands.results.counted import counted
from quark.errors import ConfigError
from quark.goals.efforts import BALANCED, FAST
from quark.onnx import ModelQuantizer
from quark.onnx.evaluation.recovery.search import Recovery, measure_text


@dataclass(frozen=True)
class Recovering:
    """How far to go; see `ModelQuantizer.recover`."""

    budget: str
    metric: str
    target: float | None
    quick: bool = False
    allow_wider: bool = False

    def run(
        self,
        quantizer: ModelQuantizer,
        model: Path,
        output: str,
        reader: Any,
        weights_alone: ModelQuantizer | None = None,
        without_samples: ModelQuantizer | None = None,
    ) -> tuple[str, Recovery]:
        """Write the best that is found, and print what each step gave; return what it is in words, and the search."""
        found = quantizer.recover(
            model, output, reader,
            budget=self.budget, metric=self.metric, target=self.target, quick=self.quick,
            allow_wider=self.allow_wider, weights_alone=weights_alone, without_samples=without_samples,
        )  # fmt: skip
        console = results()
        console.print(_table(found))
        console.print(_summary(found), highlight=False)
        types = [f"{count} {name} {kind}" for (name, kind), count in sorted(found.types.items())]
        return ", ".join(types) or "no Q/DQ", found


QUICK = Recovering("60s", "sqnr", None, quick=True)
"""What a file gets for which no configuration is given: at most a minute."""


def recovery_of(effort: str, has_data: bool) -> Recovering | None:
    """What an effort of a goal means."""
    if not has_data or effort == FAST:
        return None
    return QUICK if effort == BALANCED else Recovering("10m", "sqnr", None)


def asked(
    recover: bool, budget: str | None, metric: str | None, reach: float | None, allow_wider: bool = False
) -> Recovering | None:
    """What the options ask for; None without --recover. Raises ConfigError for an option that then says nothing."""
    if recover:
        return Recovering(budget or "10m", metric or "sqnr", reach, allow_wider=allow_wider)
    given = {"--budget": budget, "--metric": metric, "--reach": reach}
    for flag, value in (given | {"--allow-wider": allow_wider or None}).items():
        if value is not None:
            raise ConfigError(f"{flag} goes with --recover.")
    return None


def _table(found: Recovery) -> Table:
    measure = measure_text(found.metric, found.by_scores)
    title = f"Recovery: {measure} of {found.held_out} held-out samples, calibrated on {found.fitted}"
    table = new_table("step", "before", "after", "seconds", "result", title=title)
    for trial in found.trials:
        before, after = ("" if value is None else found.metric.text(value) for value in (trial.before, trial.after))
        table.add_row(trial.step, before, after, f"{trial.seconds:.1f}", trial.result)
    return table


def _summary(found: Recovery) -> str:
    measure = measure_text(found.metric, found.by_scores)
    text = f"{measure}: {found.metric.text(found.plain)} -> {found.metric.text(found.score)}"
    if found.target is not None:
        text += f"; the target of {found.metric.text(found.target)} is {'' if found.reached else 'not '}reached"
    return f"{text} (worst output, {counted(found.held_out, 'held-out sample')} of the calibration data)"
