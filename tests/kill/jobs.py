"""The jobs that are killed: what each writes, and over what."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from quark.jobs.run_file import named_config
from quark.onnx import ModelQuantizer as OnnxQuantizer
from quark.torch import LLMTemplate, ModelQuantizer
from tests.commands.program import quark
from tests.models.onnx_zoo import cnn, images
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama

Action = Callable[[Path, Path], None]
"""Writes into the second folder, of the inputs in the first."""


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        name: For messages.
        outputs: Names of what it writes, each whole or absent on its own.
        run: The job; replaces what is there.
        old: What made the output that is there before; None: there is none.
    """

    name: str
    outputs: tuple[str, ...]
    run: Action
    old: Action | None = None


def make_inputs(folder: Path) -> None:
    """Write the models that the jobs read."""
    tiny_llama(vocab_size=2048).save_pretrained(folder / "llama", max_shard_size="600KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, folder / "llama" / name)
    onnx.save(cnn(), folder / "cnn.onnx")


def command(scheme: str, output: str, *options: str) -> Action:
    """`quark quantize` of the language model."""

    def run(inputs: Path, folder: Path) -> None:
        done = quark("quantize", inputs / "llama", "--scheme", scheme, "-o", folder / output, "--force", *options)
        assert done.code == 0, done.err

    return run


def file_to_file(scheme: str) -> Action:
    """`direct_quantize_checkpoint` of it."""

    def run(inputs: Path, folder: Path) -> None:
        quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config(scheme))
        quantizer.direct_quantize_checkpoint(
            inputs / "llama", folder / "out", max_shard_size="300KB", overwrite=True, weight_format="real_quantized"
        )

    return run


def graph(config: str, **settings: Any) -> Action:
    """An ONNX model, quantized; settings are those of calibration, by name, and `external_data`."""

    def run(inputs: Path, folder: Path) -> None:
        quantizer = OnnxQuantizer(named_config(config))
        outside = settings.get("external_data", False)
        path = {"statistics": str(folder / settings["statistics"])} if "statistics" in settings else {}
        calibration = replace(quantizer.settings.calibration, **path)
        quantizer.settings = replace(quantizer.settings, calibration=calibration, external_data=outside)
        quantizer.quantize_model(inputs / "cnn.onnx", folder / "out.onnx", images(2))

    return run


def _pair(name: str, outputs: tuple[str, ...], old: Action, new: Action) -> Iterator[Job]:
    yield Job(name, outputs, new)
    yield Job(f"{name} --force", outputs, new, old)


SHARDS = ("--max-shard-size", "300KB")
CACHE = ("--kv-cache", "fp8", "--attention", "fp8", "--calib", str(TEXT / "calibration.txt"), "--samples", "2")
"""What a run that goes on needs the inputs of its next block for."""
JOBS = [
    *_pair("folder", ("out",), command("int8_wo", "out"), command("uint4_wo_32", "out", *SHARDS)),
    *_pair("stream", ("out",), command("int8_wo", "out"), command("uint4_wo_32", "out", "--stream", *SHARDS)),
    Job("stream of a cache", ("out",), command("uint4_wo_32", "out", "--stream", *CACHE, *SHARDS)),
    *_pair("file to file", ("out",), file_to_file("int8_wo"), file_to_file("uint4_wo_32")),
    *_pair("ONNX", ("out.onnx",), graph("XINT8", external_data=True), graph("A8W8", external_data=True)),
    *_pair(
        "GGUF", ("out.gguf",), command("uint4_wo_32", "out.gguf", "--export-format", "gguf"),
        command("int4_wo_32", "out.gguf", "--export-format", "gguf"),
    ),
    *_pair(
        "statistics", ("out.onnx", "statistics.npz"),
        graph("XINT8"), graph("A8W8", statistics="statistics.npz"),
    ),
]  # fmt: skip
