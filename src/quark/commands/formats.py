"""`quark formats`: what --export-format takes, and which programs read it."""

from __future__ import annotations

from quark.base.command_line import new_table, results
from quark.commands.results.tables import counted
from quark.goals.facts import FACTS, Answer
from quark.jobs.words import FILE_FORMS, FOLDER_FORMS


def formats() -> None:
    """List the formats of a quantized model folder, and the programs that are known to load them.

    Example: quark formats
    """
    table = new_table("format", "makes", "loaded by")
    for form in (*FOLDER_FORMS, *FILE_FORMS):
        counts: dict[str, int] = {}
        for fact in FACTS:
            if fact.form == form and fact.answer is not Answer.REFUSED:
                counts[fact.program] = counts.get(fact.program, 0) + 1
        readers = ", ".join(f"{program} ({counted(count, 'scheme')})" for program, count in counts.items())
        table.add_row(form, "a folder of safetensors" if form in FOLDER_FORMS else "one file", readers)
    results().print(table)
