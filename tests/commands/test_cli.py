"""The commands from end to end, and every bad input: exit code 1, one clear line, nothing half-written."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from quark.commands import COMMANDS
from quark.core.schemes import SCHEMES
from quark.gguf import MIXES
from quark.torch.checkpoint.opened import OpenedFolder
from tests.commands.program import Done, quark
from tests.models.denoisers import denoiser
from tests.models.onnx_zoo import cnn, images
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama, tiny_opt, token_batches

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WORDS = 400
"""Of the text that tests calibrate and evaluate on: more than one window of 256 tokens."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Inputs by name, good and bad; tests never change them."""
    root = tmp_path_factory.mktemp("inputs")
    model = root / "llama"
    tiny_llama(vocab_size=2048, dtype=torch.bfloat16).save_pretrained(model)
    for name in TOKENIZER:
        shutil.copyfile(LANGUAGE_MODEL / name, model / name)
    text = root / "text.txt"
    text.write_text(" ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:WORDS]), encoding="utf-8")
    (root / "empty.txt").write_text("")
    (root / "latin1.txt").write_bytes("Größe ".encode("latin-1") * 500)
    (root / "file").write_text("no folder")
    assert quark("quantize", model, "--scheme", "uint4_wo_32", "-o", root / "quantized").code == 0
    return {
        "llama": model,
        "text": text,
        "quantized": root / "quantized",
        "opt": tiny_opt(root / "opt"),
        "missing": root / "missing",
        "file": root / "file",
        "empty_text": root / "empty.txt",
        "latin1": root / "latin1.txt",
        "no_config": damaged(model, root / "no_config", "config.json", None),
        "broken_config": damaged(model, root / "broken_config", "config.json", b'{"model_type": "llama",'),
        "list_config": damaged(model, root / "list_config", "config.json", b"[1, 2]"),
        "no_type": damaged(model, root / "no_type", "config.json", b"{}"),
        "no_weights": damaged(model, root / "no_weights", "model.safetensors", None),
        "no_tokenizer": damaged(model, root / "no_tokenizer", "tokenizer.json", None),
        "truncated": damaged(model, root / "truncated", "model.safetensors", weights(model)[:-1000]),
        "emptied": damaged(model, root / "emptied", "model.safetensors", b""),
    }


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def damaged(source: Path, target: Path, name: str, content: bytes | None) -> Path:
    """A copy of a model folder with one file replaced, or removed."""
    shutil.copytree(source, target)
    (target / name).unlink()
    if content is not None:
        (target / name).write_bytes(content)
    return target


def run(line: str, places: dict[str, Path], **more: Path) -> Done:
    """Run a command line with the places filled in."""
    return quark(*(word.format(**places, **more) for word in line.split()))


def succeed(line: str, places: dict[str, Path], **more: Path) -> str:
    """The output of a command line that must work and write nothing to stderr."""
    done = run(line, places, **more)
    assert (done.code, done.err) == (0, "")
    return done.out


def stored_config(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def megabytes(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) MB", text)]


# The commands. -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quantize_writes_a_folder_that_transformers_loads(places: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = succeed("quantize {llama} --scheme uint4_wo_128 -o {out}", places, out=tmp_path / "out")
    before, after = megabytes(out)
    assert after < before
    assert after == pytest.approx((tmp_path / "out" / "model.safetensors").stat().st_size / 1e6, abs=0.01)
    assert stored_config(tmp_path / "out")["quant_method"] == "quark"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a word").input_ids
    with torch.no_grad():
        assert torch.isfinite(loaded(token_batches(1)[0]).logits).all()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_quantize_with_calibration_text(places: dict[str, Path], tmp_path: Path) -> None:
    line = "quantize {llama} --scheme int8 --calib {text} --samples 2 -o {out}"
    succeed(line, places, out=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert float(tensors["model.layers.0.mlp.down_proj.input_scale"]) > 0


@pytest.mark.slow
def test_streaming_writes_the_same_files(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark.jobs.folders import flows

    line = ("quantize", places["llama"], "--scheme", "int8", "--calib", places["text"])
    assert quark(*line, "-o", tmp_path / "memory").code == 0
    assert quark(*line, "-o", tmp_path / "stream", "--stream").code == 0
    monkeypatch.setattr(flows, "fits_memory", lambda size: size < 1000)
    assert quark(*line, "-o", tmp_path / "small").code == 0
    for file in (tmp_path / "memory").iterdir():
        for other in ("stream", "small"):
            assert (tmp_path / other / file.name).read_bytes() == file.read_bytes(), file.name
    done = quark(*line, "-o", tmp_path / "no", "--stream", "--dtype", "float32")
    assert done.code == 1 and "--dtype auto" in done.err


@pytest.mark.slow
def test_what_needs_no_data_goes_from_file_to_file(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those of a model in memory, which is built only where it has to be."""
    from quark.jobs.folders import flows

    ways = []
    in_memory = flows._in_memory
    monkeypatch.setattr(flows, "_in_memory", lambda *a: ways.append("memory") or in_memory(*a))
    line = ("quantize", places["llama"], "--scheme", "int4_wo_32", "--layer", "*.down_proj=int8_wo")
    assert quark(*line, "-o", tmp_path / "files").code == 0 and not ways
    assert quark(*line, "-o", tmp_path / "memory", "--no-stream").code == 0 and ways == ["memory"]
    names = [{file.name for file in (tmp_path / folder).iterdir()} for folder in ("files", "memory")]
    assert names[0] == names[1] and "config.json" in names[0]
    for name in names[0]:
        assert (tmp_path / "files" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes(), name


@pytest.mark.slow
def test_quantize_with_rules_for_layers(places: dict[str, Path], tmp_path: Path) -> None:
    line = "quantize {llama} --scheme int4_wo_32 --layer *.down_proj=int8_wo --layer *.up_proj=mxfp4_weight_only "
    succeed(line + "--exclude *.q_proj --exclude re:.*k_proj -o {out}", places, out=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensors[f"model.layers.1.{name}.weight"].dtype for name in ("mlp.down_proj", "mlp.up_proj")}
    assert dtypes == {"mlp.down_proj": torch.int8, "mlp.up_proj": torch.uint8}
    excluded = stored_config(tmp_path / "out")["exclude"]
    assert isinstance(excluded, list)
    assert sorted(excluded) == sorted(
        ["lm_head", *(f"model.layers.{i}.self_attn.{leaf}" for i in (0, 1) for leaf in ("q_proj", "k_proj"))]
    )


def test_quantize_passes_on_how_to_write(places: dict[str, Path], tmp_path: Path) -> None:
    line = "quantize {llama} --scheme int4_wo_32 --dtype float32 --weight-format fake_quantized --pack-method order "
    succeed(line + "--max-shard-size 1MB -o {out}", places, out=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    export = stored_config(tmp_path / "out")["export"]
    assert isinstance(export, dict)
    assert (export["weight_format"], export["pack_method"]) == ("fake_quantized", "order")


@pytest.mark.slow
def test_force_replaces_the_output(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    succeed("quantize {llama} --scheme int8_wo -o {out}", places, out=tmp_path / "out")
    (tmp_path / "out" / "old").write_text("")
    succeed("quantize {llama} --scheme mxfp4 --force -o {out}", places, out=tmp_path / "out")
    assert not (tmp_path / "out" / "old").exists()
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8


@pytest.mark.slow
def test_evaluate_compares_models_and_layers(places: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    from quark.jobs.folders.models import load_model
    from quark.torch.llm.text import perplexity, token_windows

    line = "evaluate {llama} {quantized} --text {text} --length 64 --windows 3 --layers 2"
    out = succeed(line, places)
    data = token_windows(AutoTokenizer.from_pretrained(places["llama"]), places["text"], 64, 3)
    # A processor without products of bfloat16 sums those of several samples in another order than those of one.
    lines = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    rows = {name.strip(): [cell.split()[0] if cell.strip() else "" for cell in rest] for name, *rest in lines}
    for place, name in (("llama", "float"), ("quantized", "quantized")):
        expected = perplexity(load_model(OpenedFolder(places[place])), data)
        assert float(rows[name][1]) == pytest.approx(expected, rel=2e-4)
        assert f"{len(weights(places[place])) / 1e6:.2f}" in out
    with torch.no_grad():
        scores = [
            torch.cat([model(window).logits[0] for window in data]).double().log_softmax(-1)
            for model in (load_model(OpenedFolder(places["llama"])), load_model(OpenedFolder(places["quantized"])))
        ]
    kl = torch.nn.functional.kl_div(scores[1], scores[0], reduction="none", log_target=True).sum(-1).mean()
    assert float(rows["quantized"][2]) == pytest.approx(kl.item(), rel=0.02)
    assert out.count("model.layers.") == 2


@pytest.mark.slow
def test_plan_reads_no_weights_and_predicts_the_size(places: dict[str, Path], tmp_path: Path) -> None:
    line = "--scheme int4_wo_32 --layer *.down_proj=mxfp4 --exclude *.q_proj"
    out = succeed("plan {no_weights} " + line, places)
    assert "int4 group 32" in out and "fp4_e2m1 group 32" in out
    written = megabytes(succeed("quantize {llama} -o {out} " + line, places, out=tmp_path / "out"))
    assert megabytes(out) == pytest.approx(written, rel=0.02)


def test_inspect_shows_the_quantization_of_a_folder(places: dict[str, Path]) -> None:
    out = succeed("inspect {quantized}", places)
    assert f"llama, {len(weights(places['quantized'])) / 1e6:.2f} MB" in out
    assert re.search(r"quant_method +\S quark ", out) and re.search(r"weight\.dtype +\S uint4 ", out)
    assert re.search(
        r"self_attn\.q_proj +\S 2 +\S weight int32, weight_scale \w+, weight_zero_point int32 +\S \d\.\d\d ", out
    )
    assert "a float model" in succeed("inspect {llama}", places)


@pytest.mark.parametrize("value", ["5", '["fp8"]', "[" * 5000 + "]" * 5000], ids=["number", "list", "deep"])
def test_inspect_refuses_a_quantization_config_that_is_no_object(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "quantization_config": {value}}}')
    done = quark("inspect", tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1) and "config.json" in done.err


def test_inspect_opens_no_pipe_and_follows_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "0.00 MB" in quark("inspect", tmp_path).out
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert "no config.json" in quark("inspect", tmp_path).err


def test_schemes_lists_every_scheme() -> None:
    done = quark("schemes")
    assert done.code == 0
    for name in MIXES:
        assert f" {name} " in done.out, name
    for name, layer in SCHEMES.items():
        assert re.search(rf"{name} +\S +{re.escape(str(layer.weight))} ", done.out), name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    done = quark(command, "--help")
    assert done.code == 0 and done.err == ""
    assert f"Example: quark {command}" in done.out


@pytest.mark.slow
def test_the_examples_of_help_run(places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(places["llama"], tmp_path / "llama")
    shutil.copyfile(places["text"], tmp_path / "heldout.txt")
    onnx.save(cnn(), tmp_path / "model.onnx")
    np.savez(tmp_path / "samples.npz", x=images()[0]["x"])
    denoiser("flux").save_pretrained(tmp_path / "flux" / "transformer")
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS.values():
        examples = re.findall(r"Example: quark (.*)", command.__doc__ or "")
        assert examples
        for example in examples:
            done = quark(*shlex.split(example))
            assert (done.code, done.err) == (0, ""), example


def test_the_program_alone_shows_help() -> None:
    done = quark("--help")
    assert done.code == 0 and all(name in done.out for name in COMMANDS)


# Bad input. ----------------------------------------------------------------------------------------------------------

QUANTIZE = "quantize {llama} -o {out} "
BAD = {
    "misspelled scheme": (QUANTIZE + "--scheme uint4_wo_12", "Did you mean 'uint4_wo_128'"),
    "misspelled exclude": (QUANTIZE + "--scheme int8_wo --exclude *.q_prjo", "'*.q_prjo' matches no layer"),
    "exclude of a block": (QUANTIZE + "--scheme int8_wo --exclude model.layers.0", "'model.layers.0.*'"),
    "broken exclude": (QUANTIZE + "--scheme int8_wo --exclude re:*(", "not a regular expression"),
    "everything excluded": (QUANTIZE + "--scheme int8_wo --exclude *", "Nothing to quantize"),
    "layer without =": (QUANTIZE + "--scheme int8_wo --layer *.down_proj", "--layer takes PATTERN=SCHEME"),
    "misspelled layer": (QUANTIZE + "--scheme int8_wo --layer *.dwn_proj=mxfp4", "'*.dwn_proj' matches no layer"),
    "misspelled scheme of a layer": (QUANTIZE + "--scheme int8_wo --layer *.down_proj=mxpf4", "Did you mean 'mxfp4'"),
    "missing folder": ("quantize {missing} --scheme int8_wo -o {out}", "missing"),
    "file for a folder": ("quantize {file} --scheme int8_wo -o {out}", "no model folder"),
    "no config.json": ("quantize {no_config} --scheme int8_wo -o {out}", "no config.json"),
    "broken config.json": ("quantize {broken_config} --scheme int8_wo -o {out}", "config.json is not JSON"),
    "config.json of another kind": ("quantize {list_config} --scheme int8_wo -o {out}", "config.json"),
    "config.json without a type": ("quantize {no_type} --scheme int8_wo -o {out}", "model_type"),
    "no weights": ("quantize {no_weights} --scheme int8_wo -o {out}", "model.safetensors"),
    "truncated weights": ("quantize {truncated} --scheme int8_wo -o {out}", "truncated/model.safetensors is truncated"),
    "empty weights": ("quantize {emptied} --scheme int8_wo -o {out}", "no safetensors file"),
    "quantized already": ("quantize {quantized} --scheme int8_wo -o {out}", "quantized layers already"),
    "output exists": ("quantize {llama} --scheme int8_wo -o {quantized}", "--force"),
    "output is the model": ("quantize {llama} --scheme int8_wo -o {llama}/. --force", "itself, which is read"),
    "output holds the model": ("quantize {llama} --scheme int8_wo -o {llama}/.. --force", "which is read"),
    "output in the model": ("quantize {llama} --scheme int8_wo -o {llama}/out --force", "lies in"),
    "output is the data": ("quantize {llama} --scheme int8 --calib {text} -o {text} --force", "itself, which is read"),
    "no output": ("quantize {llama} --scheme int8_wo --output=", "--output '' is no path"),
    "output is a file": ("quantize {llama} --scheme int8_wo -o {file}", "--force"),
    "output under a file": ("quantize {llama} --scheme int8_wo -o {file}/out", "file is not a folder"),
    "how data are read, without data": (
        QUANTIZE + "--scheme int8_wo --length 64",
        "--length describes calibration data",
    ),
    "how many samples, without data": (QUANTIZE + "--scheme int8_wo --samples 4", "--samples describes calib"),
    "texts of its own, without data": (QUANTIZE + "--scheme int8_wo --synthetic 2", "--synthetic describes calib"),
    "texts of its own, block by block": (
        QUANTIZE + "--scheme int8 --calib {text} --synthetic 2 --stream",
        "--synthetic with --stream",
    ),
    "data that are no name": (QUANTIZE + "--scheme int8 --calib datasets:", "is no name of a dataset"),
    "no calibration text": (QUANTIZE + "--scheme int8 --calib {missing}", "is not there"),
    "empty calibration text": (QUANTIZE + "--scheme int8 --calib {empty_text}", "0 tokens"),
    "calibration text in Latin-1": (QUANTIZE + "--scheme int8 --calib {latin1}", "UTF-8"),
    "no calibration sample": (QUANTIZE + "--scheme int8 --calib {text} --samples 0", "Invalid value for '--samples'"),
    "negative samples": (QUANTIZE + "--scheme int8 --calib {text} --samples -1", "samples"),
    "no tokenizer": ("quantize {no_tokenizer} --scheme int8 --calib {text} -o {out}", "no_tokenizer"),
    "group size": ("quantize {opt} --scheme int4_wo_128 -o {out}", "group_size 128 does not divide"),
    "weight format": (QUANTIZE + "--scheme int8_wo --weight-format real", "'real_quantized'"),
    "pack method": (QUANTIZE + "--scheme int8_wo --pack-method reordered", "'reorder'"),
    "shard size": (QUANTIZE + "--scheme int8_wo --max-shard-size many", "many"),
    "dtype": (QUANTIZE + "--scheme int8_wo --dtype float23", "float23"),
    "integer dtype": (QUANTIZE + "--scheme int8_wo --dtype int8", "int8"),
    "device": (QUANTIZE + "--scheme int8_wo --device gpu", "gpu"),
    "a device without values": (QUANTIZE + "--scheme int8_wo --device meta", "'meta' cannot be used: it holds no"),
    "option of ONNX files": (QUANTIZE + "--scheme int8_wo --config A8W8", "--config does not apply to"),
    "no scheme": (QUANTIZE, "Missing option --scheme or --for"),
    "evaluate: no text file": ("evaluate {llama} {quantized}", "Missing option --data or --text"),
    "evaluate: data twice": (
        "evaluate {llama} {quantized} --text {text} --data {text}",
        "--data and --text are the same",
    ),
    "inspect: no model": ("inspect {missing}", "neither an .onnx file nor a model folder"),
    "inspect: broken config.json": ("inspect {broken_config}", "is not the config of a model"),
    "inspect: config.json of another kind": ("inspect {list_config}", "is not the config of a model"),
    "plan: missing folder": ("plan {missing} --scheme int8_wo", "no model folder"),
    "plan: misspelled scheme": ("plan {llama} --scheme int8_w", "Did you mean"),
    "plan: misspelled exclude": ("plan {llama} --scheme int8_wo --exclude *.q_prjo", "matches no layer"),
    "plan: group size": ("plan {opt} --scheme int4_wo_128", "group_size 128 does not divide"),
    "plan: broken config.json": ("plan {broken_config} --scheme int8_wo", "is not JSON"),
    "evaluate: missing folder": ("evaluate {llama} {missing} --text {text}", "missing"),
    "evaluate: truncated weights": ("evaluate {llama} {truncated} --text {text}", "is truncated"),
    "evaluate: empty text": ("evaluate {llama} {quantized} --text {empty_text}", "0 tokens"),
    "evaluate: no text": ("evaluate {llama} {quantized} --text {missing}", "is not there"),
    "evaluate: no length": ("evaluate {llama} {quantized} --text {text} --length 0", "length"),
    "evaluate: nothing to predict": ("evaluate {llama} {quantized} --text {text} --length 1", "length"),
    "evaluate: another architecture": ("evaluate {opt} {quantized} --text {text} --length 32", "opt"),
    "evaluate: another architecture in float": ("evaluate {llama} {opt} --text {text} --length 32", "opt"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(line: str, message: str, places: dict[str, Path], tmp_path: Path) -> None:
    before = tree(places["llama"].parent)
    done = run(line, places, out=tmp_path / "out")
    assert done.code in (1, 2)
    assert done.err.startswith("quark: ") and done.err.count("\n") == 1 and message in done.err, done.err
    assert list(tmp_path.iterdir()) == []
    assert tree(places["llama"].parent) == before


def tree(root: Path) -> dict[str, int]:
    """Every file below, hidden ones too, with the time of its last change."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("line", ["quantize {llama}", "quantise {llama}", "plan {llama} --scheme", "evaluate {llama}"])
def test_a_wrong_command_line_is_explained(line: str, places: dict[str, Path]) -> None:
    done = run(line, places)
    assert done.code == 2 and done.err.startswith("quark: ") and done.err.count("\n") == 1


@pytest.mark.slow
def test_the_module_is_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quark", "plan", str(tmp_path), "--scheme", "mxfp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"quark: {tmp_path} is no model folder: it has no config.json.\n"


FIRST_LINE = """
import logging, os, sys
from quark.cli import main
from quark.base.log import logger

class First(logging.Handler):
    def emit(self, record):
        loaded = [name for name in ("torch", "transformers", "onnx", "onnxruntime") if name in sys.modules]
        os.write(1, f"{record.getMessage()} {loaded}".encode())
        os._exit(0)

logger.addHandler(First())
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "quantize {folder} --scheme mxfp4 -o out",
        "plan {folder} --scheme mxfp4",
        "plan {file} --config A8W8",
        "compare {folder} --schemes mxfp4 --calib {text}",
        "evaluate {folder} {folder} --text {text}",
        "convert {folder} --format gguf -o out.gguf",
    ],
)
def test_the_first_line_comes_before_libraries_load(line: str) -> None:
    places = {"folder": LANGUAGE_MODEL, "file": LANGUAGE_MODEL.parent / "digits_cnn" / "model.onnx"}
    words = line.format(**places, text=TEXT / "heldout.txt").split()
    done = subprocess.run([sys.executable, "-c", FIRST_LINE, *words], capture_output=True, text=True, check=False)
    assert words[1] in done.stdout and done.stdout.endswith(" []"), done


@pytest.mark.slow
@pytest.mark.parametrize("line", ["plan {folder} --scheme mxfp4", "quantize {folder} --scheme mxfp4 -o {output}"])
def test_a_command_that_runs_no_model_reads_the_code_of_one_class(line: str, tmp_path: Path) -> None:
    words = line.format(folder=LANGUAGE_MODEL, output=tmp_path / "out").split()
    code = f"import sys; sys.argv[1:] = {words}; from quark.cli import program\n"
    code += "try: program()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    classes = {name for name in loaded if re.fullmatch(r"transformers\.models\.(?!auto\.).*\.modeling_\w+", name)}
    assert len(classes) == 1, classes
    others = {"onnx", "onnxruntime", "onnx_ir", "diffusers", "datasets", "gguf", "peft", "sentence_transformers"}
    assert not loaded & {*others, "pandas", "matplotlib"}, loaded & others


def test_a_plan_looks_for_no_garbage_unless_it_measures(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []
    module = importlib.import_module("quark.commands.plan")
    monkeypatch.setattr(module, "_show_model", lambda job: collecting.append(gc.isenabled()))
    assert quark("plan", places["llama"], "--scheme", "int8_wo").code == 0
    assert quark("plan", places["llama"], "--bits", 6, "--calib", places["text"]).code == 0
    assert collecting == [False, True] and gc.isenabled()
