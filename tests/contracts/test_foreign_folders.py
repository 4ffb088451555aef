"""Folders that other programs quantized: every door reads the same values, or says the same sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quark
from quark.errors import QuarkError, one_line
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.flows.from_disk import stream
from quark.torch.llm.model_loading import get_model
from quark.torch.model.names import source_names
from tests.commands.program import quark as program
from tests.models.doors import SCHEME, same_through_every_door
from tests.models.foreign import FOREIGN, foreign_folder
from tests.models.torch_zoo import LANGUAGE_MODEL

EVERYDAY = ("mlx", "llama")
KINDS = [
    pytest.param(*each, marks=() if each == EVERYDAY else pytest.mark.slow)
    for each in [*((kind, "llama") for kind in FOREIGN), ("bitsandbytes nf4", "mixtral"), ("torchao", "nemotron_h")]
]


@pytest.mark.parametrize(("kind", "model_type"), KINDS)
def test_every_door_writes_what_the_values_give(kind: str, model_type: str, tmp_path: Path) -> None:
    source, values = foreign_folder(kind, tmp_path / "source", model_type)
    model = load_float_model(source)
    own = model.state_dict()
    named = {name: own[target] for target, name in source_names(model, values).items() if target in own}
    assert len(named) > 3
    for name, x in named.items():
        torch.testing.assert_close(x.float(), values[name], rtol=2**-8, atol=0)
    tensors = same_through_every_door(source, tmp_path)
    said = json.loads((tmp_path / "memory" / "config.json").read_text())
    assert "quantization" not in said and said["quantization_config"]["quant_method"] == "quark"
    floats = _as_floats(source, values, tmp_path / "floats")
    quark.quantize(floats, SCHEME, output=tmp_path / "of_floats")
    for name, x in load_file(tmp_path / "of_floats" / "model.safetensors").items():
        assert torch.equal(x.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)), name


def _as_floats(source: Path, values: dict[str, torch.Tensor], folder: Path) -> Path:
    """The float folder that a foreign one stands for."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    kept = {
        name: x for name, x in tensors.items() if not any(name.startswith(v.removesuffix("weight")) for v in values)
    }
    kept = {name: x for name, x in kept.items() if not re.search(r"\._weight_", name)}
    rounded = {name: x.to(torch.bfloat16) for name, x in values.items()}
    save_file(kept | rounded, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


# What doors say. -----------------------------------------------------------------------------------------------------

TEXT = LANGUAGE_MODEL.parent / "text" / "heldout.txt"
ON = ("--data", TEXT, "--windows", 1, "--length", 16)


def said(*arguments: object) -> str:
    """What a command that fails says, without its first words."""
    done = program(*arguments)
    assert (done.code, done.err.count("\n")) == (1, 1), (arguments, done)
    return done.err.removeprefix("quark: ").strip()


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(QuarkError) as caught:
        call()
    return one_line(caught.value)


def sentences(folder: Path, tmp_path: Path) -> dict[str, str]:
    """Door -> what it says of a folder that it does not read."""
    out, config = tmp_path / "out", LLMTemplate.get("auto").get_config("int8_wo")
    lines: dict[str, tuple[object, ...]] = {
        "plan": ("plan", folder, "--scheme", "int8_wo"),
        "plan for": ("plan", folder, "--for", "vllm"),
        "quantize": ("quantize", folder, "--scheme", "int8_wo", "-o", out),
        "quantize in memory": ("quantize", folder, "--scheme", "int8_wo", "-o", out, "--no-stream"),
        "quantize streamed": ("quantize", folder, "--scheme", "int8_wo", "-o", out, "--stream"),
        "quantize gguf": ("quantize", folder, "--scheme", "q4_0", "--format", "gguf", "-o", out),
        "budget": ("quantize", folder, "--bits", "4", "-o", out),
        "evaluate": ("evaluate", folder, LANGUAGE_MODEL, *ON),
        "evaluate, as the second": ("evaluate", LANGUAGE_MODEL, folder, *ON),
        "compare": ("compare", folder, "--schemes", "int8_wo", *ON),
        "convert": ("convert", folder, "--format", "awq", "-o", out),
        "convert again": ("convert", folder, "--format", "awq", "--requantize", "int4_wo_32", "-o", out),
    }
    calls: dict[str, Callable[[], Any]] = {
        "quark.quantize": lambda: quark.quantize(folder, "int8_wo", output=out),
        "load_float_model": lambda: load_float_model(folder),
        "load_float_model, float": lambda: load_float_model(folder, dequantize=True),
        "get_model": lambda: get_model(folder, device="cpu"),
        "stream": lambda: stream(config, folder, out),
        "file to file": lambda: ModelQuantizer(config).direct_quantize_checkpoint(folder, out),
    }
    found = {door: said(*line) for door, line in lines.items()}
    found |= {door: raised(call) for door, call in calls.items()}
    assert not out.exists()
    shown = program("inspect", folder)
    last = (shown.out if shown.code == 0 else shown.err).strip().splitlines()[-1].removeprefix("quark: ")
    return {**found, "inspect": last}
