"""The language-model script with the documented arguments runs on the embedded model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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


def words(folder: Path, more: str) -> list[str]:
    heldout = (MODELS / "text" / "heldout.txt").read_text(encoding="utf-8")[:20000]
    (folder / "heldout.txt").write_text(heldout, encoding="utf-8")
    fixed = f"--model_dir {MODELS / 'language_model'} --device cpu --num_calib_data 4 --seq_len 64"
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
    script: ModuleType, tmp_path: Path, more: str, files: set[str]
) -> None:
    before = script.main(words(tmp_path, "--skip_quantization"))["perplexity"]
    found = script.main(words(tmp_path, more))["perplexity"]
    assert found != before and found < 1.2 * before, "a broken model has hundreds"
    assert not files or files <= {file.name for file in (tmp_path / "out").iterdir()}
    if "config.json" in files:
        again = script.main(words(tmp_path, f"--model_reload --import_model_dir {tmp_path / 'out'}"))
        assert again["perplexity"] == found, "the folder computes what was exported"


def test_files_are_quantized_from_folder_to_folder(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(words(tmp_path, "--quant_scheme mxfp4 --file2file_quantization --skip_evaluation")) == {}
    assert (tmp_path / "out" / "model.safetensors").exists()
