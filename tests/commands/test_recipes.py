"""Recipes: what a command line says as a file, made again bit for bit, and every damaged one refused in a line."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM

import quark as quark_package
from quark.base.command_line import program
from quark.commands.quantize import quantize
from quark.goals.efforts import DEFAULT_TEXT
from quark.jobs import run_folder
from quark.jobs.options import key_of
from quark.jobs.recipes import recipe as recipe_module
from quark.jobs.recipes.recipe import (
    RECIPE,
    Recipe,
    RecipeInFolder,
    data_digest,
    model_digest,
    read_beside,
    said_by,
)
from quark.jobs.recipes.recipe_schema import LARGEST, recipe_model
from quark.jobs.request import options_of
from tests.commands.program import quark
from tests.models.onnx_zoo import cnn, images
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a model that was made of both."""
    root = tmp_path_factory.mktemp("recipes")
    tiny_llama(vocab_size=2048, dtype=torch.bfloat16).save_pretrained(root / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, root / "llama" / name)
    (root / "text.txt").write_text((TEXT / "heldout.txt").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_recipe_in_a_folder_makes_it_again_bit_for_bit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    line = (
        "quantize", "llama", "--scheme", "uint4_wo_32", "--layer", "*.down_proj=int8_wo", "--exclude", "*.o_proj",
        "--algorithm", "gptq:desc_act=false,refine_passes=1", "--algorithm", "distillation:epochs=1",
        "--calib", "text.txt", "--samples", 3, "--length", 64, "--seed", 5, "--synthetic", 2,
        "--write-recipe", tmp_path / "written.yaml", "-o", tmp_path / "first",
    )  # fmt: skip
    assert quark(*line).code == 0
    recipe = tmp_path / "first" / RECIPE
    assert str(place) not in recipe.read_text() and str(tmp_path) not in recipe.read_text()
    content = yaml.safe_load(recipe.read_text())
    assert content["algorithms"] == [
        {"gptq": {"desc_act": False, "refine_passes": 1}},
        {"distillation": {"epochs": 1}},
    ]
    assert content["data"] == {"path": "text.txt", "samples": 3, "length": 64, "seed": 5, "synthetic": 2}
    assert content["layers"] == {"*.down_proj": "int8_wo"} and "output" not in content
    again = quark("run", recipe, "-o", tmp_path / "again")
    assert again.code == 0, again.err
    assert files(tmp_path / "again") == files(tmp_path / "first")
    AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "first")
    assert quark("run", tmp_path / "written.yaml").code == 0, "which says where the output goes"
    assert files(tmp_path / "again") == files(tmp_path / "first")


@pytest.mark.slow
def test_options_take_the_place_of_what_a_recipe_says(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: 1\nmodel: llama\nscheme: uint4_wo_32\nexclude: ['*.o_proj']\n")
    assert quark("run", recipe, "--exclude", "*.q_proj", "--exclude", "*.k_proj", "-o", tmp_path / "out").code == 0
    made = yaml.safe_load((tmp_path / "out" / RECIPE).read_text())
    assert made["exclude"] == ["*.q_proj", "*.k_proj"] and made["scheme"] == "uint4_wo_32"
    assert quark("quantize", "llama", "--scheme", "int8_wo", "-o", tmp_path / "int8").code == 0
    assert quark("run", recipe, "--scheme=int8_wo", "--exclude=lm_head", "-o", tmp_path / "other").code == 0
    pair = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("int8", "other")]
    assert pair[0] == pair[1], "the head is in float anyhow"


@pytest.mark.slow
def test_other_data_and_another_model_are_errors(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "text.txt"):
        (shutil.copytree if (place / name).is_dir() else shutil.copyfile)(place / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    line = ("quantize", "llama", "--scheme", "int8", "--calib", "text.txt", "--samples", 2, "--length", 64, "-o", "out")
    assert quark(*line).code == 0
    with Path("text.txt").open("a") as text:
        text.write(" ")
    other = quark("run", f"out/{RECIPE}", "-o", "again")
    assert other.code == 1 and "text.txt holds other data" in other.err and not Path("again").exists()
    assert quark("run", f"out/{RECIPE}", "--calib", "text.txt", "-o", "again").code == 0
    shutil.copyfile(place / "text.txt", "text.txt")
    weights = bytearray(Path("llama/model.safetensors").read_bytes())
    weights[-1] ^= 1
    Path("llama/model.safetensors").write_bytes(weights)
    other = quark("run", f"out/{RECIPE}", "-o", "third")
    assert other.code == 1 and "llama is another model" in other.err and not Path("third").exists()
    assert quark("run", f"out/{RECIPE}", "--model", "llama", "-o", "third").code == 0


@pytest.mark.slow
def test_the_one_call_writes_a_recipe_that_makes_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    quark_package.quantize(
        "llama", "uint4_wo_32", goal="transformers", data="text.txt", samples=2, exclude=["*.o_proj"],
        algorithm="gptq:refine_passes=0", output=tmp_path / "first",
    )  # fmt: skip
    done = quark("run", tmp_path / "first" / RECIPE, "-o", tmp_path / "again")
    assert done.code == 0, done.err
    assert files(tmp_path / "again") == files(tmp_path / "first")


@pytest.mark.slow
def test_a_language_model_without_data_gets_the_text_of_the_package(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    planned = quark("plan", "llama", "--scheme", "int8", "--samples", 2, "--length", 32)
    assert "data: the text of the package, 2 samples of 32 tokens, packed, the first ones" in planned.out
    done = quark("quantize", "llama", "--scheme", "int8", "--samples", 2, "--length", 32, "-o", tmp_path / "without")
    assert "no --calib is given: the text of the package is taken" in done.log
    given = ("--calib", DEFAULT_TEXT, "--samples", 2, "--length", 32)
    assert quark("quantize", "llama", "--scheme", "int8", *given, "-o", tmp_path / "given").code == 0
    pair = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("without", "given")]
    assert pair[0] == pair[1]
    made = yaml.safe_load((tmp_path / "without" / RECIPE).read_text())
    assert made["made_with"]["calib"] == data_digest(DEFAULT_TEXT) and "path" not in made["data"]
    made["made_with"]["calib"] = "sha256:0"
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(made))
    other = quark("run", tmp_path / "other.yaml", "-o", tmp_path / "third")
    assert other.code == 1 and "holds other data" in other.err


def test_the_text_of_the_package_has_many_kinds_of_text() -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    assert 150_000 < len(text.encode()) < 400_000
    scripts = {
        "Latin": "ü",
        "Cyrillic": "ж",
        "Han": "山",
        "Kana": "の",
        "Hangul": "도",
        "Arabic": "ق",
        "Devanagari": "म",
    }
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        assert "def " in part and "SELECT" in text, "code is spread over the whole"
    assert all(letter in text for letter in scripts.values()), "and so are languages"


@pytest.mark.slow
def test_a_recipe_evaluates_what_it_made(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    recipe = tmp_path / "recipe.yaml"
    text = "recipe: 1\nmodel: llama\nscheme: uint4_wo_32\nevaluation: {data: NAME, length: 32, windows: 2}\n"
    recipe.write_text(text.replace("NAME", "missing.txt"))
    early = quark("run", recipe, "-o", tmp_path / "out")
    assert early.code == 1 and "evaluation.data: missing.txt is not there" in early.err
    assert not (tmp_path / "out").exists()
    os.mkfifo(tmp_path / "pipe")
    recipe.write_text(text.replace("NAME", str(tmp_path / "pipe")))
    early = quark("run", recipe, "-o", tmp_path / "out")
    assert early.code == 1 and "is a pipe or a device" in early.err and not (tmp_path / "out").exists()
    recipe.write_text(text.replace("NAME", "text.txt"))
    done = quark("run", recipe, "-o", tmp_path / "out")
    assert done.code == 0 and "Float against quantized" in done.out, done.err


@pytest.mark.slow
def test_a_recipe_of_an_onnx_file_makes_it_again_and_lies_beside_nothing(tmp_path: Path) -> None:
    model, data, out = tmp_path / "model.onnx", tmp_path / "data.npz", tmp_path / "out"
    onnx.save(cnn(), model)
    out.mkdir()
    np.savez(data, **{cnn().graph.input[0].name: np.concatenate([next(iter(batch.values())) for batch in images(8)])})
    line = ("quantize", model, "--config", "A8W8", "--calib", data, "--samples", 4)
    done = quark(*line, "--write-recipe", tmp_path / "r.yaml", "-o", out / "first.onnx")
    assert done.code == 0, done.err
    assert [path.name for path in out.iterdir()] == ["first.onnx"]
    done = quark("run", tmp_path / "r.yaml", "-o", out / "second.onnx")
    assert done.code == 0, done.err
    assert (out / "first.onnx").read_bytes() == (out / "second.onnx").read_bytes()


# The keys. -----------------------------------------------------------------------------------------------------------


def test_every_field_of_a_request_is_an_option_and_a_key() -> None:
    options = {param.name for param in typer.main.get_command(program(quantize)).params}  # type: ignore[attr-defined]
    assert options == {"model", *options_of()}
    schema = recipe_model().model_json_schema()
    keys = set(schema["properties"]) | {
        f"{section.lower()}.{key}" for section, inner in schema["$defs"].items() for key in inner["properties"]
    }
    for name, each in options_of().items():
        assert key_of(each) is None or key_of(each) in keys, name
    unsaid = {name for name, each in options_of().items() if key_of(each) is None}
    assert unsaid == {"force", "process_timeout", "trust_remote_code", "write_recipe"} and not unsaid & keys


def test_the_schema_is_printed_and_says_what_the_help_says() -> None:
    done = quark("run", "--schema")
    schema = json.loads(done.out)
    assert done.code == 0 and schema["required"] == ["recipe", "model"] and schema["additionalProperties"] is False
    assert schema["properties"]["scheme"]["description"].startswith("Name of a scheme")


def test_parameters_of_algorithms_come_back_as_they_were() -> None:
    item: dict[str, Any] = {"gptq": {"a": True, "b": [1, 2.5], "c": "x,y", "d": None}}
    assert said_by({"algorithm": [item]}) == {"algorithm": ('gptq:a=true,b=[1, 2.5],c="x,y",d=null',)}
    assert said_by({"stream": False, "calib": "x", "layer": {"*.a": "int8"}, "mean": 0.5}) == {
        "stream": False, "calib": Path("x"), "layer": ("*.a=int8",), "mean": "0.5",
    }  # fmt: skip


# Bad input. ----------------------------------------------------------------------------------------------------------

GOOD = "recipe: 1\nmodel: llama\nscheme: int8_wo\n"
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nrecipe: 1\nmodel: llama\n"
BAD = {
    "empty": ("", "holds no recipe"),
    "a list": ("- 1\n- 2\n", "holds no recipe"),
    "no version": ("model: llama\n", "recipe: Field required"),
    "a later version": ("recipe: 2\nmodel: llama\n", "recipe: Input should be less than or equal to 1"),
    "no model": ("recipe: 1\nscheme: int8_wo\n", "model: Field required"),
    "a misspelled key": (GOOD + "shceme: int4\n", "there is no key shceme. Did you mean 'scheme'?"),
    "a misspelled key in a section": (GOOD + "data: {smaples: 4}\n", "no key data.smaples. Did you mean 'samples'"),
    "a key of the command line only": (GOOD + "trust_remote_code: true\n", "there is no key trust_remote_code"),
    "text for a number": (GOOD + "data: {samples: many}\n", "data.samples: Input should be a valid integer"),
    "a negative number": (GOOD + "data: {samples: -4}\n", "data.samples: Input should be greater than or equal to 1"),
    "not a number": ("recipe: 1\nmodel: llama\nbits: .nan\n", "bits: Input should be a finite number, got nan"),
    "text for a list": (GOOD + "exclude: lm_head\n", "exclude: Input should be a valid list, got 'lm_head'"),
    "a section that is text": (GOOD + "data: text.txt\n", "data: Input should be"),
    "two algorithms in one": (GOOD + "algorithms: [{gptq: {}, awq: {}}]\n", "algorithms.0: "),
    "a key twice": (GOOD + "scheme: int4\n", "line 4, column 1: the key 'scheme' stands there twice"),
    "a key that is no text": (GOOD + "1: 1\n", "line 4, column 1: the key 1 is no text"),
    "an octal of some readers": (GOOD + "samples: 010\n", "line 4, column 10: 010 is octal to some readers"),
    "an alias bomb": (BOMB, "line 1, column 4: anchors and aliases are not taken"),
    "an object of Python": (GOOD + "exclude: !!python/object/apply:os.system ['touch made']\n", "line 4"),
    "two documents": (GOOD + "---\n" + GOOD, "but found another document"),
    "no YAML": ("recipe: [1\n", "line 2, column 1"),
    "deep": ("a: " + "[" * 2000, "no YAML of a recipe"),
    "control characters": ("recipe: \x00\n", "no YAML of a recipe"),
    "large": ("#" * (LARGEST + 1), f"recipe.yaml has {LARGEST + 1} bytes; a recipe has at most"),
}


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k == "deep" else k for k in BAD])
def test_a_bad_recipe_is_one_clear_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = BAD[name]
    Path("recipe.yaml").write_text(text)
    done = quark("run", "recipe.yaml", "-o", "out")
    assert done.code == 1 and message in done.err and "recipe.yaml" in done.err, done.err
    assert done.err.count("\n") == 1 and "Unexpected" not in done.err and done.err.count("recipe.yaml") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["missing.yaml"], 1, "missing.yaml is not a file"),
        (["."], 1, "is not a file but a folder, pipe or device"),
        (["pipe"], 1, "is not a file but a folder, pipe or device"),
        (["latin1.yaml"], 1, "is no UTF-8 text"),
        (["good.yaml"], 2, "does not say where the output goes. Possible: -o PATH"),
        (["good.yaml", "word", "-o", "out"], 2, "(word)"),
        (["good.yaml", "--smaples", "3", "-o", "out"], 2, "--smaples"),
        (["good.yaml", "--samples", "0", "-o", "out"], 2, "Invalid value for '--samples'"),
        (["good.yaml", "-o", "out"], 1, "llama is no model folder"),
    ],
)
def test_a_wrong_line_is_one_clear_line(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("good.yaml").write_text(GOOD)
    Path("latin1.yaml").write_bytes("größe: 1".encode("latin-1"))
    done = quark("run", *words)
    assert done.code == code and message in done.err and done.err.count("\n") == 1, done.err
    assert not Path("out").exists()


def test_digests_see_names_contents_and_what_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"one")
    first = data_digest(folder)
    (folder / "a.png").rename(folder / "b.png")
    second = data_digest(folder)
    (folder / "b.png").write_bytes(b"two")
    assert len({first, second, data_digest(folder)}) == 3
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe"):
        with pytest.raises(ValueError, match=name):
            data_digest(tmp_path / name)


def test_the_model_is_read_beside_the_work_and_no_longer_than_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    begun, threads = Event(), []
    read = recipe_module.digest_of

    def slow(file: Path, ended: Event | None = None) -> str:
        threads.append(current_thread())
        begun.set()
        if ended is not None:
            assert ended.wait(60)
        return read(file, ended)

    monkeypatch.setattr(recipe_module, "digest_of", slow)
    recipe = Recipe({"model": tmp_path})
    with pytest.raises(KeyError), read_beside(tmp_path):
        assert begun.wait(60)
        raise KeyError
    begun.clear()
    with read_beside(tmp_path) as of_model:
        assert begun.wait(60)
    assert main_thread() not in threads
    # What was given up is made when somebody asks for it.
    assert replace(recipe, of_model=of_model).digests == recipe.digests == {"model": model_digest(tmp_path)}


def test_what_the_thread_has_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    expected = model_digest(tmp_path)
    with read_beside(tmp_path) as of_model:
        assert of_model() == expected
        monkeypatch.setattr(recipe_module, "model_digest", lambda *_: pytest.fail("read twice"))
        written = dict(RecipeInFolder(Recipe({"model": tmp_path}, of_model=of_model)))
    assert yaml.safe_load(written[RECIPE])["made_with"]["model"] == expected


def test_data_that_are_missing_are_named_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Event] = []

    def waiting(model: Path, ended: Event) -> str:
        begun.append(ended)
        assert ended.wait(60)
        raise CancelledError

    monkeypatch.setattr(recipe_module, "model_digest", waiting)
    monkeypatch.setattr(run_folder, "write_folder", lambda *_: pytest.fail("begun"))
    options = ("--scheme", "int8_wo", "--calib", tmp_path / "absent", "-o", tmp_path / "out")
    said = quark("quantize", place / "llama", *options)
    assert said.code == 1 and "absent is not there" in said.err
    assert [ended.is_set() for ended in begun] == [True] and not (tmp_path / "out").exists()
