"""What a model of the shape of Llama 3 8B takes: from file to file beside the storage, and streamed with GPTQ by parts.

    python -m benchmarks.large_model FOLDER --layers 32         file to file: 14.5 GB are written to FOLDER, then 4 more
    python -m benchmarks.large_model FOLDER --layers 3 --gptq   streamed: seconds of each part, and the peak of memory
    python -m benchmarks.large_model FOLDER --format awq        either of them into another format, gguf too

The weights are random, in bfloat16, a file for each block. From file to file, what `quark quantize` takes stands beside
reading all files and writing as many bytes as the result has, to the disk; both in turns, RUNS times, each after the
files are taken out of the system's memory. What a part calls is counted there, and not in the part.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, HEADS, KEYS, VOCABULARY = 4096, 14336, 32, 8, 32000
SCHEME, MIX, SAMPLES, TOKENS, RUNS, PIECE = "uint4_wo_128", "q4_k_m", 4, 512, 3, 1 << 22
MADE_ROWS = 1024


def checkpoint(folder: Path, layers: int, vocabulary: int = VOCABULARY) -> None:
    """Write the model, if it is not there; no two of its blocks are in memory. Its tokenizer has 2048 tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from tests.models.torch_zoo import LANGUAGE_MODEL

    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator, index = torch.Generator().manual_seed(0), {}

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        for rows in torch.split(tensor, MADE_ROWS) if len(shape) > 1 else ():  # few values are in float32 at once
            rows.copy_(torch.randn(rows.shape, generator=generator) * 0.02)
        return tensor

    def write(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {name: made(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shapes, file))

    keys = HIDDEN // HEADS * KEYS
    for layer in range(layers):
        attention = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (keys, HIDDEN), "v_proj": (keys, HIDDEN)}
        shapes = {f"self_attn.{name}": shape for name, shape in {**attention, "o_proj": (HIDDEN, HIDDEN)}.items()}
        shapes |= {f"mlp.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes["mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
        norms = {f"{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
        named = {f"model.layers.{layer}.{name}.weight": shape for name, shape in (shapes | norms).items()}
        write(f"model-{layer}.safetensors", named)
    for name in ("model.embed_tokens", "lm_head"):
        write(f"{name}.safetensors", {f"{name}.weight": (vocabulary, HIDDEN)})
    write("model.norm.safetensors", {"model.norm.weight": (HIDDEN,)})
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / file, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def forget(folder: Path) -> None:
    """Take the files out of the system's memory, so that they are read from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def storage_seconds(source: Path, output: Path, size: int) -> float:
    """Reading all files, and writing so many bytes to the disk."""
    forget(source)
    buffer, start = bytearray(PIECE), time.perf_counter()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    with output.open("wb", buffering=0) as opened:
        for _ in range(size // PIECE):
            opened.write(buffer)
        os.fsync(opened.fileno())
    seconds = time.perf_counter() - start
    output.unlink()
    return seconds


def command_seconds(source: Path, output: Path, form: str) -> tuple[dict[str, float], int]:
    """What the command takes, imports and all, and the size of the result."""
    forget(source)
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    command = [sys.executable, "-m", "quark", "quantize", str(source), "-o", str(output), "--export-format", form]
    command += ["--scheme", MIX if form == "gguf" else SCHEME]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    size = sum(file.stat().st_size for file in output.iterdir())
    shutil.rmtree(output)
    taken = {"wall": wall, "user": used.ru_utime, "system": used.ru_stime}
    return {**taken, "peak_gb": used.ru_maxrss * 1024 / 1e9}, size


def file_to_file(source: Path, output: Path, form: str) -> None:
    """Print what each run takes, beside the storage."""
    size = command_seconds(source, output, form)[1]  # the first one compiles
    for _ in range(RUNS):
        storage, (taken, _) = storage_seconds(source, output, size), command_seconds(source, output, form)
        row = {"storage": storage, **taken, "ratio": taken["wall"] / storage}
        sys.stdout.write("  ".join(f"{name} {value:.2f}" for name, value in row.items()) + "\n")


class Parts:
    """Seconds by the names of parts; each function is counted without the ones that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = [0.0]

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Within: time of this part."""
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            self.seconds[part] += taken - self._inner.pop()
            self._inner[-1] += taken

    def count(self, owner: Any, function: str, part: str) -> None:
        """Count the calls of a function of a module or class."""
        inner: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(inner)
        def outer(*args: Any, **options: Any) -> Any:
            with self.counted(part):
                return inner(*args, **options)

        setattr(owner, function, outer)


def streamed(source: Path, output: Path, form: str) -> None:
    """Print what the parts of streaming with GPTQ take, and the peak."""
    import torch

    from quark.torch import LLMTemplate, gguf_config
    from quark.torch.algorithms import block_sweep
    from quark.torch.algorithms.rounding import gptq
    from quark.torch.checkpoint.opened import OpenedFolder
    from quark.torch.flows import from_disk, per_block, resume
    from quark.torch.writers.folder import FolderTarget
    from quark.torch.writers.gguf.file import GgufTarget
    from quark.torch.writers.writer import OutputTarget

    parts = Parts()
    for owner, function, part in (
        (from_disk, "CheckpointJob", "skeleton and plan"),
        (from_disk, "blocks_without_weights", "finding blocks, first inputs"),
        (per_block, "record_inputs", "finding blocks, first inputs"),
        (from_disk.FromDisk, "bring", "reading weights"),
        (from_disk._Run, "_write", "packing and writing"),
        (resume.Manifest, "finish", "manifest and its hashes"),
        (from_disk, "move_folder", "flushing to the disk"),
        (block_sweep, "_find_groups", "forwards and second moments"),
        (per_block, "sweep_block", "forwards and second moments"),
        (gptq.GPTQ, "_factor", "factors"),
        (gptq, "fix_scales", "scales"),
        (gptq._Solver, "round", "solving"),
        (gptq, "_layer_errors", "errors that are reported"),
    ):
        parts.count(owner, function, part)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator) for _ in range(SAMPLES)]
    target: OutputTarget
    if form == "gguf":
        config, target = gguf_config(OpenedFolder(source).skeleton, MIX, ["gptq"]), GgufTarget(source)
        output = output.with_suffix(".gguf")
    else:
        config, target = LLMTemplate.get("auto").get_config(SCHEME, algorithm="gptq"), FolderTarget(form)
    forget(source)
    with parts.counted("all else"):
        from_disk.stream(config, OpenedFolder(source), output, data, overwrite=True, target=target)
    output.unlink() if target.is_file else shutil.rmtree(output)
    for part, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{part:30s} {seconds:8.1f} s\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(f"{'together':30s} {sum(parts.seconds.values()):8.1f} s, peak {peak / 1e9:.2f} GB\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is written, and what is made of it for a while")
    parser.add_argument("--layers", type=int, default=32, help="blocks of the model")
    parser.add_argument("--gptq", action="store_true", help="stream it with GPTQ instead")
    parser.add_argument("--format", default="quark", help="what is written, of --export-format")
    given = parser.parse_args()
    source = given.folder / f"model-{given.layers}"
    # In a process of its own: the peak of a process begins at the size of the one that starts it.
    maker = get_context("spawn").Process(target=checkpoint, args=(source, given.layers))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit(maker.exitcode)
    (streamed if given.gptq else file_to_file)(source, given.folder / "out", given.format)


if __name__ == "__main__":
    main()
