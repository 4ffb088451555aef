"""Every format by every flow: the same bytes of every file, or the same refusal, whatever is in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark.jobs.folders import flows
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.from_disk import stream
from quark.torch.flows.resume import Manifest
from quark.torch.writers.folder import FolderTarget
from tests.commands.program import quark as program
from tests.models.doors import float_folder
from tests.models.families import family
from tests.models.model_folders import model_folder
from tests.models.versions import needs_transformers
from tests.torch.flows.test_file2file import contents, scheme

MIXER = {"mamba_n_heads": 32, "mamba_d_head": 4, "mamba_d_state": 16, "mamba_n_groups": 1}
SIZES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 32,
                   "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 1, "head_dim": 16},
    "granitemoehybrid": MIXER | {"layer_types": ["mamba", "attention"], "num_local_experts": 4,
                                 "shared_intermediate_size": 32},
    "tied": {"tie_word_embeddings": True},
}  # fmt: skip


def of_family(name: str, folder: Path) -> Path:
    kind = "llama" if name == "tied" else name
    family(kind, **SIZES.get(name, {})).to(torch.bfloat16).save_pretrained(folder)
    return folder


def of_own_code(name: str, folder: Path) -> Path:
    """A model whose class is code of its folder."""
    model_folder("qwen3", folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own_kind'\n\n\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_kind", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MAKERS: dict[str, Callable[[str, Path], Path]] = {
    **dict.fromkeys(("llama", "tied", "gpt2", "qwen3_moe", "gpt_oss", "granitemoehybrid", "nemotron_h"), of_family),
    **dict.fromkeys(("mixtral", "deepseek_v3"), float_folder),
    **dict.fromkeys(("llava", "t5", "bart", "whisper", "masked_lm"), model_folder),
    "own_code": of_own_code,
}
"""Family -> how its folder is made: dense, tied, Conv1D, mixtures, hybrids, of pictures, of two parts, of own code."""
SCHEMES = {
    "quark": "int4_wo_32",
    "compressed-tensors": "int4_wo_32",
    "awq": "uint4_wo_32",
    "gptq": "int4_wo_32",
    "fp8": "fp8_wo",
}
WITH_DATA = {"quark": "nvfp4", "compressed-tensors": "int8", "awq": "uint4_wo_32", "gptq": "int4_wo_32", "fp8": "fp8"}
FLOWS = {"memory": ("--no-stream",), "streamed": ("--stream",), "files": ()}
EVERYDAY = [("llama", "awq", ""), ("mixtral", "compressed-tensors", "vllm"), ("granitemoehybrid", "quark", "")]


def by_each(source: Path, tmp_path: Path, flows_of: dict[str, tuple[str, ...]], *options: object) -> list[object]:
    """What each flow writes, by the names of files, or what it says."""
    own = ("--trust-remote-code",) if (source / "modeling_own.py").exists() else ()
    found: list[object] = []
    for index, more in enumerate(flows_of.values()):
        out = tmp_path / str(index) / "out"
        done = program("quantize", source, "-o", out, *options, *own, *more)
        warned = [line for line in done.log.splitlines() if "WARNING" in line]
        said = done.err.replace(str(tmp_path / str(index)), "")
        found.append((contents(out), set(warned)) if done.code == 0 else said)
    return found


@pytest.mark.parametrize(
    ("name", "form", "server"),
    [
        pytest.param(*case, marks=[*([needs_transformers("5.6", "has layers without experts in nemotron_h")]
                                     if case[0] == "nemotron_h" else []),
                                   *([] if case in EVERYDAY else [pytest.mark.slow])])
        for case in itertools.product(MAKERS, SCHEMES, ("", "vllm", "sglang"))
    ],
)  # fmt: skip
def test_flows_agree(name: str, form: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ways = MAKERS[name](name, tmp_path / "float"), []
    in_memory = flows._in_memory
    monkeypatch.setattr(flows, "_in_memory", lambda *a: ways.append("memory") or in_memory(*a))
    goal = ("--for", server, "--effort", "fast") if server else ()
    found = by_each(source, tmp_path, FLOWS, "--scheme", SCHEMES[form], "--export-format", form, *goal)
    assert found[0] == found[1] == found[2]
    if not isinstance(found[0], str):
        assert ways == ["memory"], "no data are needed: nothing but --no-stream has the model in memory"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["", "gptq", "awq"])
@pytest.mark.parametrize("form", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "mixtral", "deepseek_v3", "nemotron_h", "granitemoehybrid"])
def test_flows_agree_on_data(name: str, form: str, algorithm: str, tmp_path: Path) -> None:
    source = MAKERS[name](name, tmp_path / "float")
    np.savez(tmp_path / "data.npz", input_ids=np.random.default_rng(0).integers(3, 64, (4, 32)))
    options = ("--scheme", WITH_DATA[form], "--export-format", form, "--calib", tmp_path / "data.npz")
    more = ("--algorithm", algorithm) if algorithm else ()
    both = {name: FLOWS[name] for name in ("memory", "streamed")}
    found = by_each(source, tmp_path, both, *options, *more)
    assert found[0] == found[1]


class Killed(BaseException):
    """No error that anything catches."""


@pytest.mark.parametrize("form", ["awq", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, config = MAKERS["llama"]("llama", tmp_path / "float"), scheme(SCHEMES[form])
    stream(config, OpenedFolder(source), tmp_path / "whole", target=FolderTarget(form))
    finish = Manifest.finish

    def stop(*args: Any) -> None:
        finish(*args)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Manifest, "finish", stop)
        stream(config, OpenedFolder(source), tmp_path / "out", target=FolderTarget(form))
    assert (tmp_path / "out.partial" / "manifest.json").exists()
    stream(config, OpenedFolder(source), tmp_path / "out", target=FolderTarget(form))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
