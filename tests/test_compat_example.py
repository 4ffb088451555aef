"""The language-model script with the documented arguments runs on the example model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.models.torch_zoo import ROOT

pytestmark = pytest.mark.slow

MODELS = ROOT / "examples" / "models"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantize_quark", ROOT / "examples" / "compat" / "quantize_quark.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def of_float(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The perplexity of the model as it came."""
    return script.main(words(tmp_path_factory.mktemp("float"), "--skip_quantization"))["perplexity"]


def words(folder: Path, more: str) -> list[str]:
    heldout = (MODELS / "text" / "heldout.txt").read_text(encoding="utf-8")[:2000]
    (folder / "heldout.txt").write_text(heldout, encoding="utf-8")
    fixed = f"--model_dir {MODELS / 'language_model'} --device cpu --num_calib_data 2 --seq_len 32"
    texts = f"--dataset {MODELS / 'text' / 'calibration.txt'} --evaluation_dataset {folder / 'heldout.txt'}"
    return f"{fixed} {texts} --output_dir {folder / 'out'} {more}".split()


@pytest.mark.parametrize(
    ("more", "files"),
    [
        ("--quant_scheme fp8 --kv_cache_dtype fp8 --model_export hf_format", {"config.json", "model.safetensors"}),
        ("--quant_scheme int4_wo_32 --quant_algo awq --model_export onnx", {"quark_model.onnx"}),
        ("--quant_scheme uint4_wo_32 --model_export gguf", {"llama.gguf"}),
        ("--quant_scheme ptpc_fp8 --layer_quant_scheme *down_proj int8_wo --exclude_layers lm_head", set()),
    ],
)
def test_a_scheme_is_quantized_exported_and_evaluated(
    script: ModuleType, of_float: float, tmp_path: Path, more: str, files: set[str]
) -> None:
    found = script.main(words(tmp_path, more))["perplexity"]
    assert found != of_float and found < 1.2 * of_float, "a broken model has hundreds"
    assert not files or files <= {file.name for file in (tmp_path / "out").iterdir()}
    if "config.json" in files:
        again = script.main(words(tmp_path, f"--model_reload --import_model_dir {tmp_path / 'out'}"))
        assert again["perplexity"] == found, "the folder computes what was exported"


def test_files_are_quantized_from_folder_to_folder(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(words(tmp_path, "--quant_scheme mxfp4 --file2file_quantization --skip_evaluation")) == {}
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_model_is_compiled_after_it_is_exported(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def compiled(model: torch.nn.Module) -> torch.nn.Module:
        seen.append((tmp_path / "out" / "model.safetensors").exists())
        return model

    monkeypatch.setattr(torch, "compile", compiled)  # the compiler itself needs a minute
    script.main(words(tmp_path, "--quant_scheme fp8 --model_export hf_format --torch_compile --skip_evaluation"))
    assert seen == [True]


def test_parameters_are_saved_and_loaded(script: ModuleType, tmp_path: Path) -> None:
    saved = script.main(words(tmp_path, f"--quant_scheme int8 --params_save --save_dir {tmp_path / 'params'}"))
    files = [f"--{kind}_path {tmp_path / 'params' / 'llama'}.{kind}" for kind in ("json", "safetensors")]
    assert script.main(words(tmp_path, f"--params_load {' '.join(files)}")) == saved


@pytest.mark.parametrize(
    ("algorithm", "scheme", "formats"),
    [
        ("awq", "uint4_wo_32", "hf_format gguf"),  # its ONNX file is above
        ("gptq", "uint4_wo_32", "hf_format gguf"),
        ("gptaq", "uint4_wo_32", "hf_format gguf"),
        ("qronos", "uint4_wo_32", "hf_format gguf"),
        ("smoothquant", "int8", "hf_format onnx"),
        ("autosmoothquant", "int8", "hf_format"),
        ("rotation", "uint4_wo_32", "hf_format gguf"),
    ],
)
def test_every_algorithm_runs_from_end_to_end(
    script: ModuleType, of_float: float, tmp_path: Path, algorithm: str, scheme: str, formats: str
) -> None:
    exports = " ".join(f"--model_export {name}" for name in formats.split())
    found = script.main(words(tmp_path, f"--quant_scheme {scheme} --quant_algo {algorithm} {exports}"))
    assert found["perplexity"] != of_float and found["perplexity"] < 1.2 * of_float, "a broken model has hundreds"
    files = {"hf_format": {"model.safetensors", "tokenizer.json"}, "onnx": {"quark_model.onnx"}, "gguf": {"llama.gguf"}}
    wanted = set().union(*(files[name] for name in formats.split()))
    assert wanted <= {file.name for file in (tmp_path / "out").iterdir()}
