"""What a job takes is known before its first block."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quark import memory_and_disk
from quark.errors import ConfigError
from quark.progress import log_to
from quark.torch import GPTQConfig, LLMTemplate, ModelQuantizer
from quark.torch.flows.from_disk import stream
from tests.commands.program import quark

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
        stream(made, FOLDER, tmp_path / "out", batches())
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    first = lines[0]
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert first["event"] == "preflight" and (first["samples"], first["tokens"]) == (2, 64)
    assert 0.95 * written < first["output_bytes"] <= written, "all but the headers"
    assert first["memory_bytes"] < 1e6 * lines[-1]["peak_mb"]
    block = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640 + 2 * 256)  # in float16
    # 64 tokens of 256 channels in float32, and as many again where ranges are observed behind the algorithm.
    assert first["memory_bytes"] == block + 8 * 640**2 + 64 * 256 * 4 * (1 if cache is None else 2)
    blocks = [line for line in lines if line["event"] == "block"]
    assert len(blocks) == first["blocks"] == 5
    assert all(0 < row["error_after"] < row["error_before"] for line in blocks for row in line["layers"])


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
        "quantize", str(FOLDER), "--scheme", "uint4_wo_128", "--algorithm", "gptq", "--calib", TEXT, "--samples", "2",
        "-o", str(tmp_path / "out"), "--log-file", str(tmp_path / "log"),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "quark", *job], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
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
    job = ["quantize", str(FOLDER), "--scheme", "int4_wo_128", "-o", str(tmp_path / "out"), "--log-file", str(place)]
    before = (FOLDER / "config.json").read_bytes()
    done = subprocess.run([sys.executable, "-m", "quark", *job], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Choose another file" in done.stderr and len(done.stderr.splitlines()) == 1
    assert (FOLDER / "config.json").read_bytes() == before and not (tmp_path / "out").exists()
