"""Tables and lines of what was chosen and found: by a goal, by a bit budget, by a recovery."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from quark.base.command_line import new_table, results
from quark.goals import GOALS, GoalChoice
from quark.goals.facts import Answer
from quark.goals.goal import WITHOUT_TOKENIZER
from quark.jobs.folders.compared.verdict import word_of_kl
from quark.report.text_chart import text_chart

if TYPE_CHECKING:
    from quark.onnx.search.recovery.search import Recovery
    from quark.torch.bit_budget.sensitivity import BudgetChoice, LayerGroup, SensitivityTable

DEPTHS = 3
"""Parts of a model, from its first block to its last, that a choice is shown for."""


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


def show_choice(table: SensitivityTable, choice: BudgetChoice) -> None:
    """Print what a budget chose, what that is predicted to cost, and what a little more would gain."""
    console, better = results(), table.knee(choice)
    console.print(choice_table(table, choice))
    console.draw(_choice_chart(table, choice, better))
    solved = choice.solved
    lines = [
        f"Predicted loss: {choice.loss:.3g} nats to nearest ({word_of_kl(choice.loss)}), about {solved:.2g} after a "
        f"solver such as Qronos ({word_of_kl(solved)})."
    ]
    if better is not None:
        more, share = (better.size - choice.size) / 1e6, better.loss / choice.loss
        lines.append(
            f"With --bits {better.bits:.4g}: +{more:.1f} MB, {share:.0%} of that loss ({word_of_kl(better.loss)})."
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def choice_table(table: SensitivityTable, choice: BudgetChoice) -> Table:
    """Return a table of the schemes of each kind of layer by depth, and of one scheme for all; losses are predicted."""
    shown = new_table("layers", "blocks", "schemes", "MB", "loss", title="Choice")
    for (kind, blocks), groups in _by_kind_and_depth(table.groups).items():
        names = [choice.schemes[group.layers[0]] for group in groups]
        counts = ", ".join(f"{name} x{count}" for name, count in Counter(names).most_common())
        size = sum(group.sizes[name] for group, name in zip(groups, names, strict=True))
        loss = math.fsum(group.losses[name] for group, name in zip(groups, names, strict=True))
        shown.add_row(kind, blocks, counts, f"{size / 1e6:.2f}", f"{loss:.2e}")
    shown.add_section()
    for candidate in table.candidates:
        uniform = table.uniform(candidate)
        if uniform is not None:
            bits = f"{candidate} ({uniform.bits:.3f} bits)"
            shown.add_row("all", "", bits, f"{uniform.size / 1e6:.2f}", f"{uniform.loss:.2e}")
    shown.add_row("chosen", "", f"{choice.bits:.3f} bits", f"{choice.size / 1e6:.2f}", f"{choice.loss:.2e}")
    return shown


def _choice_chart(table: SensitivityTable, choice: BudgetChoice, better: BudgetChoice | None) -> str:
    """A chart of the choice among one scheme for all layers and a larger budget; "" where there is nothing beside it.

    Args:
        table: What was chosen from.
        choice: Is marked.
        better: The larger one, if there is one.
    """
    others = {name: table.uniform(name) for name in table.candidates}
    if better is not None:
        others[f"--bits {better.bits:.4g}"] = better
    found = {"chosen": choice, **{name: other for name, other in others.items() if other is not None}}
    points = [(name, each.size / 1e6, each.loss) for name, each in found.items()]
    return text_chart(points, "Predicted loss, nats; lower is better.", "MB", log=True, marked={"chosen"})


def _by_kind_and_depth(groups: Sequence[LayerGroup]) -> dict[tuple[str, str], list[LayerGroup]]:
    """Names of layers without their block, and first and last block of a third of the model -> groups."""
    numbers = {group.layers[0]: _block_of(group.layers[0]) for group in groups}
    count = 1 + max((number for number in numbers.values() if number is not None), default=0)
    found: defaultdict[tuple[str, str], list[LayerGroup]] = defaultdict(list)
    for group in groups:
        block = numbers[group.layers[0]]
        kinds = dict.fromkeys(layer.rpartition(".")[2] for layer in group.layers)
        part = "" if block is None else DEPTHS * block // count
        found[", ".join([*kinds][:3]) + (" ..." if len(kinds) > 3 else ""), str(part)].append(group)
    named = {}
    for (kind, _), members in sorted(found.items(), key=lambda item: item[0][1]):
        inside = [number for group in members if (number := numbers[group.layers[0]]) is not None]
        low, high = min(inside, default=0), max(inside, default=0)
        named[kind, "" if not inside else f"{low}" if low == high else f"{low} to {high}"] = members
    return named


def _block_of(layer: str) -> int | None:
    """The number of the block that a layer is of, by its name; None where there is none."""
    return next((int(part) for part in layer.split(".") if part.isdigit()), None)


def recovery_table(recovery: Recovery) -> Table:
    """Return a table of the results of the steps of a search."""
    from quark.onnx.search.recovery.search import measure_text  # imports onnx: the flow has run

    measure = measure_text(recovery.metric, recovery.by_scores)
    title = f"Recovery: {measure} of {recovery.held_out} samples to choose by, calibrated on {recovery.fitted}"
    table = new_table("step", "before", "after", "seconds", "result", title=title)
    for trial in recovery.trials:
        before, after = ("" if value is None else recovery.metric.text(value) for value in (trial.before, trial.after))
        table.add_row(trial.step, before, after, f"{trial.seconds:.1f}", trial.result)
    return table


def recovery_line(recovery: Recovery) -> str:
    """Before, if that was measured, after, and whether the target is reached."""
    from quark.onnx.search.recovery.search import measure_text, reaches  # imports onnx: the flow has run

    measure = measure_text(recovery.metric, recovery.by_scores)
    before = "" if math.isnan(recovery.plain) else f"{recovery.metric.text(recovery.plain)} -> "
    text = f"{measure}: {before}{recovery.metric.text(recovery.score)}"
    if recovery.target is not None:
        here = reaches(recovery.score, recovery.target, recovery.metric)
        how = "reached" if recovery.reached else "reached on these samples alone" if here else "not reached"
        text += f"; the target of {recovery.metric.text(recovery.target)} is {how}"
    return f"{text} (worst output, {_where_measured(recovery)})"


def _where_measured(recovery: Recovery) -> str:
    """Say on which samples the last figure of a search was measured, and what others may show."""
    least = (
        "" if math.isnan(recovery.least) else f"; new data most often: {recovery.metric.text(recovery.least)} or more"
    )
    if recovery.by_turns:
        return f"{counted(recovery.by_turns, 'sample')}, each with a file that was not calibrated with it{least}"
    if recovery.last_looked:
        return f"{counted(recovery.last_looked, 'sample')} that nothing was calibrated or chosen by{least}"
    return f"{counted(recovery.held_out, 'sample')} that steps were chosen by: new data may show less"
