"""What many processes take for a large checkpoint from file to file, from constants that are measured here.

    work(n)    = CPU seconds a GB * GB of the largest share of n
    seconds(n) = max(s * (start + work(n)), s * start + (GB read + GB written) / GB a second of the storage)

s is how many processes share a core, at least 1: each of them starts for itself.

    python -m benchmarks.process_costs          measures, checks the model with 2 and 4 processes, prints a table

Processes are compared by their CPU seconds, the fewest of some runs: other work on the machine adds to them (caches
that are shared, pages that are waited for), and takes nothing away. A table for machines with a core for each process
follows. The storage is the one that all processes share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cases.file2file import checkpoint

SCHEME = "mxfp4"
GIGABYTE = 1e9
RUNS = 3


def as_rank(source: Path, output: Path) -> None:
    """Convert as one of the processes that torchrun started; print what this one took."""
    import torch

    from quark.torch import LLMTemplate, ModelQuantizer, processes
    from quark.torch.flows import file2file

    torch.set_num_threads(1)
    work, taken = file2file._run, {}

    def run(conversion: file2file.Conversion, families: list[file2file.Family], *options: object) -> None:
        before = time.process_time()
        work(conversion, families, *options)  # type: ignore[arg-type]
        taken["work"] = time.process_time() - before
        items = [item for family in families for item in family]
        taken["bytes"] = sum(torch.Size(item.shape).numel() * item.dtype.itemsize for item in items)

    file2file._run = run
    with processes():
        ModelQuantizer(LLMTemplate.get("auto").get_config(SCHEME)).direct_quantize_checkpoint(source, output)
    sys.stdout.write(json.dumps({**taken, "start": time.process_time() - taken["work"]}) + "\n")


def run_processes(count: int, source: Path, output: Path) -> list[dict[str, float]]:
    """What each of so many processes took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["--log-dir", str(output.parent / "logs"), "--redirects", "1"]
    # As a module from the root: the ranks import what this file imports.
    command += ["--module", "benchmarks.process_costs", str(source), str(output)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    rows = [
        json.loads(line)
        for file in sorted(output.parent.glob("logs/**/stdout.log"))
        for line in file.read_text().splitlines()
    ]
    assert len(rows) == count, rows
    return rows


def fewest(count: int, source: Path, scratch: Path) -> dict[str, float]:
    """The process with the most work of `count`: what it read, and the fewest CPU seconds of some runs."""
    runs = []
    for run in range(RUNS):
        folder = scratch / f"{source.name}_{count}_{run}"
        folder.mkdir()
        rows = run_processes(count, source, folder / "out")
        runs.append({key: max(row[key] for row in rows) for key in rows[0]})
    return {key: min(run[key] for run in runs) for key in runs[0]}


def written_share(source: Path, output: Path) -> float:
    """Bytes written for each byte read."""
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (output, source)]
    return sizes[0] / sizes[1]


def main() -> None:
    """Measure one process, predict several, and say how far off that is."""
    if len(sys.argv) > 1:
        as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "float"
        checkpoint(source, 2)
        found = {count: fewest(count, source, Path(scratch)) for count in (1, 2, 4)}
        written = written_share(source, Path(scratch) / "float_1_0" / "out")
    report(found.pop(1), found, written)


Taken = dict[str, float]
"""What one process took: bytes, CPU seconds of the work and of the start."""


def report(one: Taken, several: dict[int, Taken], written: float) -> None:
    """Print the constants, what they predict for several processes, and a table."""
    print_line = sys.stdout.write
    cost, start = one["work"] / one["bytes"] * GIGABYTE, one["start"]
    print_line(f"{SCHEME}: {cost:.2f} CPU s a GB, {start:.1f} s to start, {written:.3f} bytes written for one read\n")
    for count, largest in several.items():
        predicted = cost * largest["bytes"] / GIGABYTE
        print_line(
            f"{count} processes: the largest share is {largest['bytes'] * count / one['bytes']:.3f} of an even one; "
            f"its work {largest['work']:.3f} CPU s, predicted {predicted:.3f} "
            f"({largest['work'] / predicted - 1:+.0%})\n"
        )
    print_line("1 TB: workers of one core, minutes, by GB a second of the storage\n")
    for count in (1, 8, 64):
        work = start + cost * 1000 / count
        minutes = [max(work, start + 1000 * (1 + written) / speed) / 60 for speed in (1, 5, 20)]
        print_line(f"{count:3d}  " + "  ".join(f"{value:7.1f}" for value in minutes) + "\n")


if __name__ == "__main__":
    main()
