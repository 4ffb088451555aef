"""Static w8a8 of a checkpoint folder, streamed block by block from disk against the model in memory.

* `time_ratio`: streaming / loading, quantizing and exporting in memory, one after the other in one process, both after
  a warm-up on the smallest model; at most 1.2.
* `memory_growth`: peak memory of streaming twice as many blocks / of so many; at most 1.1. In a process that does
  nothing else, above what it holds before each; read from Linux's high-water mark, the least of PEAKS. Under ALLOCATOR,
  as pieces that malloc keeps for later move a peak by a fifth from run to run.
* `peak_blocks`: that peak in units of one block's float weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quark.torch.checkpoint.opened import OpenedFolder

HIDDEN, INTERMEDIATE, LAYERS, BATCHES, TOKENS = 512, 1536, 6, 8, 256
PEAKS = 2
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""For glibc: a tensor takes pages of its own, and gives them back."""
BLOCK_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)


def checkpoint(folder: Path, layers: int) -> None:
    """Write a random float32 Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="50MB")


def batches() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 1024, (1, TOKENS), generator=generator) for _ in range(BATCHES)]


def streamed(source: Path, output: Path) -> float:
    from quark.torch import LLMTemplate
    from quark.torch.flows.from_disk import stream

    start = time.process_time()
    stream(LLMTemplate.get("auto").get_config("int8"), OpenedFolder(source), output, batches(), overwrite=True)
    return time.process_time() - start


def in_memory(source: Path, output: Path) -> float:
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    start = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8"))
    export_safetensors(quantizer.quantize_model(model, batches()), output, overwrite=True)
    return time.process_time() - start


def least_peaks(warm: Path, output: Path, sources: list[Path]) -> list[int]:
    """The least peak of this process while it streams each of `sources`, which take turns."""
    streamed(warm, output)
    peaks: dict[Path, list[int]] = {source: [] for source in sources}
    for _ in range(PEAKS):
        for source in sources:
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present use
            before = high_water_bytes()
            streamed(source, output)
            peaks[source].append(high_water_bytes() - before)
    return [min(found) for found in peaks.values()]


def high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def main() -> None:
    if len(sys.argv) > 1:
        warm, output, *sources = map(Path, sys.argv[1:])
        sys.stdout.write(json.dumps(least_peaks(warm, output, sources)) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, layers in (("warm", 1), ("half", LAYERS), ("whole", 2 * LAYERS)):
            checkpoint(folder / name, layers)
        arguments = [str(folder / part) for part in ("warm", "out", "half", "whole")]
        command, environment = [sys.executable, __file__, *arguments], {**os.environ, **ALLOCATOR}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        half, whole = json.loads(done.stdout.splitlines()[-1])
        for run in (streamed, in_memory):
            run(folder / "warm", folder / "out")
        times = [
            (streamed(folder / "half", folder / "out"), in_memory(folder / "half", folder / "out")) for _ in range(2)
        ]
    ours, theirs = (min(column) for column in zip(*times, strict=True))
    result = {
        "benchmark": "streaming",
        "stream_seconds": ours,
        "memory_seconds": theirs,
        "time_ratio": ours / theirs,
        "memory_growth": whole / half,
        "peak_blocks": half / BLOCK_BYTES,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
