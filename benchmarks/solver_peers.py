"""Solvers at real shapes, beside amd-quark, llm-compressor and auto-round: `python -m benchmarks.solver_peers`.

Random models of the shapes of a 1 billion Llama (three layers) or of one layer of 4096 x 14336, uint4 in groups of 128.
One process after the other. The environments of llm-compressor and auto-round are made where they are missing;
that of amd-quark is benchmarks/cases/setup_peer.sh's.

    CPU s, x forward     of the whole call, and over the float forward of the calibration data in the same process
    peak                 MB above the model
    layer error, KL      see cases/solvers.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import solvers
from benchmarks.tables import console

ROOT = Path(__file__).parents[1]
CASES = ROOT / "benchmarks" / "cases"
TORCH = "torch==2.13.0"
"""First and pinned: what depends on it would bring another build."""
MADE = {"llm-compressor": "llmcompressor", "auto-round": "auto-round"}
"""Package -> what is installed."""
ROWS = (
    ("quark", "gptq"),
    ("llm-compressor", "gptq"),
    ("amd-quark", "gptq"),
    ("quark", "awq"),
    ("amd-quark", "awq"),
    ("quark", "qronos"),
    ("quark", "gptaq"),
    ("auto-round", "tuned"),
)
"""Package and algorithm; those that compete stand together."""


def environment(package: str) -> Path | None:
    """The interpreter of a package; None where there is none."""
    if package == "quark":
        return Path(sys.executable)
    if package == "amd-quark":
        python = ROOT / ".venv-peer" / "bin" / "python"
        return python if python.exists() else None
    folder = ROOT / f".venv-{package}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, MADE[package]], check=True)
        (folder / "ready").touch()
    return python


def run(package: str, algorithm: str, options: list[str]) -> dict[str, Any]:
    """What one row measures, or why it does not."""
    python = environment(package)
    if python is None:
        return {"error": "no environment: benchmarks/cases/setup_peer.sh makes it"}
    foreign = package in MADE
    script = [str(CASES / "foreign_solvers.py"), package] if foreign else [str(CASES / "solvers.py")]
    variables = dict(os.environ)
    if package != "quark":
        variables.pop("PYTHONPATH", None)  # which may name this package
    done = subprocess.run(
        [str(python), *script, *options, algorithm], capture_output=True, text=True, check=False, env=variables
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:100]}
    return dict(json.loads(done.stdout.splitlines()[-1])[algorithm])


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(
        parents=[solvers.arguments()],
        conflict_handler="resolve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", metavar="PACKAGE", help="packages; all where none is given")
    args = parser.parse_args()
    options = ["--shape", args.shape, "--dtype", args.dtype, "--batches", str(args.batches)]
    title = f"{args.shape}, {args.dtype}, {args.batches} x {solvers.TOKENS} tokens"
    table = Table("package", "algorithm", "CPU s", "x forward", "wall s", "peak, MB", "layer error", "KL", title=title)
    for package, algorithm in ROWS:
        if args.only and package not in args.only:
            continue
        found = run(package, algorithm, options)
        if "error" in found:
            table.add_row(package, algorithm, found["error"])
            continue
        ratio = found["cpu_seconds"] / found["forward_cpu"]
        figures = (found["cpu_seconds"], ratio, found["seconds"], found["peak_extra_mb"])
        shown = [f"{value:.1f}" for value in figures] + [f"{found[name]:.5f}" for name in ("layer_error", "kl")]
        table.add_row(package, algorithm, *shown)
    console().print(table)


if __name__ == "__main__":
    main()
