"""Facts: what a program made of a file, one row for each program, format and scheme that somebody looked at.

A row is measured, or says that it is not: `known_by` is RUN where the program was run and its outputs were compared
with ours, SOURCE where only its loader was read, DOCUMENTED where its pages ask for such files. What has no row is not
known, and no goal chooses it. The rows are data: facts.tsv. `python -m benchmarks.facts` runs what is installed, says
which rows it could confirm, and writes a row of what nobody had run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Answer(Enum):
    """The behaviour of the program with the file."""

    RIGHT = "right"
    """It computes what the quantized model does."""
    LOADS = "loads"
    """It takes the file; nobody has compared what it computes."""
    REFUSED = "refused"
    """It does not load the file, or computes something else from it."""


class Evidence(Enum):
    """How it is known."""

    RUN = "run"
    SOURCE = "its source"
    DOCUMENTED = "its documentation"


@dataclass(frozen=True)
class Fact:
    """One row.

    Attributes:
        program, version: Who reads the file.
        form: How it is written: a value of --export-format, or "onnx-file" for an ONNX file that was one before.
        scheme: Name of a scheme, or of a configuration of the ONNX flow.
        answer, known_by: See there.
        date: Of the day when `python -m benchmarks.facts` last saw it; empty where it was another way.
        evidence: What was seen, or read.
    """

    program: str
    version: str
    form: str
    scheme: str
    answer: Answer
    known_by: Evidence
    date: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.answer.value} in {self.program} {self.version}, by {self.known_by.value}"


TABLE = Path(__file__).with_name("facts.tsv")
ONNX_FILE = "onnx-file"


def _fact(row: dict[str, str]) -> Fact:
    answer, known_by = Answer[row.pop("answer").upper()], Evidence[row.pop("known_by").upper()]
    return Fact(**row, answer=answer, known_by=known_by)


with TABLE.open(encoding="utf-8", newline="") as _file:
    FACTS: tuple[Fact, ...] = tuple(map(_fact, csv.DictReader(_file, delimiter="\t")))


def facts_of(program: str, forms: Iterable[str] | None = None) -> list[Fact]:
    """The rows of a program, of some forms only where they are given."""
    wanted = None if forms is None else set(forms)
    return [fact for fact in FACTS if fact.program == program and (wanted is None or fact.form in wanted)]
