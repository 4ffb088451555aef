"""`--report` and `quark compare` from end to end: what the pages say is what was measured, and every bad place."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from html import escape, unescape
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import ViTConfig, ViTForImageClassification

import quark as package
from quark.core.metrics import kl, kl_by_row
from quark.errors import ConfigError, visible
from quark.jobs.folders.compared.replies import LONGEST, PROMPTS
from quark.jobs.folders.models import load_model
from quark.torch import channel_outliers
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.compared.layer_damage import input_range
from quark.torch.layers.replace import quantized_layers
from quark.torch.llm.documents import Document
from quark.torch.llm.text import token_windows
from tests.commands.program import Done, quark
from tests.models.onnx_zoo import cnn, images
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    found = {name: root / name for name in ("llama", "int8", "float.onnx", "a8w8.onnx", "samples.npz", "text.txt")}
    tiny_llama(vocab_size=2048).save_pretrained(found["llama"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / name, found["llama"] / name)
    words = " ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:400])
    found["text.txt"].write_text(f"{HOSTILE} {words}", encoding="utf-8")
    model = cnn()
    for node in model.graph.node:
        node.name = f"{HOSTILE}{node.name}"
    onnx.save(model, found["float.onnx"])
    np.savez(found["samples.npz"], x=np.concatenate([feed["x"] for feed in images()]))
    line = ("--scheme", "int8", "--calib", found["text.txt"], "--samples", "2", "-o", found["int8"])
    assert quark("quantize", found["llama"], *line).code == 0
    line = ("--config", "A8W8", "--calib", found["samples.npz"], "-o", found["a8w8.onnx"])
    assert quark("quantize", found["float.onnx"], *line).code == 0
    return found


def evaluate(places: dict[str, Path], kind: str, page: object) -> Done:
    if kind == "onnx":
        return quark(
            "evaluate", places["float.onnx"], places["a8w8.onnx"], "--data", places["samples.npz"], "--report", page
        )
    line = ("--data", places["text.txt"], "--length", "64", "--windows", "2", "--layers", "0", "--report", page)
    done = quark("evaluate", places["llama"], places["int8"], *line)
    assert "Layers" not in done.out  # none is asked for
    return done


def sections(page: str) -> list[str]:
    return [unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)]


@pytest.mark.slow
def test_the_page_of_two_onnx_files_says_what_the_table_says(places: dict[str, Path], tmp_path: Path) -> None:
    done = evaluate(places, "onnx", tmp_path / "out.html")
    assert (done.code, done.err) == (0, "") and f"Report: {tmp_path / 'out.html'}" in done.out.replace("\n", "")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page
    assert sections(page) == [
        "What was done", "Size, latency, outputs", "Damage by layer", "Ranges of the worst layers",
        "Integer and float nodes",
    ]  # fmt: skip
    sqnr = re.findall(r"│ y +│ [\d.]+ +│ [\d.e+-]+ +│ [\d.]+ +│ ([\d.]+)", done.out)
    assert sqnr and f'<td class="number">{sqnr[0]}</td>' in page
    for path in (places["float.onnx"], places["a8w8.onnx"]):
        assert f'<td class="number">{path.stat().st_size / 1e6:.2f}</td>' in page


@pytest.mark.slow
def test_the_page_of_two_folders_says_where_tokens_moved(places: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert evaluate(places, "folder", tmp_path / "out.html").code == 0
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<script" not in page and "KL divergence by token" in sections(page)
    windows = token_windows(AutoTokenizer.from_pretrained(places["llama"]), places["text.txt"], 64, 2)
    before, after = load_model(OpenedFolder(places["llama"])), load_model(OpenedFolder(places["int8"]))
    with torch.no_grad():
        rows = torch.cat([
            torch.nn.functional.kl_div(
                *(torch.log_softmax(model(ids).logits.double(), -1) for model in (after, before)),
                log_target=True, reduction="none",
            ).sum(-1).flatten()
            for ids in windows
        ])  # fmt: skip
    assert f"Mean {float(rows.mean()):.4g} nats" in page and f">{float(rows.max()):.4g}</td>" in page
    assert "input int8" in page and "layers" in page
    # The picture of the worst layer is of what it reads in the quantized model, over all windows.
    worst = re.findall(r"Channels of the input of ([\w.]+)", page)
    assert "Outliers by channel" in sections(page) and len(worst) == 6
    read = channel_outliers(after, windows, worst)
    assert all(each.caption in page for each in read.layers.values())
    # Both answer as each does alone, without the padding of a batch.
    tokenizer = AutoTokenizer.from_pretrained(places["llama"])
    ids = torch.tensor([Document(min(PROMPTS, key=len), "", question=True).prompt_ids(tokenizer)])
    for model in (before, after):
        written = model.generate(ids, do_sample=False, max_new_tokens=LONGEST)[0, ids.shape[1] :]
        answer = visible(tokenizer.decode(written, skip_special_tokens=True).strip())
        assert f"<td>{escape(answer)}</td>" in page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")


@pytest.mark.slow
def test_clip_lines_are_the_ends_of_the_range(places: dict[str, Path]) -> None:
    layer = next(iter(quantized_layers(load_model(OpenedFolder(places["int8"]))).values()))
    found = input_range(layer)
    scale = float(layer.input_quantizer.scale)  # type: ignore[arg-type, union-attr]
    assert found == pytest.approx((-128 * scale, 127 * scale))


def test_the_divergence_of_rows_has_the_mean_that_it_is_the_parts_of() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 3, 5, 7))
    assert kl_by_row(x, y).shape == (3, 5) and kl(x, y) == pytest.approx(float(kl_by_row(x, y).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "folder"])
def test_bad_places_are_said_before_the_work(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    source = places["float.onnx"] if kind == "onnx" else places["text.txt"]
    bad = {
        "there.html": "exists already", ".": "is a folder", "pipe": "a pipe", "there.html/below": "not a folder",
        str(source): "is read", "n" * 300: "File name too long",
    }  # fmt: skip
    before = sorted(tmp_path.iterdir())
    for name, words in bad.items():
        done = evaluate(places, kind, tmp_path / name)
        assert done.code == 1 and words in done.err and done.err.count("\n") == 1, (name, done.err)
        assert not done.out, "nothing was measured"
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.html").read_text() == "mine"


@pytest.mark.slow
def test_compare_shows_schemes_side_by_side(places: dict[str, Path], tmp_path: Path) -> None:
    line = ("--calib", places["text.txt"], "--length", "64", "--windows", "2", "--report", tmp_path / "out.html")
    done = quark("compare", places["llama"], "--schemes", "int8,int8_wo,int2_wo_64", *line)
    assert (done.code, done.err) == (0, "")
    assert "int2_wo_64 o\n" in done.out, "it is the largest here, and so at the right of the chart, and not the best"
    rows = {row[0]: row[1:] for row in (re.findall(r"[^│ ]+", line) for line in done.out.splitlines() if "│" in line)}
    assert float(rows["int8_wo"][2]) > float(rows["int2_wo_64"][2]), "SQNR"
    assert float(rows["int8_wo"][3]) < float(rows["int2_wo_64"][3]), "KL"
    stored = (places["int8"] / "model.safetensors").stat().st_size
    assert float(rows["int8"][0]) == pytest.approx(stored / 1e6, rel=0.05)
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert sections(page) == ["Size against accuracy"] and "measured on 2 samples of 64 tokens from " in page


@pytest.mark.slow
def test_compare_shows_presets_side_by_side(places: dict[str, Path], tmp_path: Path) -> None:
    line = ("--calib", places["samples.npz"], "--report", tmp_path / "out.html")
    done = quark("compare", places["float.onnx"], "--schemes", "A8W8", "--schemes", "A16W8", *line)
    assert (done.code, done.err) == (0, "")
    rows = {row[0]: row[1:] for row in (re.findall(r"[^│ ]+", line) for line in done.out.splitlines() if "│" in line)}
    assert float(rows["A16W8"][2]) > float(rows["A8W8"][2])
    assert "SQNR of the worst output, dB; higher is better." in done.out and "A8W8 o\n" in done.out
    assert float(rows["A8W8"][0]) == pytest.approx(places["a8w8.onnx"].stat().st_size / 1e6, abs=0.006)
    assert (tmp_path / "out.html").is_file()


@pytest.mark.slow
def test_compare_says_what_is_wrong(places: dict[str, Path], tmp_path: Path) -> None:
    text, samples = places["text.txt"], places["samples.npz"]
    bad = [
        (("llama", "--schemes", "int8_w", "--calib", text), "Did you mean 'int8_wo'"),
        (("llama", "--schemes", ",", "--calib", text), "names none"),
        (("llama", "--schemes", "int8_wo"), "Missing option --calib or --data"),
        (("llama", "--schemes", "int8", "--data", text), "need calibration data"),
        (("llama", "--schemes", "int8_wo", "--calib", tmp_path / "no"), "is not there"),
        (("llama", "--schemes", "int8_wo", "--calib", text, "--threads", "2"), "does not apply"),
        (("float.onnx", "--schemes", "A8W", "--calib", samples), "A8W8"),
        (("float.onnx", "--schemes", "A8W8", "--data", samples), "calibration"),
        (("float.onnx", "--schemes", "A8W8", "--calib", samples, "--report", samples), "is read"),
    ]
    for (model, *rest), words in bad:
        done = quark("compare", places[str(model)], *rest)
        usage = words in ("Did you mean 'int8_wo'", "names none", "Missing option --calib or --data", "does not apply")
        assert done.code == (2 if usage else 1) and words in done.err and done.err.count("\n") == 1, (words, done.err)
    line = ("--schemes", "int8,int8_wo", "--data", text, "--length", "64", "--windows", "1")
    done = quark("compare", places["llama"], *line)
    assert done.code == 0 and "not possible" in done.out, "what one scheme lacks is said in its row"


@pytest.mark.slow
def test_quantize_writes_the_page_of_what_it_wrote(places: dict[str, Path], tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out"
    line = ("--calib", places["text.txt"], "--samples", "2", "-o", out, "--report", page)
    candidates = ("--bits", "7", "--candidates", "uint4_wo_32,int8_wo")
    done = quark("quantize", places["llama"], *candidates, *line)
    assert (done.code, done.err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "Bit budget" in sections(text) and "calibration data" in text and "<script" not in text
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "nats" not in card and "model-index" not in card, "figures of calibration data are no figures of the model"
    again = quark("quantize", places["llama"], "--scheme", "int8_wo", "--force", *line)
    assert again.code == 0 and "Bit budget" not in page.read_text(encoding="utf-8"), "--force replaces both"


@pytest.mark.slow
def test_a_page_without_data_measures_on_the_held_out_text_of_the_package(
    places: dict[str, Path], tmp_path: Path
) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out"
    done = quark("quantize", places["llama"], "--scheme", "int8_wo", "-o", out, "--report", page)
    assert (done.code, done.err) == (0, "")
    text = unescape(page.read_text(encoding="utf-8"))
    assert "Measured on the package's held-out text." in text
    card, mean = ModelCard.load(out / "README.md"), re.search(r"Mean ([\d.e-]+) nats", text)
    row = "| held-out text of the package openquark | Mean KL divergence of a next token |"
    assert mean and f"{row} {mean[1]} nats |" in card.text
    assert {each.metric_type for each in card.data.eval_results or ()} == {"perplexity", "kl_divergence", "sqnr_logits"}
    pictures = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    pictures.save_pretrained(tmp_path / "vit")
    line = ("quantize", tmp_path / "vit", "--scheme", "int8_wo", "-o", tmp_path / "other")
    refused = quark(*line, "--report", tmp_path / "other.html")
    assert refused.code == 1 and "--calib" in refused.err and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_page_on_the_text_that_calibrated_leaves_the_card_without_figures(
    places: dict[str, Path], tmp_path: Path
) -> None:
    line = ("--scheme", "int8", "--samples", "2", "-o", tmp_path / "out", "--report", tmp_path / "page.html")
    done = quark("quantize", places["llama"], *line)
    assert (done.code, done.err) == (0, "") and "the text of the package is taken" in done.log
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.eval_results is None and "Measured" not in card.text


@pytest.mark.slow
def test_evaluate_writes_figures_of_held_out_data_into_the_card(places: dict[str, Path], tmp_path: Path) -> None:
    out, held_out = tmp_path / "out", tmp_path / "held-out.txt"
    shutil.copytree(places["int8"], out)
    words = " ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[400:800])
    held_out.write_text(words, encoding="utf-8")
    line = ("evaluate", places["llama"], out, "--length", "64", "--windows", "2", "--card", "--data")
    calibration = shutil.copyfile(places["text.txt"], tmp_path / "another name.txt")
    before = (out / "README.md").read_bytes()
    for refused in (quark(*line, calibration), quark(*line[:2], out / "model.safetensors", *line[3:], held_out)):
        assert refused.code == 1 and refused.err.startswith("quark: --card: ") and refused.err.count("\n") == 1
    with pytest.raises(ConfigError, match="was calibrated on"):
        package.evaluate(places["llama"], out, data=calibration, card=True)
    assert (out / "README.md").read_bytes() == before
    done = quark(*line, held_out, "--json")
    assert (done.code, done.err) == (0, "")
    shown = json.loads(done.out)["tables"][0]["rows"][1]
    card = ModelCard.load(out / "README.md")
    results = {each.metric_type: each for each in card.data.eval_results or ()}
    assert results["kl_divergence"].metric_value == pytest.approx(shown["KL nats"], rel=1e-3)  # as it is printed
    assert results["perplexity"].metric_value == pytest.approx(float(shown["perplexity"].split()[0]), rel=1e-3)
    assert results["perplexity"].dataset_args == {"samples": 2, "tokens": 64}
    assert {each.dataset_name for each in results.values()} == {"held-out.txt"}


@pytest.mark.slow
def test_quantize_shows_the_path_of_a_recovery(places: dict[str, Path], tmp_path: Path) -> None:
    line = ("--config", "A8W8", "--calib", places["samples.npz"], "--batch-size", "4", "--recover", "--reach", "20")
    page = tmp_path / "page.html"
    done = quark("quantize", places["float.onnx"], *line, "-o", tmp_path / "out.onnx", "--report", page)
    assert (done.code, done.err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "Recovery" in sections(text) and "the config as it is" in text and "<script" not in text


@pytest.mark.slow
def test_quantize_refuses_a_page_that_it_cannot_write_before_the_work(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("mine")
    llama, text = places["llama"], places["text.txt"]
    line = ("quantize", llama, "--scheme", "int8_wo", "-o", tmp_path / "out")
    bad = [
        (("quantize", places["float.onnx"], "-o", tmp_path / "out", "--report", tmp_path / "page.html"), "--calib"),
        ((*line, "--calib", text, "--report", tmp_path / "there.html"), "exists already"),
        ((*line, "--calib", text, "--report", tmp_path), "a folder"),
        ((*line, "--calib", text, "--report", text, "--force"), "is read"),
        ((*line, "--calib", text, "--report", tmp_path / "out"), "Choose another output"),
        ((*line, "--calib", text, "--export-format", "gguf", "--report", tmp_path / "page.html"), "no --report"),
    ]
    for arguments, words in bad:
        done = quark(*arguments)
        usage = words in ("Did you mean 'int8_wo'", "names none", "Missing option --calib or --data", "does not apply")
        assert done.code == (2 if usage else 1) and words in done.err and done.err.count("\n") == 1, (words, done.err)
    assert [path.name for path in tmp_path.iterdir()] == ["there.html"]


@pytest.mark.slow
def test_compare_knows_families_and_mixes(places: dict[str, Path]) -> None:
    """int4 is its usual member, and the size of a mix is that of its blocks."""
    line = ("--calib", places["text.txt"], "--length", "32", "--windows", "2")
    done = quark("compare", places["llama"], "--schemes", "int4_wo_32,4bit,W8A8,Q8_0", *line)
    assert done.code == 0 and "4bit: here it is int4_wo_128" in done.log and "W8A8: here it is int8" in done.log
    rows = {row[0].strip(): row for row in (line.split("│")[1:] for line in done.out.splitlines() if "│" in line)}
    assert float(rows["q8_0"][1]) < float(rows["float"][1]) / 3 and float(rows["q8_0"][3]) > 30
    assert {"int4_wo_128", "int8", "int4_wo_32"} <= set(rows)
    onnx_file = quark("compare", places["float.onnx"], "--schemes", "W8A8", "--calib", places["samples.npz"])
    assert onnx_file.code == 0 and "W8A8: here it is INT8_CPU" in onnx_file.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "folder"])
def test_what_is_said_after_quantize_measures_it(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    """The line of the log is a command; HELDOUT stands for data of one's own."""
    model, calib, out = (
        (places["float.onnx"], places["samples.npz"], tmp_path / "my model.onnx")
        if kind == "onnx"
        else (places["llama"], places["text.txt"], tmp_path / "my model")
    )
    how = ("--config", "A8W8") if kind == "onnx" else ("--scheme", "int8", "--samples", "2", "--length", "32")
    done = quark("quantize", model, *how, "--calib", calib, "-o", out)
    line = done.log.partition("did not read: ")[2].splitlines()[0]
    words = shlex.split(line.replace(f"HELDOUT{calib.suffix}", shlex.quote(str(calib))))
    shown = quark(*words[1:])
    assert words[0] == "quark" and shown.code == 0, (line, shown.err)
    assert f"of {calib.name}" in " ".join(shown.out.split())
    assert (kind == "onnx") != ("fake quantization" in shown.out)


@pytest.mark.slow
def test_the_page_says_what_an_algorithm_did_to_each_block(places: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    line = ("--scheme", "int4_wo_32", "--algorithm", "gptq", "--calib", places["text.txt"], "--samples", "2")
    done = quark("quantize", places["llama"], *line, "-o", tmp_path / "out", "--report", page, "--verbose")
    assert done.code == 0
    text = page.read_text(encoding="utf-8")
    assert "What algorithms gained" in sections(text)
    said = re.findall(r"(model\.layers\.\d): output error ([\d.]+) to nearest, ([\d.]+) with", done.log)
    assert len(said) == 2
    for block, before, after in said:
        row = re.search(rf"<td>{block}</td><td>gptq</td>(.*?)</tr>", text, re.S)
        assert row is not None
        shown = [float(x) for x in re.findall(r">([\d.]+) dB<", row[1])[:2]]
        assert shown == pytest.approx([-20 * np.log10(float(x)) for x in (before, after)], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "folder"])
def test_compare_and_evaluate_write_how_far_they_are(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    model, out, data, names = (
        ("float.onnx", "a8w8.onnx", "samples.npz", "A8W8,XINT8")
        if kind == "onnx"
        else ("llama", "int8", "text.txt", "int8,int8_wo")
    )
    log = tmp_path / "log.jsonl"
    less = () if kind == "onnx" else ("--length", "64", "--windows", "2")
    line = ("--schemes", names, "--calib", places[data], "--log-file", log)
    assert quark("compare", places[model], *line, *less).code == 0
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [event["block"] for event in events if event["event"] == "block" and event["block"] in names] == names.split(
        ","
    )
    assert quark("evaluate", places[model], places[out], "--data", places[data], "--log-file", log, *less).code == 0
    assert [json.loads(line)["event"] for line in log.read_text(encoding="utf-8").splitlines()].count("done") == 2
    refused = quark("evaluate", places[model], places[out], "--data", places[data], "--log-file", places[data])
    assert refused.code == 1 and "Choose another file" in refused.err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names that are no UTF-8")
def test_what_is_written_takes_a_name_of_data_that_is_no_utf8(places: dict[str, Path], tmp_path: Path) -> None:
    """Nothing is logged that has the name: pytest's processes send each other what is logged, in UTF-8."""
    data = tmp_path / os.fsdecode(b"t\xe9xt.txt")
    shutil.copyfile(places["text.txt"], data)
    files = {name: tmp_path / name for name in ("log.jsonl", "page.html", "recipe.yaml")}
    words = ("--log-file", files["log.jsonl"], "--report", files["page.html"], "--write-recipe", files["recipe.yaml"])
    line = ("--scheme", "int8", "--samples", "2", "--length", "64", "--verdict", "--quiet", "--calib", data)
    done = quark("quantize", places["llama"], *line, *words, "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert all(file.read_text(encoding="utf-8") for file in files.values())
    assert r"| t\udce9xt.txt |" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert quark("run", files["recipe.yaml"], "--force", "--quiet").code == 0  # which finds the data again
    line = (
        "--scheme",
        "q8_0",
        "--export-format",
        "gguf",
        "--samples",
        "2",
        "--length",
        "64",
        "--quiet",
        "--calib",
        data,
    )
    for name in ("matrix.gguf", "matrix.dat"):
        options = ("--algorithm", "qronos", "--save-imatrix", tmp_path / name, "-o", tmp_path / "m.gguf", "--force")
        assert quark("quantize", places["llama"], *line, *options).code == 0
