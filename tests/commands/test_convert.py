"""`quark convert` and `quark evaluate` of GGUF files: folders of a trained model, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark as package
from quark.torch import import_model_from_gguf
from tests.commands.program import quark
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "int4"
    assert quark("quantize", LANGUAGE_MODEL, "--scheme", "int4_wo_32", "-o", out).code == 0
    return out


def test_codes_go_round_all_formats(folder: Path, tmp_path: Path) -> None:
    """quark -> awq -> gguf -> compressed-tensors gives what quark -> compressed-tensors gives."""
    steps = [(folder, "awq", "new/awq"), (tmp_path / "new" / "awq", "gguf", "m.gguf")]
    steps += [(tmp_path / "m.gguf", "gguf", "n.gguf"), (folder, "compressed-tensors", "ct"), (folder, "gguf", "d.gguf")]
    steps += [(tmp_path / "d.gguf", "compressed-tensors", "round")]
    for source, form, out in steps:
        done = quark("convert", source, "--format", form, "-o", tmp_path / out)
        assert done.code == 0, done.err
        assert "values unchanged" in done.out
    direct, around = (load_file(tmp_path / name / "model.safetensors") for name in ("ct", "round"))
    assert direct.keys() == around.keys()
    assert all(torch.equal(direct[name].float(), around[name].float()) for name in direct)
    assert (tmp_path / "round" / "tokenizer.json").exists()


def test_an_output_is_replaced_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.copytree(folder, out)
    (out / "old.json").write_text("{}")
    words = "convert", folder, "--format", "quark", "-o"
    refused = quark(*words, out)
    assert refused.code == 1 and "exists already" in refused.err and (out / "old.json").exists()
    assert (
        quark(*words, out, "--force").code == 0 and not (out / "old.json").exists() and (out / "config.json").exists()
    )
    assert quark(*words, folder, "--force").code == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert package.convert(folder, out, "quark", overwrite=True) == out


def test_values_are_rounded_anew_only_where_it_is_asked(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = quark("convert", folder, "--format", "gguf", "--requantize", "q4_k_m", "-o", tmp_path / "q.gguf")
    assert done.code == 0 and "rounded again to q4_k_m" in done.out, done.err
    again = quark("convert", tmp_path / "q.gguf", "--format", "quark", "--requantize", "int8_wo", "-o", tmp_path / "i8")
    assert again.code == 0, again.err
    ids = torch.arange(3, 67)[None]
    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32)
    expected = import_model_from_gguf(model, tmp_path / "q.gguf").eval()(ids).logits
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "i8", dtype=torch.float32).eval()(ids).logits
    # int8 after 4 bits: a rounding error of 1/256 of the largest of 2048 or 640 columns' weights, no more.
    assert float(((expected - found).norm() / expected.norm()).detach()) < 1 / 50
    text = tmp_path / "text"
    text.write_text(" ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:300]), encoding="utf-8")
    report = quark("evaluate", LANGUAGE_MODEL, tmp_path / "q.gguf", "--text", text, "--length", "64")
    assert report.code == 0 and "perplexity" in report.out, report.err


def test_what_loses_or_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    assert quark("quantize", LANGUAGE_MODEL, "--scheme", "uint4_wo_32", "-o", tmp_path / "u4").code == 0
    (tmp_path / "text.gguf").write_text("no model")
    shutil.copytree(folder, tmp_path / "there")
    for words, message in {
        (tmp_path / "u4", "gguf", "o.gguf"): "would not keep its values to the bit",
        (tmp_path / "u4", "fp8", "o"): "the fp8 format cannot hold",
        (LANGUAGE_MODEL, "awq", "o"): "is a float model",
        (tmp_path / "none", "awq", "o"): "none",
        (tmp_path / "none.gguf", "awq", "o"): "is not a file",
        (tmp_path / "text.gguf", "awq", "o"): "is no GGUF file",
        (folder, "exl2", "o"): "is unknown",
        (folder, "onnx", "o"): "export_onnx",
        (folder, "awq", "there"): "exists already",
        (folder, "awq", "o --requantize int8"): "needs|need calibration data",
        (folder, "awq", "o --requantize q4_k_m"): "only GGUF files hold",
    }.items():
        source, form, out = words
        done = quark("convert", source, "--format", form, "-o", *(f"{tmp_path}/{out}".split()))
        assert done.code == 1 and len(done.err.strip().splitlines()) == 1, (words, done.err)
        assert any(part in done.err for part in message.split("|")), (words, done.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.gguf", "there", "u4"]
