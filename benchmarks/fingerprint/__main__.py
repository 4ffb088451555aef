"""The command line: print, save and compare fingerprints."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "COLUMNS": "120",  # the width of printed tables
    "NO_COLOR": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""What every process starts with, so that one machine gives the same bytes again."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name fits any pattern; without patterns every name does."""
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def fingerprints(patterns: Sequence[str], jobs: int) -> Iterator[tuple[str, str]]:
    """Names and fingerprints of the outputs that match any pattern; one that breaks gives its traceback on stderr."""
    # Loads torch and onnxruntime, which read the environment that `main` sets.
    from benchmarks.fingerprint import worker

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        print(f"fingerprints of {pool.submit(worker.source).result()}", file=sys.stderr)
        chosen = [name for name in pool.submit(worker.names).result() if matches(name, patterns)]
        for name, future in [(name, pool.submit(worker.fingerprint, name)) for name in chosen]:
            error = future.exception()
            if error is not None:
                traceback.print_exception(error)
            yield name, f"broken  {type(error).__name__}" if error else future.result()


def of_revision(revision: str, patterns: Sequence[str], jobs: int) -> dict[str, str]:
    """Fingerprints by this script of the sources of a git revision."""
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as folder:
        tree, saved = Path(folder) / "tree", Path(folder) / "saved.txt"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            command = [sys.executable, "-m", "benchmarks.fingerprint", "--save", str(saved), "--jobs", str(jobs)]
            command += [f"--only={pattern}" for pattern in patterns]
            paths = {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT}"}
            subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, stdout=subprocess.DEVNULL, check=True)
            return read(saved)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def read(file: Path) -> dict[str, str]:
    """Fingerprints that were saved, by name."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, value = line.split(maxsplit=1)
        found[name] = value
    return found


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Lines for all names whose fingerprints differ or are missing on one side."""
    lines = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            lines += [f"{sign} {name}  {side[name]}" for sign, side in (("-", before), ("+", after)) if name in side]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print fingerprints or differences; 1 if anything differs or is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fingerprint", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="pattern of names (fnmatch); repeatable")
    parser.add_argument("--save", type=Path, help="file to write the fingerprints to")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--compare", type=Path, help="saved file: print the differences from it")
    other.add_argument("--against", help="git revision: print the differences from its sources")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    before: dict[str, str] | None = None
    if options.compare:
        before = {name: value for name, value in read(options.compare).items() if matches(name, options.only)}
    elif options.against:
        before = of_revision(options.against, options.only, options.jobs)
    found = {}
    for name, value in fingerprints(options.only, options.jobs):
        found[name] = value
        if before is None:
            print(f"{name}  {value}", flush=True)
    if options.save:
        options.save.write_text("".join(f"{name}  {value}\n" for name, value in found.items()), encoding="utf-8")
    lines = differences(before, found) if before is not None else []
    for line in lines:
        print(line)
    return int(bool(lines) or any(value.startswith("broken") for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
