"""A GGUF file at every door where a model folder goes: what is made of it is what is made of the folder of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark
from quark.compat.llm_scripts.model_loading import get_model
from quark.errors import ConfigError, FormatError, OutputExistsError, UsageError
from tests.commands.program import quark as program
from tests.models.gguf_rows import build
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT
from tests.torch.writers.test_gguf_folder import quantized, written

HELD_OUT = ("--data", TEXT / "heldout.txt", "--windows", 2, "--length", 32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("file")
    return written(build("llama", torch.bfloat16, attention_bias=False), folder / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What quark convert makes of the file."""
    return quark.convert(file, tmp_path_factory.mktemp("folder") / "tiny")


def same_files(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {"quark_recipe.yaml"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_convert_makes_a_folder_that_transformers_loads(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, expected = AutoModelForCausalLM.from_pretrained(folder), build("llama", torch.bfloat16, attention_bias=False)
    assert model.dtype == torch.bfloat16
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in expected.state_dict().items())
    with pytest.raises(OutputExistsError, match="exists already"):
        quark.convert(file, folder)


@pytest.mark.slow
def test_convert_says_what_it_rounds(tmp_path: Path) -> None:
    made = quantized("q4_0", tmp_path, attention_bias=False, hidden_size=256, intermediate_size=256)
    for dtype, words in (("bfloat16", "values rounded to bfloat16"), ("float32", "values unchanged")):
        done = program("convert", made, "-o", tmp_path / dtype, "--dtype", dtype)
        assert done.code == 0 and "(float): " in done.out and words in done.out, done.err
        (stored,) = {value.dtype for value in load_file(tmp_path / dtype / "model.safetensors").values()}
        assert stored == getattr(torch, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"scheme": "int8_wo"}, {"goal": "vllm", "effort": "fast"}, {"scheme": "int8_wo", "stream": True}]
)
def test_quantize_gives_what_it_gives_of_the_folder(
    options: dict[str, str], file: Path, folder: Path, tmp_path: Path
) -> None:
    for source, output in ((file, "a"), (folder, "b")):
        quark.quantize(source, output=tmp_path / output, **options)
    same_files(tmp_path / "a", tmp_path / "b")
    recipe = (tmp_path / "a/quark_recipe.yaml").read_text(encoding="utf-8")
    assert f"model: {file}" in recipe and "tiny" in (tmp_path / "a/README.md").read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".quark*"))


@pytest.mark.slow
def test_a_file_becomes_another_file_and_a_budget_is_kept(file: Path, folder: Path, tmp_path: Path) -> None:
    data = {"data": TEXT / "calibration.txt", "samples": 4, "length": 32, "scheme": None}
    for source, output in ((file, "a"), (folder, "b")):
        quark.quantize(source, "q8_0", goal="llama.cpp", output=tmp_path / f"{output}/tiny.gguf")
        quark.quantize(source, goal="transformers", bits=7.0, output=tmp_path / f"{output}-bits", **data)
    assert (tmp_path / "a/tiny.gguf").read_bytes() == (tmp_path / "b/tiny.gguf").read_bytes()
    same_files(tmp_path / "a-bits", tmp_path / "b-bits")


@pytest.mark.slow
def test_a_recipe_names_the_file_and_makes_it_again(file: Path, tmp_path: Path) -> None:
    quark.quantize(file, "int8_wo", output=tmp_path / "a")
    done = program("run", tmp_path / "a/quark_recipe.yaml", "-o", tmp_path / "b")
    assert done.code == 0, done.err
    same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_plan_evaluate_and_compare_take_the_file(file: Path, folder: Path, tmp_path: Path) -> None:
    plans = [program("plan", source, "--for", "vllm", "--effort", "fast") for source in (file, folder)]
    assert plans[0].code == 0 and plans[0].out == plans[1].out
    shares = [program("plan", source, "--for", "vllm", "--size", "86%") for source in (file, folder)]
    assert shares[0].err == shares[1].err and "0.58 MB is" in shares[0].err  # of the bytes of the folder
    quark.quantize(folder, "int4_wo_32", output=tmp_path / "q")
    measured = [
        quark.evaluate(source, tmp_path / "q", data=TEXT / "heldout.txt", windows=2, length=32)
        for source in (file, folder)
    ]
    assert measured[0].comparison.perplexity == measured[1].comparison.perplexity
    compared = [
        quark.compare(source, "int8_wo,fp8", calib=TEXT / "calibration.txt", windows=2, length=32)
        for source in (file, folder)
    ]
    assert compared[0] == compared[1]


def test_what_cannot_be_done_is_said_before_a_value_is_read(file: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    with pytest.raises(OutputExistsError, match="exists already"):
        quark.quantize(file, "int8_wo", output=tmp_path / "there")
    with pytest.raises(OutputExistsError, match=r"tiny\.gguf itself, which is read"):
        quark.quantize(file, "q8_0", goal="llama.cpp", output=file, overwrite=True)
    for options, words in (({"scheme": "int8_wo", "kv_cache": "fp9"}, "fp9"), ({"scheme": "int4_wo_128"}, "128")):
        done = program(
            "quantize", file, *(f"--{k.replace('_', '-')}={v}" for k, v in options.items()), "-o", tmp_path / "x"
        )
        assert done.code == 1 and words in done.err and "Reading" not in done.log, done
    with pytest.raises(ConfigError, match="applies to format='?float|of a GGUF file|dtype"):
        quark.convert(file, tmp_path / "x", "gguf", dtype="float16")
    with pytest.raises(ConfigError, match=r"Possible: quark quantize .*tiny\.gguf"):
        quark.convert(file, tmp_path / "x", requantize="int8_wo")
    with pytest.raises(ConfigError, match="is of a GGUF file"):
        quark.convert(folder, tmp_path / "x", "float")
    with pytest.raises(UsageError, match="Missing option"):
        quark.convert(folder, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".quark*"))


def test_doors_of_folders_alone_say_how_a_file_becomes_one(file: Path) -> None:
    with pytest.raises(FormatError, match=r"It is a GGUF file\. Possible: quark convert .*tiny\.gguf -o FOLDER"):
        get_model(file)


def test_the_config_has_what_the_file_says(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = json.loads((LANGUAGE_MODEL / "config.json").read_text(encoding="utf-8"))
    assert stored["dtype"] == "bfloat16" and stored["model_type"] == own["model_type"]
    assert (stored["bos_token_id"], stored["eos_token_id"]) == (own["bos_token_id"], own["eos_token_id"])
