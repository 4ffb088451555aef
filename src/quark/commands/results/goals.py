"""Tables and lines of a goal: what was chosen, what is known of its program, and how the result is run."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from quark.base.command_line import new_table
from quark.goals import GOALS, GoalChoice
from quark.goals.facts import Answer


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
