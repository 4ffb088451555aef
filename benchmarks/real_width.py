"""A layer of 4096 x 14336 and a table of 128,256 rows: what is written in parts beside what is written at once.

    python -m benchmarks.real_width SCRATCH             all jobs
    python -m benchmarks.real_width SCRATCH gptq        those whose options hold a word

The model is the wide one of `benchmarks.estimates`, made in SCRATCH where it is not there; of its block, `down_proj`
alone is quantized. Each job runs twice, in a process of its own: with the parts as they are, and with each part of
`tests.models.parts` as large as AT_ONCE, which is more than the layer has in elements and an eighth of the table. The
columns of a compiled block are LONGER times as many: of all 14,336 at once its loops would read each row from memory.
For each job this prints how many bytes of its tensors differ, and of each layer that is solved the share of its output
that is lost in parts and at once. Rounding to nearest has to give the same bytes; a solver sums in another order.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.estimates import ROOT, model_folder

AT_ONCE, LONGER = 1 << 26, 8
SAMPLES = 4
ALONE = ("--exclude", "*self_attn*", "--exclude", "*gate_proj", "--exclude", "*up_proj")

JOBS = [
    "--scheme q8_0 --export-format gguf",
    "--scheme iq4_xs --export-format gguf --calib --exclude *embed_tokens --exclude lm_head",
    "--scheme int4_wo_128 --export-format gptq",
    "--scheme int4_wo_128 --export-format gptq --algorithm gptq --calib",
]


def job(folder: Path, words: str, output: Path, at_once: bool) -> None:
    """Run a job in this process, and print what it takes."""
    from quark.cli import main as command  # not at the head: what it imports counts in the peak

    if at_once:
        from quark.core.solvers import coupled
        from quark.core.solvers.columns.block_solvers import CompiledBlocks
        from tests.models.parts import PARTS

        for owner, name, _ in PARTS:
            part = getattr(owner, name)
            compiled = owner is CompiledBlocks or (owner is coupled and name == "BLOCK")
            setattr(owner, name, LONGER * part if compiled else max(part, AT_ONCE))
    options = words.split()
    if "--calib" in options:
        at = options.index("--calib") + 1
        options[at:at] = [str(ROOT / "README.md"), "--samples", str(SAMPLES), "--stream"]
    log = output.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    began = time.process_time()
    sys.argv = ["quark", "quantize", str(folder), *options, *ALONE, "-o", str(output), "--log-file", str(log)]
    sys.argv += ["--force", "--no-verdict"]
    command()
    used = resource.getrusage(resource.RUSAGE_SELF)
    took = f"{time.process_time() - began:.0f} CPU s, peak {used.ru_maxrss * 1024 / 1e9:.2f} GB"
    print(f"  {'at once' if at_once else 'in parts':8s} {took}", flush=True)


def tensors(output: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The bytes of each tensor, one after the other."""
    if output.is_file():
        from quark.gguf.reader import open_gguf

        for tensor in open_gguf(output).tensors:
            yield tensor.name, tensor.data.reshape(-1).view(np.uint8)
        return
    import torch
    from safetensors import safe_open

    for file in sorted(output.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy()


def lost(log: Path) -> dict[str, float]:
    """Layer -> share of its output that is lost, of a job that solved some."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    layers = [layer for event in events if event["event"] == "block" for layer in event["layers"]]
    return {layer["layer"]: layer["error_after"] for layer in layers}


def compared(outputs: Sequence[Path]) -> None:
    """Print what differs between two outputs of a job."""
    total = 0
    for (name, one), (other_name, other) in zip(*map(tensors, outputs), strict=True):
        assert name == other_name and one.shape == other.shape, (name, other_name)
        total += len(one)
        if different := int(np.count_nonzero(one != other)):
            print(f"  {name}: {different} of {len(one)} bytes differ")
    print(f"  {total} bytes compared")
    in_parts, at_once = (lost(output.with_suffix(".jsonl")) for output in outputs)
    for layer, share in in_parts.items():
        print(f"  {layer}: of its output is lost {share:.6g} in parts, {at_once[layer]:.6g} at once", flush=True)


def main(scratch: Path, word: str = "") -> None:
    """Run the jobs whose options hold a word."""
    scratch.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")

    def alone(task: Any, *arguments: Any) -> None:
        process = spawn.Process(target=task, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)

    alone(model_folder, "wide", scratch / "wide")
    for words in JOBS:
        if word not in words:
            continue
        print(words, flush=True)
        outputs = [scratch / f"{name}.gguf" if "gguf" in words else scratch / name for name in ("parts", "once")]
        for output, at_once in zip(outputs, (False, True), strict=True):
            alone(job, scratch / "wide", words, output, at_once)
        compared(outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
