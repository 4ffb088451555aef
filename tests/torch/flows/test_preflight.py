"""What a job takes is known before its first block."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quark.base import memory_and_disk
from quark.base.progress import log_to
from quark.core import array
from quark.errors import ConfigError
from quark.torch import GPTQConfig, LLMTemplate, ModelQuantizer
from quark.torch.algorithms.rounding import gptq
from quark.torch.calibration import work_device
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.tensor.enums import QuantFlow
from quark.torch.flows import preflight
from quark.torch.flows.from_disk import stream
from tests.commands.program import quark
from tests.models.torch_zoo import tiny_llama
from tests.pretended_gpu import PretendedGpu

FOLDER = Path("examples/models/language_model")
TEXT = "examples/models/text/calibration.txt"


def batches() -> list[torch.Tensor]:
    return [torch.randint(0, 2048, (1, 32), generator=torch.Generator().manual_seed(0)) for _ in range(2)]


def config(*modules: str) -> Any:
    algorithm = GPTQConfig(inside_layer_modules=list(modules)) if modules else GPTQConfig()
    return LLMTemplate.get("auto").get_config("uint4_wo_128", [algorithm])


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "fp8"])
def test_the_estimate_is_a_lower_bound_of_the_peak(cache: str | None, tmp_path: Path) -> None:
    made = LLMTemplate.get("llama").get_config("uint4_wo_128", [GPTQConfig()], kv_cache_scheme=cache)
    with log_to(tmp_path / "log"):
        stream(made, OpenedFolder(FOLDER), tmp_path / "out", batches())
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    first = lines[0]
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert first["event"] == "preflight" and (first["samples"], first["tokens"]) == (2, 64)
    assert 0.95 * written < first["output_bytes"] <= written, "all but the headers"
    assert first["memory_bytes"] < first["memory_used"] + first["memory_bytes"] < 1e6 * lines[-1]["peak_mb"]
    block = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640 + 2 * 256)  # in float16
    # 64 tokens of 256 channels in float32, and as many again where ranges are observed behind the algorithm.
    assert first["memory_bytes"] == block + 8 * 640**2 + 64 * 256 * 4 * (1 if cache is None else 2)
    blocks = [line for line in lines if line["event"] == "block"]
    assert len(blocks) == first["blocks"] == 5
    assert all(0 < row["error_after"] < row["error_before"] for line in blocks for row in line["layers"])


def test_a_new_run_counts_what_it_writes(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "in")
    with log_to(tmp_path / "log"):
        stream(LLMTemplate.get("auto").get_config("int8_wo"), OpenedFolder(tmp_path / "in"), tmp_path / "out")
    first = json.loads((tmp_path / "log").read_text().splitlines()[0])
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert first["event"] == "preflight" and 0.9 * written < first["output_bytes"] <= written, "all but the header"


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False])
def test_too_little_is_said_before_the_first_block(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--scheme", "uint4_wo_128", "--algorithm", "gptq", "--calib", TEXT, "--samples", "2"]
    job = ["quantize", FOLDER, *options, "-o", tmp_path / "out", "--stream" if streamed else "--no-stream"]
    monkeypatch.setattr("quark.torch.flows.preflight.available_memory", lambda: 1000)
    monkeypatch.setattr(memory_and_disk, "available_memory", lambda: 1000)
    done = quark(*job)
    assert done.code == 1 and "of memory, and 0.00 GB are free. Possible: " in done.err and "blocks 1" not in done.log
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = quark(*job)
    assert done.code == 1 and " 0.00 MB are free on its disk" in done.err and "blocks 1" not in done.log
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_algorithm_without_layers_is_refused() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    with pytest.raises(ConfigError, match=r"mlp.up_projj. Possible: self_attn.q_proj"):
        ModelQuantizer(config("mlp.up_projj")).quantize_model(model, batches())


@pytest.mark.slow
def test_a_pipe_gets_a_line_for_each_block(tmp_path: Path) -> None:
    job = [
        "quantize", FOLDER, "--scheme", "uint4_wo_128", "--algorithm", "gptq", "--calib", TEXT, "--samples", "2",
        "--length", "64", "-o", tmp_path / "out", "--log-file", tmp_path / "log",
    ]  # fmt: skip
    lines = quark(*job).log.splitlines()
    assert lines[0].startswith(f"[QUARK-INFO]: Quantizing {FOLDER} (uint4_wo_128, gptq) to ")
    assert [line.split(",")[0] for line in lines if ": blocks " in line] == [
        f"[QUARK-INFO]: blocks {n}/5" for n in range(1, 6)
    ]
    assert all("share of the output lost" in line and " s, peak " in line for line in lines if ": blocks " in line)
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert last["event"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "out/log", "."])
def test_a_log_lies_in_nothing_that_is_read_or_made(name: str, tmp_path: Path) -> None:
    place = (tmp_path if name == "out/log" else FOLDER) / name
    before = (FOLDER / "config.json").read_bytes()
    done = quark("quantize", FOLDER, "--scheme", "int4_wo_128", "-o", tmp_path / "out", "--log-file", place)
    assert done.code == 1 and "Choose another file" in done.err and len(done.err.splitlines()) == 1
    assert (FOLDER / "config.json").read_bytes() == before and not (tmp_path / "out").exists()


def meta_model(kind: str, **sizes: Any) -> Any:
    """A model of one block in bfloat16 without weights."""
    config = getattr(transformers, kind)(num_hidden_layers=1, vocab_size=64, **sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


LARGE = {
    "Llama of 8B": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "Llama of 70B": ("LlamaConfig", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    }),
    "mixture of 235B": ("Qwen3MoeConfig", {
        "hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_the_page_has_what_a_gpu_holds_at_once(name: str) -> None:
    kind, sizes = LARGE[name]
    made = preflight.on_gpu(meta_model(kind, **sizes), 128 * 512)
    parts = (made.block, made.solver, made.work, made.batches, made.together)
    row = " | ".join([name, *(f"{part / 1e9:.1f} GB" for part in parts)])
    page = Path(__file__).parents[3] / "docs/guide/large_models.md"
    assert f"| {row} |" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_gpu_holds_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks and room so small that they do not hide the matrices."""
    for name, value, homes in (
        ("DEVICE_CHUNK", 1 << 18, (array, preflight)), ("ELEMENTS", 1 << 16, (gptq,)),
        ("ON_DEVICE", 1 << 16, (work_device, preflight)),
    ):  # fmt: skip
        for home in homes:
            monkeypatch.setattr(home, name, value)
    config = LLMTemplate.get("auto").get_config("uint4_wo_128", [GPTQConfig()])
    config.quant_flow = QuantFlow.per_block
    model = tiny_llama(num_hidden_layers=1, hidden_size=256, intermediate_size=1024, dtype=torch.bfloat16)
    data = [torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    needed = preflight.on_gpu(model, 8 * 64)
    gc.collect()
    with PretendedGpu(where=False) as gpu:
        gpu.meter.reset()
        before = gpu.meter.alive()
        ModelQuantizer(config).quantize_model(model, data)
        assert 7 / 8 < (gpu.meter.peak() - before) / needed.together < 9 / 8
