"""The jobs that are killed: what each writes, and over what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from quark.jobs.run_file import named_config
from quark.onnx import ModelQuantizer as OnnxQuantizer
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.model.calibration_data.stored_batches import write_batch
from tests.commands.program import quark
from tests.kill.server import EndedError
from tests.models.denoisers import denoiser, step
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
        is_command: Whether it is a command, which meets signals and says how it ended; else a call of Python.
    """

    name: str
    outputs: tuple[str, ...]
    run: Action
    old: Action | None = None
    is_command: bool = True


def make_inputs(folder: Path) -> None:
    """Write the models that the jobs read."""
    tiny_llama(vocab_size=2048).save_pretrained(folder / "llama", max_shard_size="600KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, folder / "llama" / name)
    onnx.save(cnn(), folder / "cnn.onnx")
    make_pipeline(folder / "pipeline")
    (folder / "steps").mkdir()
    for number in range(2):
        write_batch(folder / "steps" / f"{number}.npz", step("flux", number))
    encoder = folder / "encoder"
    encoder.mkdir()
    shutil.copytree(folder / "llama", encoder / "0_Transformer")
    listed = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (encoder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")


def make_pipeline(folder: Path) -> None:
    """Write a pipeline of diffusers with a denoiser that ComfyUI knows."""
    import diffusers

    denoiser("flux").save_pretrained(folder / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def command(scheme: str, output: str, *options: str, model: str = "llama", data: str = "") -> Action:
    """`quark quantize` of a model of the inputs, with data of theirs; without a verdict, which says its time."""

    def run(inputs: Path, folder: Path) -> None:
        more = ("--calib", inputs / data) if data else ()
        of_denoiser = model == "pipeline" and output != "out"  # whose file has none
        words = ("--scheme", scheme, "-o", folder / output, "--force", *(() if of_denoiser else ("--no-verdict",)))
        done = quark("quantize", inputs / model, *words, *more, *options)
        if done.code:
            raise EndedError(done.code, done.log + done.err)

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


def _pair(name: str, outputs: tuple[str, ...], old: Action, new: Action, is_command: bool = True) -> Iterator[Job]:
    yield Job(name, outputs, new, None, is_command)
    yield Job(f"{name} --force", outputs, new, old, is_command)


SHARDS = ("--max-shard-size", "300KB")
CACHE = ("--kv-cache", "fp8", "--attention", "fp8", "--calib", str(TEXT / "calibration.txt"), "--samples", "2")
"""What a run that goes on needs the inputs of its next block for."""
JOBS = [
    *_pair("folder", ("out",), command("int8_wo", "out"), command("uint4_wo_32", "out", *SHARDS)),
    *_pair("stream", ("out",), command("int8_wo", "out"), command("uint4_wo_32", "out", "--stream", *SHARDS)),
    Job("stream of a cache", ("out",), command("uint4_wo_32", "out", "--stream", *CACHE, *SHARDS)),
    *_pair("file to file", ("out",), file_to_file("int8_wo"), file_to_file("uint4_wo_32"), False),
    *_pair("ONNX", ("out.onnx",), graph("XINT8", external_data=True), graph("A8W8", external_data=True), False),
    *_pair(
        "GGUF", ("out.gguf",), command("uint4_wo_32", "out.gguf", "--export-format", "gguf"),
        command("int4_wo_32", "out.gguf", "--export-format", "gguf"),
    ),
    *_pair(
        "pipeline", ("out",), command("int8_wo", "out", model="pipeline"),
        command("fp8", "out", model="pipeline", data="steps"),
    ),
    *_pair(
        "component", ("out",), command("int8_wo", "out", model="pipeline/transformer"),
        command("fp8_wo", "out", model="pipeline/transformer"),
    ),
    Job(
        "stream of a component", ("out",),
        command("fp8", "out", "--stream", model="pipeline/transformer", data="steps"),
    ),
    *_pair(
        "ComfyUI", ("out.safetensors",), command("fp8_wo", "out.safetensors", model="pipeline"),
        command("fp8", "out.safetensors", model="pipeline", data="steps"),
    ),
    *_pair(
        "denoiser as GGUF", ("out.gguf",), command("q4_0", "out.gguf", model="pipeline"),
        command("q8_0", "out.gguf", model="pipeline"),
    ),
    *_pair(
        "sentence encoder", ("out",), command("int8_wo", "out", model="encoder"),
        command("uint4_wo_32", "out", model="encoder"),
    ),
    *_pair(
        "statistics", ("out.onnx", "statistics.npz"),
        graph("XINT8"), graph("A8W8", statistics="statistics.npz"), False,
    ),
]  # fmt: skip
