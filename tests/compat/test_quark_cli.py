"""`quark-cli`: the documented program takes its documented command lines."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from quark.compat.quark_cli import get_cli_parser, main
from quark.compat.quark_cli.onnx_commands import _ptq_config
from tests.models.onnx_zoo import cnn
from tests.models.torch_zoo import LANGUAGE_MODEL, ROOT


@pytest.fixture
def model(tmp_path: Path) -> str:
    onnx.save(cnn(), tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


@pytest.fixture
def images(tmp_path: Path) -> str:
    """Two classes of two images, larger than the model's 16 pixels."""
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(2):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{index}.png")
    return str(tmp_path / "images")


def test_a_file_is_quantized_and_measured(
    model: str, images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = str(tmp_path / "out.onnx")
    words = ["--config", "S8S8_AAWS", "--calib_method", "minmax", "--workers", "4", "--exclude_nodes", "y; sum"]
    main(["onnx-ptq", "--input_model_path", model, "--output_model_path", out, "--calib_data_path", images, *words])
    quantized = onnx.load(out)
    assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}
    assert "--workers changes nothing here" in caplog.text and "--batch_size" not in caplog.text
    main(["onnx-validate", "--val_data", images, "--model_path", out, "--no_cuda"])
    assert "Prec@1" in capsys.readouterr().out


def test_arguments_become_options() -> None:
    words = ["onnx-ptq", "--input_model_path", "m", "--config", "S8S8_AAWS", "--adaquant", "--learning_rate", "0.01"]
    words += ["--calib_method", "percentile+99.9", "--include_sq", "--exclude_subgraphs", "[a, b], [c]"]
    config = _ptq_config(get_cli_parser().parse_args(words))
    assert config.extra_options["FastFinetune"]["OptimAlgorithm"] == "adaquant"
    assert config.extra_options["FastFinetune"]["LearningRate"] == 0.01 and config.include_fast_ft
    assert config.extra_options["Percentile"] == 99.9 and config.extra_options["SmoothAlpha"] == 0.5
    assert config.subgraphs_to_exclude == [(["a", "b"], ["c"])]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shapeshifter", "config.yaml"], "ShapeShifterYaml"),
        (["torch-mixed-precision", "run", "--strategy", "s.json"], "--bits"),
        (["onnx-ptq", "--input_model_path", "m.onnx", "--calib_dataset_name", "pileval"], "--calib_data_path"),
        (["onnx-ptq", "--input_model_path", "m.onnx", "--calib_method", "best"], "percentile+99.99"),
        (["export-oga", "-m", "in", "-o", "out"], "onnxruntime-genai"),
        (["onnx-validate", "--model_path", "m.onnx"], "quark evaluate"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and error.startswith("quark-cli: ") and said in error and error.count("\n") == 1


def test_imagenet_is_sorted(tmp_path: Path) -> None:
    for name in ("ILSVRC2012_val_00000001_n01.JPEG", "ILSVRC2012_val_00000002_n01.JPEG", "other.txt"):
        (tmp_path / name).write_text(name)
    main(["onnx-prepare-data", "--val_path", str(tmp_path), "--cal_path", str(tmp_path / "calib")])
    assert [file.name for file in (tmp_path / "calib").rglob("*.JPEG")] == ["ILSVRC2012_val_00000001_n01.JPEG"]
    assert len(list((tmp_path / "n01").iterdir())) == 2 and (tmp_path / "other.txt").exists()


@pytest.mark.slow
def test_a_language_model_is_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ROOT / "examples" / "models" / "text"
    out = tmp_path / "out"
    documented: Any = importlib.import_module("quark.experimental.cli.main")
    documented.main(
        ["torch-llm-ptq", "--model_dir", str(LANGUAGE_MODEL), "--device", "cpu", "--quant_scheme", "fp8",
         "--dataset", str(text / "calibration.txt"), "--num_calib_data", "4", "--output_dir", str(out),
         "--evaluation_dataset", str(text / "heldout.txt"), "--kv_cache_dtype", "fp8"]
    )  # fmt: skip
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()
    assert "erplexity" in capsys.readouterr().out


@pytest.mark.slow
def test_configurations_are_searched(model: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "arrays").mkdir()
    for index in range(4):
        np.save(tmp_path / "arrays" / f"sample_{index}.npy", random.normal(size=(1, 3, 16, 16)).astype(np.float32))
    out = tmp_path / "found" / "best.onnx"
    out.parent.mkdir()
    words = ["--input_model_path", model, "--output_model_path", str(out), "--calibration_dataset_path"]
    main(["onnx-autosearch", "--model_name", "cnn", *words, str(tmp_path / "arrays")])
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(out).graph.node}
