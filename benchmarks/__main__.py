"""`make bench`: each measurement with quark and, beside it, with the peer in its own virtual environment.

    python -m benchmarks                    everything
    python -m benchmarks onnx kernels       parts, or cases of them
    python -m benchmarks --store            and keep the ratios, for the next release

The scripts in cases/ use documented names only, so one script measures both. Every figure is a ratio against a
limit that is measured in the same process (cloning the weights, the float forward, importing torch), of CPU seconds of
one thread, which holds on a busy machine too; what several workers gain is for the clock. What is more than 5 % worse
than at the last release on such a machine (with AMX, or without) is measured once more, and comes first if it stays so.
The peer's environment is made by cases/setup_peer.sh; without it only quark is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.algorithm_table import algorithm_table
from benchmarks.figures import ACCURACY_SCHEMES, FIGURES, PARTS, Figure
from benchmarks.stored import Worse, kind_of_machine, load, store, worse
from benchmarks.tables import console

CASES = Path(__file__).parent / "cases"
PEER = Path(__file__).parent.parent / ".venv-peer" / "bin" / "python"
MODULES = {"real_models": ["-m", "benchmarks.real_models", "--json"]}
"""Cases that are no script: they have peers of their own."""
SCRIPTS = {case: ["accuracy.py", *schemes] for case, schemes in ACCURACY_SCHEMES.items()}
"""Cases that are a script with arguments; the others are one of their own name without."""
Results = dict[str, dict[str, Any] | None]


def run(python: Path | str, case: str) -> dict[str, Any] | None:
    """The JSON line that a case prints last, or None if it fails."""
    script, *arguments = SCRIPTS.get(case, [f"{case}.py"])
    command = [str(python), *MODULES.get(case, [str(CASES / script), *arguments])]
    # Modules are compiled when a package is installed: no start of one is the compiling of each.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"  # threads that wait for each other count as work in CPU seconds
    if Path(python) == PEER:
        environment.pop("PYTHONPATH", None)  # which may name this package: else quark would be measured twice
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def cases_of(names: list[str]) -> list[str]:
    """The cases of parts and of cases by name; of nothing, all. Raises ValueError for another name."""
    known = [case for cases in PARTS.values() for case in cases]
    if unknown := [name for name in names if name not in PARTS and name not in known]:
        raise ValueError(f"no part {', '.join(unknown)}; possible: {', '.join(dict.fromkeys([*PARTS, *known]))}")
    return list(dict.fromkeys(case for name in names or PARTS for case in PARTS.get(name, (name,))))


def measure(cases: list[str], with_peer: bool) -> tuple[Results, Results, dict[str, float]]:
    """The results of quark and of the peer, and the seconds that each case took."""
    ours: Results = {}
    theirs: Results = {}
    seconds = {}
    for case in cases:
        start = time.perf_counter()
        ours[case] = run(sys.executable, case)
        theirs[case] = run(PEER, case) if with_peer and case not in MODULES else None
        seconds[case] = time.perf_counter() - start
    return ours, theirs, seconds


def again(ours: Results, figures: list[Figure], before: dict[str, float]) -> list[Worse]:
    """What is worse than at the last release in two measurements; the better one of each case stays in `ours`."""
    for case in dict.fromkeys(found.figure.case for found in worse(figures, ours, before)):
        second = {**ours, case: run(sys.executable, case)}
        first_worse, second_worse = worse(figures, ours, before), worse(figures, second, before)
        if second[case] is not None and len(second_worse) < len(first_worse):
            ours[case] = second[case]
    return worse(figures, ours, before)


def figure_table(figures: list[Figure], ours: Results, theirs: Results, before: dict[str, float]) -> Table:
    """A row for each figure."""
    table = Table("figure", "quark", "limit", "", "last release", "peer", title="Benchmarks: lower is better")
    for figure in figures:
        mine, other = figure.value(ours[figure.case]), figure.value(theirs[figure.case])
        verdict = "FAILED" if mine is None else "ok" if mine <= figure.limit else "MISSED"
        values = (mine, figure.limit, before.get(figure.key), other)
        shown = ["-" if v is None else f"{v:.3g}{figure.unit}" for v in values]
        table.add_row(figure.name, *shown[:2], verdict, *shown[2:])
    return table


def main() -> None:
    """Run the cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="part", help="some of: " + ", ".join(PARTS))
    parser.add_argument("--no-peer", action="store_true", help="measure quark only")
    parser.add_argument("--store", action="store_true", help="keep the ratios as those of this release")
    args = parser.parse_args()
    try:
        cases = cases_of(args.names)
    except ValueError as error:
        parser.error(str(error))
    with_peer = PEER.exists() and not args.no_peer
    figures = [figure for figure in FIGURES if figure.case in cases]
    before = load()
    ours, theirs, seconds = measure(cases, with_peer)
    output = console()
    if not before:
        kind = kind_of_machine()
        output.print(f"Nothing to compare with: no ratios of a release are stored for a machine with {kind}.")
    if lost := again(ours, figures, before):
        table = Table("figure", "now", "last release", title="Worse than at the last release by more than 5 %")
        for found in lost:
            table.add_row(found.figure.name, f"{found.now:.3g}", f"{found.before:.3g}")
        output.print(table)
    output.print(figure_table(figures, ours, theirs, before))
    if (algorithms := ours.get("onnx_algorithms")) is not None:
        output.print(algorithm_table(algorithms, theirs["onnx_algorithms"]))
    output.print("Seconds: " + ", ".join(f"{case} {took:.0f}" for case, took in seconds.items()) + ".")
    if not with_peer:
        output.print("The peer was not measured: benchmarks/cases/setup_peer.sh makes its environment.")
    if args.store:
        store(figures, ours)


if __name__ == "__main__":
    main()
