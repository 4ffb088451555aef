"""`quark quantize --export-format`: every format from the command line, and combinations that are refused early."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from quark.errors import OutputExistsError
from quark.jobs.folders.export import Export
from quark.torch.formats import FORMATS
from tests.commands.program import quark
from tests.models.architectures import SETTINGS
from tests.models.families import family
from tests.models.model_folders import model_folder
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama, tiny_opt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_llama(vocab_size=2048, dtype=torch.float16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, path / name)
    return path


@pytest.mark.slow
def test_the_plan_says_what_transformers_does_not_decode(tmp_path: Path) -> None:
    family("qwen3_moe").save_pretrained(tmp_path)
    line = ("plan", tmp_path, "--scheme", "int8_dynamic")
    said = quark(*line, "--export-format", "compressed-tensors")
    assert said.code == 0
    assert "readers: transformers (5.23.0) does not decode experts in integers with quantized inputs" in said.out
    for server in ("vllm", "sglang"):
        chosen = quark(*line, "--for", server)
        assert chosen.code == 0 and "readers:" not in chosen.out, server


def test_a_plan_takes_what_quantize_does_but_options_of_the_output(folder: Path) -> None:
    cached = quark("plan", folder, "--scheme", "int8_wo", "--kv-cache", "fp8")
    assert cached.code == 0 and "fp8_e4m3" in cached.out and "data: the text of the package" in cached.out
    held = quark("plan", folder, "--scheme", "mxfp4", "--export-format", "awq")
    assert held.code == 1 and "The awq format cannot hold" in held.err
    assert quark("plan", folder, "--scheme", "int8_wo", "--pack-method", "order").code == 2
    named = quark("plan", LANGUAGE_MODEL.parent / "digits_cnn" / "model.onnx", "--config", "A8W8", "--algorithm", "cle")
    assert named.code == 2 and "--algorithm does not apply to the plan of an ONNX file" in named.err


SCHEMES = {
    "quark": "mxfp4",
    "awq": "uint4_wo_32",
    "gptq": "int4_wo_32",
    "fp8": "fp8",
    "compressed-tensors": "int8_dynamic",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_is_written_inspected_and_evaluated(form: str, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:200]), encoding="utf-8")
    out = tmp_path / "out"
    done = quark("quantize", folder, "--scheme", SCHEMES[form], "--export-format", form, "--calib", text, "-o", out)
    assert done.code == 0 and f"{SCHEMES[form]}: " in done.out
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == form
    assert "quant_method" in quark("inspect", out).out
    done = quark("evaluate", folder, out, "--text", text, "--length", 64, "--windows", 2)
    assert done.code == 0 and "model.layers.0" in done.out


@pytest.mark.slow
def test_a_gguf_file_is_written_and_inspected(folder: Path, tmp_path: Path) -> None:
    plain: list[Any] = ["quantize", folder, "--scheme", "uint4_wo_32"]
    command = [*plain, "--format", "gguf", "-o"]
    assert quark(*command, tmp_path / "folder").code == 0
    done = quark(*command, tmp_path / "file.gguf")
    assert done.code == 0 and "uint4_wo_32: " in done.out
    file = tmp_path / "folder" / "llama.gguf"
    assert file.read_bytes() == (tmp_path / "file.gguf").read_bytes()
    assert quark(*plain, "-o", tmp_path / "named.gguf").code == 0  # the name says the format
    assert file.read_bytes() == (tmp_path / "named.gguf").read_bytes()
    shown = quark("inspect", file).out
    assert "Q4_1" in shown and "tokenizer.ggml.merges" in shown
    again = quark(*command, tmp_path / "file.gguf")
    assert again.code == 1 and "--force" in again.err
    assert quark(*command, tmp_path / "file.gguf", "--force").code == 0


REFUSED = {
    "awq of int8": (("--scheme", "int8_wo", "--export-format", "awq"), "It takes the schemes int4_wo_32"),
    "a layer's scheme": (
        ("--scheme", "uint4_wo_32", "--layer", "*.down_proj=mx6", "--export-format", "compressed-tensors"),
        "(mx6)",
    ),
    "gguf of activations": (("--scheme", "mxfp4", "--export-format", "gguf"), "mxfp4_weight_only"),
    "an option of quark": (
        ("--scheme", "uint4_wo_32", "--export-format", "awq", "--pack-method", "order"),
        "has one form only",
    ),
    "an option beside gguf": (
        ("--scheme", "int8_wo", "--export-format", "gguf", "--weight-format", "fake_quantized"),
        "do not apply",
    ),
    "onnx block by block": (
        ("--scheme", "uint4_wo_32", "--export-format", "onnx", "--stream"),
        "--stream with --export-format onnx: block by block folders and GGUF files are written",
    ),
    "a mix in a folder": (("--scheme", "q4_k_m"), "only GGUF files hold its block types"),
    "a block type in a folder": (("--scheme", "int8_wo", "--layer", "*.down_proj=q6_k"), "block types of GGUF"),
    "a mix in capitals": (("--scheme", "Q4_K_M", "--export-format", "gguf"), "Did you mean 'q4_k_m'"),
    "a mix and a cache": (
        ("--scheme", "q4_k_m", "--export-format", "gguf", "--kv-cache", "fp8"),
        "--kv-cache and --attention do not apply",
    ),
    "one of a matrix in float for vLLM": (
        ("--for", "vllm", "--scheme", "int8_dynamic", "--exclude", "*.0.self_attn.q_proj"),
        "vLLM makes one layer (qkv_proj) of several that get different schemes here, and refuses such a folder: in "
        "model.layers.0.self_attn, q_proj: float; k_proj, v_proj: weight: int8",
    ),
    "a scheme of one of a matrix in a budget for SGLang": (
        ("--for", "sglang", "--bits", "6", "--layer", "*.up_proj=int8_dynamic"),
        "SGLang makes one layer (gate_up_proj)",
    ),
    "a head that vLLM does not read": (
        ("--for", "vllm", "--scheme", "int8_dynamic", "--layer", "lm_head=int8_dynamic"),
        "vLLM is not known to read an output head (lm_head) that is quantized as quark. Possible: the format awq or",
    ),
    "a misspelled format": (("--scheme", "int8_wo", "--export-format", "compressed_tensors"), "'compressed-tensors'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_weights_are_read(case: str, folder: Path, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    unreadable = tmp_path / "model"
    shutil.copytree(folder, unreadable)
    (unreadable / "model.safetensors").unlink()
    done = quark("quantize", unreadable, *options, "-o", tmp_path / "out")
    # A name that there is not is wrong for any model.
    code = 2 if case in ("a mix in capitals", "a misspelled format") else 1
    assert done.code == code and message in done.err and not (tmp_path / "out").exists()


def test_what_servers_would_refuse_is_said_of_a_folder_that_is_for_no_program(folder: Path, tmp_path: Path) -> None:
    done = quark("quantize", folder, "--scheme", "int8_wo", "--exclude", "*.q_proj", "-o", tmp_path / "not theirs")
    assert "Servers" not in done.log
    done = quark("quantize", folder, "--scheme", "int8_dynamic", "--exclude", "*.q_proj", "-o", tmp_path / "parted")
    assert "Servers: vLLM makes one layer (qkv_proj)" in done.log  # of this format SGLang reads no such scheme
    done = quark("quantize", folder, "--scheme", "int8_dynamic", "--exclude", "*.[qkv]_proj", "-o", tmp_path / "whole")
    assert "Servers" not in done.log


def test_gguf_of_an_unknown_architecture_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    opt = tiny_opt(tmp_path / "opt")
    (opt / "model.safetensors").unlink()
    done = quark("quantize", opt, "--scheme", "int8_wo", "--export-format", "gguf", "-o", tmp_path / "out")
    assert done.code == 1 and "'opt' models" in done.err


@pytest.mark.slow
def test_an_onnx_file_computes_sequences_of_any_length(folder: Path, tmp_path: Path) -> None:
    import onnxruntime
    from transformers import AutoModelForCausalLM

    command: list[Any] = ["quantize", folder, "--dtype", "float32", "--scheme", "uint4_wo_32", "-o"]
    assert quark(*command, tmp_path / "onnx", "--export-format", "onnx").code == 0
    assert quark(*command, tmp_path / "quark").code == 0
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "quark_model.onnx"), options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quark", dtype=torch.float32)
    ids = torch.arange(3 * 11).reshape(3, 11)
    (found,) = session.run(["logits"], {"input_ids": ids.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), model(ids).logits, atol=1e-4)


@pytest.mark.slow
def test_an_onnx_file_of_an_encoder_takes_padded_samples(tmp_path: Path) -> None:
    """A model that attends both ways needs the mask: without it, what a sample gives depends on its neighbours."""
    import onnxruntime

    model_folder("sentence_encoder", tmp_path / "encoder")
    done = quark("quantize", tmp_path / "encoder", "--for", "onnxruntime", "-o", tmp_path / "x.onnx")
    assert done.code == 0 and "int8_wo:" in done.out, done.err
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    ids = np.arange(5, 5 + 12)[None]

    def hidden(padding: int) -> Any:
        fed = {name: np.pad(x, ((0, 0), (0, padding))) for name, x in (("input_ids", ids), ("attention_mask", ids > 0))}
        fed = {name: x.astype(np.int64) for name, x in fed.items()}
        return session.run(["last_hidden_state"], {**fed, "token_type_ids": 0 * fed["input_ids"]})[0][:, : ids.size]

    assert np.allclose(hidden(0), hidden(7), atol=1e-4)


@pytest.mark.slow
def test_algorithms_run_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    command: list[Any] = ["quantize", folder, "--scheme", "int3_wo_128", "-o", tmp_path / "out"]
    both = ("--algorithm", "smooth", "--algorithm", "gptq")
    done = quark(*command, "--algorithm", "gptw")
    assert done.code == 2 and "Did you mean 'gptq'" in done.err
    text = tmp_path / "text.txt"
    text.write_text(" ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:400]), encoding="utf-8")
    done = quark(*command, *both, "--calib", text)
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [algorithm["name"] for algorithm in config["algo_config"]] == ["autosmoothquant", "gptq"]
    assert quark("evaluate", folder, tmp_path / "out", "--text", text, "--length", 64, "--windows", 2).code == 0


@pytest.mark.parametrize("form", ["onnx", "gguf"])
def test_a_file_may_be_written_beside_the_data(form: str, tmp_path: Path) -> None:
    """Of which a folder that is replaced would leave nothing."""
    data = tmp_path / "text.txt"
    data.touch()

    def export(form: str, source: Path) -> Export:
        return Export(source, tmp_path, form, "real_quantized", "reorder", "5GB", force=True)

    export(form, tmp_path / "model").check_output(data)
    with pytest.raises(OutputExistsError, match="holds .*text.txt, which is read"):
        export("quark", tmp_path.parent / "model").check_output(data)


FRESH = """
import sys
from pathlib import Path
from quark.jobs.folders.models import load_model
from quark.torch.checkpoint.opened import OpenedFolder
assert "quark.torch.writers.safetensors" not in sys.modules
model = load_model(OpenedFolder(Path(sys.argv[1])))
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_that_wrote_nothing_loads_and_saves(folder: Path, tmp_path: Path) -> None:
    """`quark evaluate` is such a process: the writers are not there when a folder is loaded."""
    out, again = tmp_path / "out", tmp_path / "again"
    done = quark("quantize", folder, "--scheme", "uint4_wo_32", "--export-format", "awq", "-o", out)
    assert done.code == 0, done.err
    ran = subprocess.run([sys.executable, "-c", FRESH, out, again], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    saved, expected = (load_file(path / "model.safetensors") for path in (again, out))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.slow
def test_a_model_without_fused_attention_is_evaluated(folder: Path, tmp_path: Path) -> None:
    """Gemma 2 caps the logits of its attention, so transformers has the eager one only."""
    source, out = tmp_path / "gemma2", tmp_path / "out"
    config = Gemma2Config(**SETTINGS["gemma2"][1] | {"vocab_size": 2048, "max_position_embeddings": 512})
    Gemma2ForCausalLM(config).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, source / name)
    done = quark("quantize", source, "--scheme", "uint4_wo_32", "--export-format", "awq", "-o", out)
    assert done.code == 0, done.err
    text = tmp_path / "text.txt"
    text.write_text(" ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:200]), encoding="utf-8")
    done = quark("evaluate", source, out, "--data", text, "--length", "64", "--windows", "1")
    assert done.code == 0 and "Outputs over 1 sample" in done.out and "1 samples" not in done.out, done.err
    assert quark("convert", out, "--format", "compressed-tensors", "-o", tmp_path / "ct").code == 0
