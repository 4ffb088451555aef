"""What a recovery of an ONNX file gave: a table of its steps, and a line."""

from __future__ import annotations

from rich.table import Table

from quark.base.command_line import new_table
from quark.commands.results.counted import counted
from quark.onnx.search.recovery.search import Recovery, measure_text


def recovery_table(found: Recovery) -> Table:
    """What each step gave."""
    measure = measure_text(found.metric, found.by_scores)
    title = f"Recovery: {measure} of {found.held_out} held-out samples, calibrated on {found.fitted}"
    table = new_table("step", "before", "after", "seconds", "result", title=title)
    for trial in found.trials:
        before, after = ("" if value is None else found.metric.text(value) for value in (trial.before, trial.after))
        table.add_row(trial.step, before, after, f"{trial.seconds:.1f}", trial.result)
    return table


def recovery_line(found: Recovery) -> str:
    """Before, after, and whether the target is reached."""
    measure = measure_text(found.metric, found.by_scores)
    text = f"{measure}: {found.metric.text(found.plain)} -> {found.metric.text(found.score)}"
    if found.target is not None:
        text += f"; the target of {found.metric.text(found.target)} is {'' if found.reached else 'not '}reached"
    return f"{text} (worst output, {counted(found.held_out, 'held-out sample')} of the calibration data)"
