"""A bfloat16 checkpoint to MXFP4, from file to file, against copying it and quantizing it.

The checkpoint is a Llama of `SMALL` and of twice as many layers, random, in several shards. Times are those of the
larger one minus those of the smaller: what starting, importing and reading config.json costs falls out, so that they
hold for checkpoints of any size.

CPU seconds, but of two workers, which are for the clock.

* `copy_seconds`: copying the files. `fake_seconds`: quantize_model and freeze of as many weights in memory.
* `seconds`: one worker of one thread. `time_ratio` is `seconds` / (copy + fake); at most 1 / 0.6.
* `two_workers_ratio`: two workers of one thread / one; at most 1 / 1.7 (where two cores are free).
* `peak_tensors`: the most resident memory of a process above what it has before its first tensor, in units of the
  largest tensor. Read from Linux's high-water mark.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HIDDEN, INTERMEDIATE, LAYERS, RUNS = 2048, 8192, 2, 3
TENSOR_BYTES = HIDDEN * INTERMEDIATE * 2


def checkpoint(folder: Path, layers: int, intermediate: int = INTERMEDIATE) -> int:
    """Write a random checkpoint; return how many weights its linear layers have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    return layers * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * intermediate)


def seconds_of(action: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    action()
    return clock() - start


class Seconds(NamedTuple):
    """Of one conversion: on the clock, and CPU seconds of all threads."""

    wall: float
    cpu: float


def convert(source: Path, output: Path, workers: int) -> Seconds:
    """What so many workers of one thread take."""
    import torch

    from quark.torch import LLMTemplate, ModelQuantizer

    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("mxfp4"))
    torch.set_num_threads(workers)
    shutil.rmtree(output, ignore_errors=True)
    used = time.process_time()
    wall = seconds_of(lambda: quantizer.direct_quantize_checkpoint(source, output, workers=workers), time.perf_counter)
    return Seconds(wall, time.process_time() - used)


def fake_seconds(weights: int) -> float:
    """quantize_model and freeze of this many weights, from the rate of four layers (after a warm-up)."""
    import torch

    from quark.torch import ModelQuantizer
    from quark.torch.quantization import OCP_MXFP4Spec, QConfig, QLayerConfig

    weight = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=weight)))
    for _ in range(2):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        seconds = seconds_of(lambda model=model: quantizer.freeze(quantizer.quantize_model(model)))  # type: ignore[misc]
    return seconds * weights / (4 * 4096 * 4096)


def peak_tensors(source: Path, output: Path) -> float:
    """The peak of this process while it converts, above its use before, in units of the largest tensor."""
    from quark.torch.flows import file2file

    before: list[int] = []
    inner = file2file._run

    def run(*args: object) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present use
        before.append(high_water_bytes())
        inner(*args)  # type: ignore[arg-type]
        before.append(high_water_bytes())

    file2file._run = run  # type: ignore[assignment]
    convert(source, output, 1)
    file2file._run = inner
    return (before[1] - before[0]) / TENSOR_BYTES


def high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        small = checkpoint(folder / "small", LAYERS)
        weights = checkpoint(folder / "large", 2 * LAYERS) - small
        peak = peak_tensors(folder / "small", folder / "out")
        sizes = ("small", "large")
        copies = [
            seconds_of(lambda s=s: shutil.copytree(folder / s, folder / "copy" / s))  # type: ignore[misc]
            for s in sizes
        ]
        # They take turns, so that a busy moment hits all of them.
        runs = [
            [convert(folder / size, folder / "out", workers) for workers in (1, 2) for size in sizes]
            for _ in range(RUNS)
        ]
        best = [Seconds(*map(min, zip(*times, strict=True))) for times in zip(*runs, strict=True)]
        one, two = best[:2], best[2:]
        fake = fake_seconds(weights)
    copy, seconds = copies[1] - copies[0], one[1].cpu - one[0].cpu
    walls = one[1].wall - one[0].wall, two[1].wall - two[0].wall
    result = {
        "benchmark": "file2file",
        "weights": weights,
        "copy_seconds": copy,
        "fake_seconds": fake,
        "seconds": seconds,
        "time_ratio": seconds / (copy + fake),
        "two_workers_seconds": walls[1],
        "two_workers_ratio": walls[1] / walls[0],
        "peak_tensors": peak,
        "whole_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
