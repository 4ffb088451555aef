"""What many processes take for a large checkpoint from file to file, from constants that are measured here.

    seconds(n) = start + max(CPU seconds a GB * largest share of n, (GB read + GB written) / GB a second of the storage)

    python -m benchmarks.process_costs          measures, checks the model with 2 and 4 processes, prints a table

Processes are compared by their CPU seconds, which other work on the machine does not change much; a table for machines
with a core for each process follows. The storage is the one that all processes share.
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


def written_share(source: Path, output: Path) -> float:
    """Bytes written for each byte read."""
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (output, source)]
    return sizes[0] / sizes[1]


def main() -> None:
    """Measure one process, predict several, and say how far off that is."""
    if len(sys.argv) > 1:
        as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    print_line = sys.stdout.write
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "float"
        checkpoint(source, 2)
        found = {}
        for count in (1, 2, 4):
            folder = Path(scratch) / str(count)
            folder.mkdir()
            found[count] = run_processes(count, source, folder / "out")
        written = written_share(source, Path(scratch) / "1" / "out")
    one = found[1][0]
    cost, start = one["work"] / one["bytes"] * GIGABYTE, one["start"]
    print_line(f"{SCHEME}: {cost:.2f} CPU s a GB, {start:.1f} s to start, {written:.3f} bytes written for one read\n")
    for count in (2, 4):
        largest = max(row["bytes"] for row in found[count])
        predicted = cost * largest / GIGABYTE
        measured = max(row["work"] for row in found[count])
        share = largest * count / one["bytes"]
        print_line(
            f"{count} processes: the largest share is {share:.3f} of an even one; its work {measured:.2f} CPU s, "
            f"predicted {predicted:.2f} ({measured / predicted - 1:+.0%})\n"
        )
    print_line("1 TB: workers of one core, minutes, by GB a second of the storage\n")
    for count in (1, 8, 64):
        minutes = [(start + max(cost * 1000 / count, 1000 * (1 + written) / speed)) / 60 for speed in (1, 5, 20)]
        print_line(f"{count:3d}  " + "  ".join(f"{value:7.1f}" for value in minutes) + "\n")


if __name__ == "__main__":
    main()
