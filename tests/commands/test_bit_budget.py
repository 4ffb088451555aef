"""`--bits` and `--size`: a budget in place of a scheme, on the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark.jobs.folders.bit_budget import bytes_of, size_within
from quark.torch import LLMTemplate
from quark.torch.bit_budget.measure import FITS_ALL, mixed_format, settings_of_folder
from quark.torch.bit_budget.sensitivity import SensitivityTable
from quark.torch.layers.replace import quantized_layers
from tests.commands.program import quark
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text and the table that `quark plan` makes of both."""
    root = tmp_path_factory.mktemp("budget")
    tiny_llama(vocab_size=2048, max_position_embeddings=64).save_pretrained(root / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, root / "llama" / name)
    (root / "text.txt").write_text((TEXT / "heldout.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    done = quark(
        "plan", root / "llama", "--bits", 4.5, "--calib", root / "text.txt", "--samples", 4,
        "--sensitivity", root / "table.json",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "int3_wo_128" in done.out and re.search(r"\* chosen|chosen \*", done.out), "in the chart"
    return root


@pytest.mark.slow
def test_a_table_for_another_program_is_refused(place: Path) -> None:
    """Of the same candidates: the file is of layers apart."""
    done = quark(
        "plan", place / "llama", "--bits", 5, "--candidates", "uint4_wo_128,int8_wo", "--for", "transformers",
        "--sensitivity", place / "table.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    table = SensitivityTable.load(place / "table.json")
    base = LLMTemplate.get("auto").get_config(FITS_ALL)
    with pytest.raises(ConfigError, match="another program"):
        table.check(settings_of_folder(place / "llama", base, mixed_format("quark")), None)


def algorithms(folder: Path) -> list[str] | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return config["algo_config"] and [each["name"] for each in config["algo_config"]]


@pytest.mark.slow
def test_a_solver_reads_the_data_that_a_budget_was_measured_on(place: Path) -> None:
    line = ("quantize", place / "llama", "--bits", 3.8, "--calib", place / "text.txt", "--samples", 4)
    assert quark(*line, "-o", place / "solved").code == 0
    assert algorithms(place / "solved") == ["qronos"]
    recipe = (place / "solved" / "quark_recipe.yaml").read_text(encoding="utf-8")
    assert "algorithms:\n- qronos" in recipe, "a table that is stored by then would leave it out"
    assert quark(*line, "--algorithm", "gptq", "-o", place / "asked").code == 0
    assert algorithms(place / "asked") == ["gptq"]


@pytest.mark.slow
def test_a_table_gives_another_budget_without_data(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = quark("quantize", place / "llama", "--bits", 3.8, "--sensitivity", place / "table.json", "-o", place / "out")
    assert done.code == 0, done.err
    assert "--bits 3.8:" in done.out
    assert algorithms(place / "out") is None
    layers = quantized_layers(AutoModelForCausalLM.from_pretrained(place / "out"))
    bits = {layer.spec.weight.dtype.bits for layer in layers.values() if layer.spec.weight}
    assert len(layers) == 14 and len(bits) > 1
    assert quark("evaluate", place / "llama", place / "out", "--data", place / "text.txt").code == 0
    assert quark("inspect", place / "out").code == 0


@pytest.mark.slow
def test_streamed_it_is_the_same_folder_with_an_algorithm_too(place: Path) -> None:
    made = []
    for name, more in (("whole", "--no-stream"), ("streamed", "--stream")):
        done = quark(
            "quantize", place / "llama", "--size", "2.3MB", "--sensitivity", place / "table.json",
            "--algorithm", "gptq", "--calib", place / "text.txt", "--samples", 4, more, "-o", place / name,
        )  # fmt: skip
        assert done.code == 0, done.err
        made.append((place / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    assert len(made[0]) < 2.3e6 + 10_000  # names and shapes come before the tensors


USAGE = (
    "exclude each other",
    "is no size",
    "is no number",
    "is no part",
    "belong to",
    "belongs to",
    "Missing option",
    "greater than or equal",
)
"""What is wrong with the words alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bits 2 --sensitivity {table}", "2 bits is below the smallest choice"),
        ("--bits 12 --sensitivity {table}", "12 bits is above the largest choice"),
        ("--bits 4 --candidates int3_wo_128,int9 --calib {text}", "Unknown scheme 'int9'"),
        ("--bits 4 --candidates mxfp4,int8_wo --sensitivity {table}", "'mxfp4' is not in this table"),
        ("--bits 4 --scheme int8_wo", "--scheme and --bits exclude each other"),
        ("--size 3MB --bits 4", "--bits and --size exclude each other"),
        ("--size 3bananas", "'3bananas' is no size"),
        ("--size 0", "--size 0 is no size"),
        ("--size 120% --calib {text}", "--size 120% is no part of"),
        ("--size 1% --sensitivity {table}", "is below the smallest choice"),
        *((f"--bits {bits} --sensitivity {{table}}", f"--bits {bits} is no number") for bits in ("inf", "0")),
        ("--scheme int8_wo --candidates int8_wo", "--candidates belongs to --bits or --size"),
        ("--bits 4 --sensitivity {table} --export-format awq", "not counted in the format awq"),
        ("--bits 4 --sensitivity {table} --export-format gguf", "another format"),
        ("--for vllm --bits 4.5 --candidates int3_wo_128,uint4_wo_128 --calib {text}", "vLLM 0.32 refuses int3_wo_128"),
        ("--for ryzen-ai --bits 4.5 --calib {text}", "no format of Ryzen AI is known to hold"),
        ("--for vllm --bits 4.5 --export-format awq --calib {text}", "written as quark, not as awq"),
        ("--for llama.cpp --candidates q4_k,q8_0", "belong to --bits or --size"),
        ("--bits 4 --sensitivity {table} --export-format compressed-tensors", "another format"),
        ("--bits 4 --sensitivity {table} --exclude *.down_proj", "other excluded layers"),
        ("--bits 4 --sensitivity {table} --calib {text} --samples 3", "other calibration data"),
        ("--bits 4 --sensitivity {table} --kv-cache fp8", "--kv-cache and --attention"),
        ("--bits 4 --sensitivity {table} --keep-unexpected", "--keep-unexpected with --bits 4"),
        ("--bits 4 --sensitivity {text}", "is no table of sensitivities"),
        ("", "Missing option --scheme or --for"),
    ],
)
def test_a_wrong_budget_is_one_line(place: Path, words: str, message: str) -> None:
    more = words.format(table=place / "table.json", text=place / "text.txt", root=place).split()
    done = quark("quantize", place / "llama", *more, "-o", place / "wrong")
    assert done.code == (2 if any(part in message for part in USAGE) else 1)
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (place / "wrong").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("2.1GB", 2_100_000_000), ("800MB", 800_000_000), ("2GiB", 2 << 30), ("17", 17), ("1.5k", 1500)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1,5GB", "1PB", "0", "9" * 400, "1e400GB"])
def test_other_words_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        bytes_of(text)


def test_a_share_of_a_size_is_that_of_the_weight_files(tmp_path: Path) -> None:
    """However many they are; what else lies in the folder does not count."""
    for name, count in (("a.safetensors", 3000), ("b.safetensors", 1001), ("tokenizer.json", 500)):
        (tmp_path / name).write_bytes(bytes(count))
    assert [size_within(text, tmp_path) for text in ("25%", "12.5 %", "2k")] == [1000, 500, 2000]


@pytest.mark.parametrize("text", ["0%", "100%", "250%", "-5%", "%", "5%B"])
def test_other_words_are_no_shares(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(3000))
    with pytest.raises(ConfigError, match="is no (part of|size)"):
        size_within(text, tmp_path)


def test_a_folder_without_weight_files_has_no_shares(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors files to be a share of"):
        size_within("50%", tmp_path)


@pytest.fixture(scope="module")
def sized(place: Path) -> list[tuple[str, Path]]:
    """GGUF files of budgets by one table, and their options."""
    table, made = place / "gguf.json", []
    for index, words in enumerate((["--bits", 4.9], ["--size", "0.6MB"])):
        file = place / f"{index}.gguf"
        data = ["--calib", place / "text.txt", "--samples", 2, *([] if index else ["--algorithm", "gptq"])]
        asked = ["--for", "llama.cpp", *words, *data, "--sensitivity", table, "-o", file]
        done = quark("quantize", place / "llama", *asked)
        assert done.code == 0, done.err
        made.append((str(words[0]), file))
    return made


@pytest.mark.slow
def test_a_budget_over_block_types_is_kept(sized: list[tuple[str, Path]]) -> None:
    """Embeddings and head counted: bits of all matrices as the gguf package finds them, or bytes of the file."""
    import gguf

    for option, file in sized:
        held = gguf.GGUFReader(file).tensors
        matrices = [tensor for tensor in held if len(tensor.shape) > 1]
        bits = 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(t.n_elements) for t in matrices)
        assert len({t.tensor_type for t in matrices}) > 1
        if option == "--bits":
            assert 4.5 < bits <= 4.9
        else:
            assert 0.57e6 < file.stat().st_size <= 0.6e6


@pytest.mark.slow
def test_transformers_reads_a_mix_that_a_budget_chose(place: Path, sized: list[tuple[str, Path]]) -> None:
    done = quark("evaluate", place / "llama", sized[0][1], "--data", place / "text.txt")
    assert done.code == 0, done.err
