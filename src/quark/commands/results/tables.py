"""Tables and lines of what was chosen and found: by a goal, by a bit budget, by a recovery."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from quark.base.command_line import new_table
from quark.goals import GOALS, GoalChoice
from quark.goals.facts import Answer
from quark.goals.goal import WITHOUT_TOKENIZER

if TYPE_CHECKING:
    from quark.onnx.search.recovery.search import Recovery
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable


def counted(count: int, noun: str) -> str:
    """Return "1 sample", "2 samples".

    Args:
        count: How many.
        noun: What is counted, in the singular; its plural ends in s.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def choice_rows(choice: GoalChoice) -> Table:
    """Return a table of the choice for a goal, with its reasons."""
    table = new_table("", "chosen", "why", title=f"For {choice.goal.program}")
    for row in choice.rows():
        table.add_row(*row)
    return table


def serve_lines(choice: GoalChoice, path: Path | str, model: Path) -> str:
    """The last lines: how to run what was made.

    Args:
        choice: What was chosen for the program.
        path: What the program opens.
        model: The folder or file that lies there, or that it will be made of.
    """
    if model.is_file():
        return f"run it: {choice.command(str(path))}"
    from quark.torch.model.folder_files import has_tokenizer  # imports torch, as what ran before did

    whole = has_tokenizer(model) or not choice.defaults.serve_tokenizer
    command = choice.command(str(path), whole)
    return f"run it: {command}" if whole else f"run it: {command}\n{WITHOUT_TOKENIZER.format(out=path)}"


def facts_table(goal: str, onnx: bool) -> Table:
    """Every scheme that somebody looked at for a goal."""
    table = new_table("scheme", "format", "answer", "known by", title=f"In {GOALS[goal].program}")
    for fact in sorted(GOALS[goal].facts(onnx), key=lambda fact: fact.answer is Answer.REFUSED):
        table.add_row(fact.scheme, fact.form, f"{fact.answer.value} in {fact.version}", fact.known_by.value)
    return table


def choice_table(table: SensitivityTable, choice: BudgetChoice) -> Table:
    """Return a table of the scheme of each group, and of the errors that one scheme for all would give."""
    shown = new_table("layers", "scheme", "MB", "loss", title="Choice")
    for group in table.groups:
        name = choice.schemes[group.layers[0]]
        leaves = [layer.rpartition(".")[2] for layer in group.layers]
        more = f" ... {leaves[-1]}" if len(leaves) > 1 else ""
        shown.add_row(f"{group.layers[0]}{more}", name, f"{group.sizes[name] / 1e6:.2f}", f"{group.losses[name]:.2e}")
    shown.add_section()
    for candidate in table.candidates:
        uniform = table.uniform(candidate)
        if uniform is not None:
            shown.add_row(
                "all", f"{candidate} ({uniform.bits:.3f} bits)", f"{uniform.size / 1e6:.2f}", f"{uniform.loss:.2e}"
            )
    shown.add_row("chosen", f"{choice.bits:.3f} bits", f"{choice.size / 1e6:.2f}", f"{choice.loss:.2e}")
    return shown


def recovery_table(recovery: Recovery) -> Table:
    """Return a table of the results of the steps of a search."""
    from quark.onnx.search.recovery.search import measure_text  # imports onnx: the flow has run

    measure = measure_text(recovery.metric, recovery.by_scores)
    title = f"Recovery: {measure} of {recovery.held_out} held-out samples, calibrated on {recovery.fitted}"
    table = new_table("step", "before", "after", "seconds", "result", title=title)
    for trial in recovery.trials:
        before, after = ("" if value is None else recovery.metric.text(value) for value in (trial.before, trial.after))
        table.add_row(trial.step, before, after, f"{trial.seconds:.1f}", trial.result)
    return table


def recovery_line(recovery: Recovery) -> str:
    """Before, after, and whether the target is reached."""
    from quark.onnx.search.recovery.search import measure_text  # imports onnx: the flow has run

    measure = measure_text(recovery.metric, recovery.by_scores)
    text = f"{measure}: {recovery.metric.text(recovery.plain)} -> {recovery.metric.text(recovery.score)}"
    if recovery.target is not None:
        text += (
            f"; the target of {recovery.metric.text(recovery.target)} is {'' if recovery.reached else 'not '}reached"
        )
    return f"{text} (worst output, {counted(recovery.held_out, 'held-out sample')} of the calibration data)"
