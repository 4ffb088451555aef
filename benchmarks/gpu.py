"""`make gpu`: what a GPU computes and how fast, beside the CPU and against limits of the same run, in eight minutes.

    contracts   schemes, algorithms, caches, streaming, GGUF, generation, acceleration: the outputs of the CPU
    kernels     those that solve blocks of columns, beside the plain form
    ratios      shares of the copy's speed, GPTQ of a block of Llama-8B, tokens a second

    python -m benchmarks.gpu                    all of it, one table of markdown
    python -m benchmarks.gpu kernels            a part
    python -m benchmarks.gpu --only gptq fp8    cases with these words in their names

Each case is told on stderr as it ends, and the table comes last. What there is no time for is listed as not run. The
exit code is 1 where a case fails or is beyond its bound. A case that has begun is not interrupted.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.gpu_parts.rows import Found, Report, one_line

PARTS = ("contracts", "kernels", "ratios")
LIMIT = 460.0
"""Seconds in all, less than eight minutes by what a last case takes."""
NO_GPU = "This machine has no GPU that PyTorch sees: nothing was run."


def title(device: torch.device) -> str:
    """The device, and the versions that a figure depends on."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "is not there"
    toolkit = torch.version.hip or torch.version.cuda or "of the CPU"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__} ({toolkit}), triton {version}"


def run_part(name: str, report: Report) -> None:
    """All cases of a part; one that cannot be imported is a row."""
    import importlib

    try:
        importlib.import_module(f"benchmarks.gpu_parts.{name}").run(report)
    except Exception as error:  # noqa: BLE001 - the other parts are still to be seen
        report.note(name, "all", Found(one_line(error), verdict="FAILS"))


def main() -> int:
    """Run the parts and print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="some of: " + ", ".join(PARTS))
    parser.add_argument("--only", nargs="*", default=(), metavar="WORD", help="cases whose names hold one of these")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the program itself")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds in all (default: %(default)s)")
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; possible: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.stdout.write(NO_GPU + "\n")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    report = Report(device, args.limit, args.small, tuple(args.only))
    try:
        for name in args.parts or PARTS:
            run_part(name, report)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: the table has what was run.\n")
    sys.stdout.write(f"{title(device)}{', small sizes' if args.small else ''}\n\n{report.table()}\n")
    return int(report.failed() > 0)


if __name__ == "__main__":
    sys.exit(main())
