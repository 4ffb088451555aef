"""What a job says before it begins that it takes of memory, and after its first block of time, beside what it took.

    python -m benchmarks.estimates SCRATCH             all jobs
    python -m benchmarks.estimates SCRATCH mixture     those whose name holds a word

The models have random weights in bfloat16, and are made in SCRATCH where they are not there: a dense one with a large
table, a mixture of 64 experts, an encoder, and one block as wide as that of an 8B with its table of 128,256 rows, whose
jobs take minutes. Of "blocks-N" each tensor is written by itself: N blocks of the same, 32 are an 8B of 16 GB. Each job
is a process of its own; its peak is that of its resident memory, as the system counts it, with what importing takes and
with pages of files that are mapped. No job measures a verdict.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.large_model import checkpoint

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples" / "models" / "language_model"
WITHIN = 1.3
SAMPLES = 8

MODELS = {
    "dense": ("LlamaConfig", {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 64000,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    }),
    "mixture": ("Qwen3MoeConfig", {
        "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 384, "num_experts": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 4, "vocab_size": 32000, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    }),
    "wide": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "encoder": ("BertConfig", {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12,
        "vocab_size": 30000,
    }),
}  # fmt: skip
"""Name -> class of its config, and what it is made with."""

JOBS = [
    "dense --scheme int4_wo_128",
    "dense --scheme mxfp4",
    "dense --scheme int4_wo_128 --export-format awq",
    "dense --scheme int4_wo_128 --no-stream",
    "dense --scheme int4_wo_128 --algorithm gptq --calib --no-stream",
    "dense --scheme int4_wo_128 --algorithm gptq --calib --stream",
    "dense --scheme int4_wo_128 --algorithm qronos --calib --stream",
    "dense --scheme int4_wo_128 --algorithm awq --calib --no-stream",
    "dense --scheme int4_wo_128 --algorithm awq --calib --stream",
    "dense --scheme fp8 --calib --no-stream",
    "dense --scheme fp8 --calib --stream",
    "dense --scheme q4_k_m --export-format gguf",
    "dense --scheme q4_k_m --export-format gguf --algorithm gptq --calib --stream",
    "mixture --scheme int4_wo_128",
    "mixture --scheme int4_wo_128 --algorithm gptq --calib --no-stream",
    "mixture --scheme int4_wo_128 --algorithm gptq --calib --stream",
    "mixture --scheme fp8 --calib --stream",
    "encoder --scheme int8_wo",
    "encoder --scheme int8 --calib --no-stream",
    "encoder --scheme int8 --calib --stream --exclude cls*",
    "wide --scheme int4_wo_128 --export-format awq",
    "wide --scheme int4_wo_128 --export-format gptq",
    "wide --scheme q4_k_m --export-format gguf",
    "wide --scheme iq4_xs --export-format gguf --calib --stream",
    "wide --scheme int4_wo_128 --export-format gptq --algorithm gptq --calib --stream",
    "blocks-3 --for vllm --calib --stream",
    "blocks-3 --for llama.cpp --calib --stream",
    "blocks-32 --for vllm --effort fast",
    "blocks-32 --for llama.cpp --effort fast",
]


def model_folder(name: str, folder: Path) -> Path:
    """The folder of a model of MODELS, or of "blocks-N", made where it is not there."""
    if not (folder / "config.json").is_file():
        if name.startswith("blocks-"):
            checkpoint(folder, int(name.removeprefix("blocks-")), MODELS["wide"][1]["vocab_size"])
            return folder
        import torch
        import transformers

        config, values = MODELS[name]
        torch.manual_seed(0)
        made = getattr(transformers, config)(**values)
        kind = transformers.AutoModelForMaskedLM if name == "encoder" else transformers.AutoModelForCausalLM
        kind.from_config(made, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")
        for file in TOKENIZER.glob("tokenizer*"):
            shutil.copy(file, folder)
    return folder


@dataclass(frozen=True)
class Run:
    """How a job went.

    Attributes:
        said: Bytes of memory that it said; None: nothing.
        peak: Bytes of its peak.
        left: Seconds that it said were left after its first block, and that were; None: nothing was said.
        seconds: That it took.
        why: Its last line where it failed.
    """

    said: float | None
    peak: float
    left: tuple[float, float] | None
    seconds: float
    why: str


def run(words: str, scratch: Path) -> Run:
    """Run a job in a process of its own."""
    name, *options = words.split()
    text = ROOT / "README.md"
    if "--calib" in options:
        at = options.index("--calib") + 1
        options[at:at] = [str(text), "--samples", str(SAMPLES)]
    output = scratch / ("out.gguf" if {"gguf", "llama.cpp"} & {*options} else "out")
    command = [sys.executable, "-m", "quark", "quantize", str(scratch / name), *options, "-o", str(output)]
    command += ["--force", "--no-verdict"]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    first: tuple[float, float] | None = None
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        found = re.search(r": blocks 1/.*about (?:(\d+) h )?(?:(\d+) min|([\d.]+) s) left", line)
        if found and first is None:
            hours, minutes, seconds = (float(number or 0) for number in found.groups())
            first = 3600 * hours + 60 * minutes + seconds, time.monotonic()
    _, code, used = os.wait4(process.pid, 0)
    ended = time.monotonic()
    found = re.search(r"memory about ([\d.]+) (GB|MB)", "".join(lines))
    said = None if found is None else float(found[1]) * {"GB": 1e9, "MB": 1e6}[found[2]]
    peak = float(used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    left = None if first is None else (first[0], ended - first[1])
    return Run(said, peak, left, ended - began, "" if code == 0 else lines[-1].strip()[:90])


def main(scratch: Path, word: str = "") -> None:
    """Run the jobs whose names hold a word, and print a line for each."""
    scratch.mkdir(parents=True, exist_ok=True)
    for job in JOBS:
        if word not in job:
            continue
        name = job.split()[0]
        # Of its own: the peak of a process begins with that of the one which starts it.
        making = multiprocessing.get_context("spawn").Process(target=model_folder, args=(name, scratch / name))
        making.start()
        making.join()
        done = run(job, scratch)
        ratio = "" if done.said is None else f"{done.peak / done.said:.2f}"
        told = "nothing" if done.said is None else f"{done.said / 1e9:.2f} GB"
        left = "" if done.left is None else f"said {done.left[0]:.0f} s left, took {done.left[1]:.0f}"
        memory = f"said {told:8s} peak {done.peak / 1e9:.2f} GB  {ratio:4s}"
        print(f"{job:85s} {memory}  {done.seconds:.0f} s  {left} {done.why}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
