"""`python -m benchmarks.facts`: which rows of quark/goals/facts.tsv the programs of this machine confirm.

A row that is confirmed gets the version and the day with --write, and so does a scheme that had no row. A row that is
not is printed with what came instead; it is for a reader to judge, and the exit code is 1.

With --source, the folder of vLLM's package or of SGLang's, the tables of layers are compared with its models: those
that it builds in float (quark/goals/float_layers.tsv, which --write replaces), those that it makes one matrix of
(fused_layers.tsv), and names of experts (expert_names.tsv), in which --write sets the version of what is confirmed.

With --libraries, what quark takes of transformers, diffusers, accelerate and huggingface_hub beside their documented
names is listed, and whether the installed versions have it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.facts.checks import CHECKS, DiffersError, installed
from benchmarks.facts.libraries import print_libraries
from benchmarks.facts.server_source import read_source
from quark.core.schemes import SCHEMES
from quark.errors import QuarkError
from quark.goals.facts import FACTS, ONNX_FILE, TABLE, Answer, Evidence, Fact


def main() -> int:
    """Run the checks of what is installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.facts", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="programs, or schemes; default: all")
    parser.add_argument("--write", action="store_true", help="write what was seen into the table")
    parser.add_argument(
        "--source", type=Path, help="folder of vLLM's or SGLang's package: read its layers anew, and run nothing"
    )
    parser.add_argument("--libraries", action="store_true", help="list the private names that quark takes of others")
    asked = parser.parse_args()
    if asked.libraries:
        return print_libraries()
    if asked.source is not None:
        return read_source(asked.source, asked.write)
    rows = {(fact.program, fact.form, fact.scheme): fact for fact in FACTS}
    confirmed, wrong = 0, 0
    for (program, form), (package, check) in CHECKS.items():
        version = installed(package)
        if version is None:
            print(f"{program}: not installed, {sum(key[:2] == (program, form) for key in rows)} rows as they were")
            continue
        known = [scheme for key_program, key_form, scheme in rows if (key_program, key_form) == (program, form)]
        names = known if form == ONNX_FILE else list(dict.fromkeys([*known, *SCHEMES]))
        for name in names:
            if asked.names and program not in asked.names and name not in asked.names:
                continue
            old = rows.get((program, form, name))
            seen = Fact(program, version, form, name, Answer.RIGHT, Evidence.RUN, _today(), "")
            try:
                seen = replace(seen, evidence=check(name))
            except (QuarkError, DiffersError, RuntimeError, ValueError) as error:
                seen = replace(seen, answer=Answer.REFUSED, evidence=" ".join(str(error).split())[:120])
            if old is not None and old.answer is not seen.answer:
                wrong += 1
                print(f"{program} {version}, {form}, {name}: {old.answer.value} before, now {seen.evidence}")
            elif old is not None or seen.answer is Answer.RIGHT:
                confirmed += 1
                rows[program, form, name] = seen
                print(f"{program} {version}, {form}, {name}: {'' if old else 'new, '}{seen.evidence}")
    print(f"{confirmed} rows confirmed, {wrong} not")
    if asked.write:
        _write(sorted(rows.values(), key=lambda fact: (fact.program.lower(), fact.form, fact.answer.name, fact.scheme)))
    return 1 if wrong else 0


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _write(facts: list[Fact]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(asdict(facts[0]))
        for fact in facts:
            row = {**asdict(fact), "answer": fact.answer.name.lower(), "known_by": fact.known_by.name.lower()}
            writer.writerow(row.values())


if __name__ == "__main__":
    sys.exit(main())
