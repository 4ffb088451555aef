"""`quark evaluate` on a user's own questions: what counts, and that an independent computation finds the same."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    ViTConfig,
    ViTForImageClassification,
)

import quark
from quark.errors import CalibrationError, ConfigError, MissingDependencyError
from quark.torch import import_model_from_safetensors, layer_errors
from tests.commands.program import quark as command
from tests.models.model_folders import model_folder
from tests.models.torch_zoo import LANGUAGE_MODEL

DIGITS = LANGUAGE_MODEL.parent / "digits_cnn" / "model.onnx"
ROWS: list[dict[str, Any]] = [
    {"prompt": "The module json", "completion": " reads and writes text."},
    {"prompt": "A list of", "completion": " names is sorted by the function sorted."},
    {"prompt": "Return the", "completion": " value."},
]


def lines(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def source(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model in float32, in which sums of another order are near."""
    folder = tmp_path_factory.mktemp("source")
    AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quark.quantize(source, "int4_wo_64", output=tmp_path_factory.mktemp("made") / "out")


@pytest.fixture(scope="module")
def models(source: Path, quantized: Path) -> list[Any]:
    from quark.torch import import_model_from_safetensors

    return [
        AutoModelForCausalLM.from_pretrained(source).eval(),
        import_model_from_safetensors(None, quantized).eval(),
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(LANGUAGE_MODEL)


def of_answer(model: Any, tokenizer: Any, prompt: str, answer: str) -> tuple[torch.Tensor, list[int]]:
    """The log likelihood of all next tokens from the last one of the prompt on, and the tokens that follow."""
    before, ids = tokenizer(prompt)["input_ids"], tokenizer(prompt + answer)["input_ids"]
    assert ids[: len(before)] == before
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].float().log_softmax(1)
    return found[len(before) - 1 :], ids[len(before) :]


def test_answers_count_alone(source: Path, quantized: Path, models: list[Any], tokenizer: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "qa.jsonl", ROWS)
    measured: Any = quark.evaluate(source, quantized, data=file)
    losses, divergence, same, tokens = [0.0, 0.0], [], [], 0
    for row in ROWS:
        pair = [of_answer(model, tokenizer, row["prompt"], row["completion"]) for model in models]
        for index, (found, answer) in enumerate(pair):
            losses[index] -= sum(float(found[place, token]) for place, token in enumerate(answer))
        tokens += len(pair[0][1])
        before, after = pair[0][0], pair[1][0]
        divergence.append((before.exp() * (before - after)).sum(1))
        same.append(before.argmax(1) == after.argmax(1))
    assert measured.comparison.perplexity == pytest.approx([math.exp(loss / tokens) for loss in losses], rel=1e-5)
    assert measured.comparison.kl == pytest.approx(float(torch.cat(divergence).mean()), rel=1e-4)
    output = measured.comparison.outputs["logits"]
    assert [output.agreed, output.rows] == [int(torch.cat(same).sum()), len(torch.cat(same))]
    streamed: Any = quark.evaluate(source, quantized, data=file, stream=True)
    assert streamed.comparison.perplexity == measured.comparison.perplexity
    page = tmp_path / "page.html"
    done = command("evaluate", source, quantized, "--data", file, "--report", page)
    words = f"the answers of 3 documents ({tokens} tokens)"
    assert done.code == 0 and f"on {words} of qa.jsonl" in done.out and words in page.read_text()


def test_a_document_without_its_answer_is_said(source: Path, quantized: Path, tmp_path: Path, caplog: Any) -> None:
    file = lines(tmp_path / "qa.jsonl", [{**ROWS[0], "prompt": "word " * 40}, ROWS[1]])
    measured: Any = quark.evaluate(source, quantized, data=file, length=32)
    assert len(measured.batches) == 1 and "1 of the 2 documents" in caplog.text
    with pytest.raises(CalibrationError, match="no answer begins within 2 tokens"):
        quark.evaluate(source, quantized, data=file, length=2)
    with pytest.raises(CalibrationError, match="line 2, has no answer, and"):
        quark.evaluate(source, quantized, data=lines(tmp_path / "mixed.jsonl", [ROWS[0], {"text": "A text."}]))


def test_texts_of_fewer_tokens_than_a_window_are_samples(source: Path, quantized: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "short.jsonl", [{"text": "A short text."}, {"text": "Another one, which is longer."}])
    measured: Any = quark.evaluate(source, quantized, data=file)
    assert len({batch.shape for batch in measured.batches}) == 2
    said = ("quantize", source, "--scheme", "fp8", "--calib", file)
    assert "2 samples of" in (done := command(*said, "-o", tmp_path / "made")).log and done.code == 0
    packed = command(*said, "--packing", "-o", tmp_path / "packed")
    assert packed.code != 0 and "at least one window" in packed.err


CHOICES: list[dict[str, Any]] = [
    {"prompt": "The module json reads", "choices": [" a file.", " the", " text and writes it again."], "answer": 1},
    {"prompt": "Return", "choices": [" True", " a list of the names"], "answer": " a list of the names"},
    {"prompt": "If x is", "choices": [" not a string, an error is raised.", " None"], "answer": 0},
    {"prompt": "The function", "choices": [" returns", " sings a song"], "answer": 1},
]
COMPLETIONS = [{**{k: v for k, v in row.items() if k != "answer"}, "completion": row["answer"]} for row in CHOICES]


def likelihood(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    before, ids = tokenizer(prompt)["input_ids"], tokenizer(prompt + answer)["input_ids"]
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].log_softmax(1)
    return sum(float(found[place - 1, ids[place]]) for place in range(len(before), len(ids)))


def test_choices_are_those_of_the_largest_likelihood(
    source: Path,
    quantized: Path,
    models: list[Any],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    file = lines(tmp_path / "choices.jsonl", COMPLETIONS)
    measured: Any = quark.evaluate(source, quantized, data=file)
    chosen: dict[str, list[list[int]]] = {"accuracy": [], "accuracy_norm": []}
    for model in models:
        for name, found in chosen.items():
            found.append([])
            for row in CHOICES:
                choices: Any = row["choices"]
                sums = [likelihood(model, tokenizer, str(row["prompt"]), each) for each in choices]
                per = [len(each.encode()) if name == "accuracy_norm" else 1 for each in choices]
                found[-1].append(int(np.argmax([a / b for a, b in zip(sums, per, strict=True)])))
    right = [each if isinstance(each := row["answer"], int) else 1 for row in CHOICES]
    for name, found in chosen.items():
        assert measured.task.scores[name] == tuple(np.mean(np.array(each) == right) for each in found)
    assert measured.task.same == np.mean(np.equal(chosen["accuracy"][0], chosen["accuracy"][1]))
    assert measured.accuracy == measured.task.scores["accuracy"] and 0 < measured.accuracy[0] < 1
    assert chosen["accuracy"][0] != chosen["accuracy_norm"][0], "else bytes were not looked at"
    streamed: Any = quark.evaluate(source, quantized, data=file, stream=True)
    assert streamed.task == measured.task
    loss: Any = quark.evaluate(source, quantized, data=file, metric="loss")
    assert loss.task is None


def test_an_exact_match_is_what_both_write(
    source: Path,
    quantized: Path,
    models: list[Any],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    def written(model: Any, prompt: str, count: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=count, do_sample=False)[0, ids["input_ids"].shape[1] :]
        return str(tokenizer.decode(new, skip_special_tokens=True)).strip().partition("\n")[0].strip()

    rows = [
        {"prompt": prompt, "completion": written(models[0], prompt, 8)} for prompt in ("The module json", "A list of")
    ]
    rows.append({"prompt": "Return the", "completion": "something else"})
    file = lines(tmp_path / "match.jsonl", rows)
    measured: Any = quark.evaluate(source, quantized, data=file, metric="exact_match")
    expected = []
    for model in models:
        counts = [len(tokenizer(row["completion"], add_special_tokens=False)["input_ids"]) + 8 for row in rows]
        found = [written(model, row["prompt"], count) for row, count in zip(rows, counts, strict=True)]
        expected.append(np.mean([text == row["completion"] for text, row in zip(found, rows, strict=True)]))
    assert measured.task.scores["exact_match"] == tuple(expected) and 0 < expected[0] < 1


METRIC = "def length(model, samples):\n    return sum(s.shape[1] for s in samples) + model.config.vocab_size\n"
SESSION = "def count(session, samples):\n    return len(samples) + len(session.get_inputs())\n"


def test_a_function_of_the_user_scores_both(
    source: Path,
    quantized: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(METRIC + SESSION)
    file = lines(tmp_path / "text.jsonl", [{"text": "A short text."}])
    done = command("evaluate", source, quantized, "--data", file, "--metric", "mine:length")
    assert done.code == 0 and f"the code of {tmp_path / 'mine.py'} runs" in done.log and "mine:length" in done.out
    np.savez("data.npz", image=np.zeros((3, 1, 8, 8), np.float32))
    of_files: Any = quark.evaluate(DIGITS, DIGITS, data="data.npz", metric="mine:count")
    assert of_files.task.scores == {"mine:count": (4.0, 4.0)}
    with pytest.raises(ConfigError, match="has no function 'absent'. Possible: length, count"):
        quark.evaluate(DIGITS, DIGITS, data="data.npz", metric="mine:absent")
    with pytest.raises(ConfigError, match="raises AttributeError"):
        quark.evaluate(DIGITS, DIGITS, data="data.npz", metric="mine:length")


def test_a_metric_that_cannot_be_is_refused(
    source: Path,
    quantized: Path,
    tmp_path: Path,
) -> None:
    text = lines(tmp_path / "text.jsonl", [{"text": "A short text."}])
    for metric, words in {
        "acuracy": "Did you mean",
        "choice": "has no choices",
        "exact_match": "has no answers",
        "absent:function": "there is no",
        "accuracy": "of classifiers of images",
    }.items():
        with pytest.raises(ConfigError, match=words):
            quark.evaluate(source, quantized, data=text, metric=metric)
    with pytest.raises(ConfigError, match="both models in memory"):
        quark.evaluate(source, quantized, data=text, metric="exact_match", stream=True)
    wrong = lines(tmp_path / "wrong.jsonl", [{**CHOICES[0], "answer": 7}])
    with pytest.raises(CalibrationError, match="an index from 0 to 2"):
        quark.evaluate(source, quantized, data=wrong)


def test_the_accuracy_of_an_onnx_file_on_labelled_images(tmp_path: Path) -> None:
    data = np.load(DIGITS.with_name("data.npz"))
    images, digits = data["heldout_images"][:40].astype(np.float32), data["heldout_labels"][:40]
    for index, (image, digit) in enumerate(zip(images, digits, strict=True)):
        (place := tmp_path / "images" / str(digit)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[0] * (255 / 16)).round().astype(np.uint8)).save(place / f"{index}.png")
    made = quark.quantize(DIGITS, "INT8_CPU", data=tmp_path / "images", mean="0", std="1", output=tmp_path / "q.onnx")
    said: dict[str, Any] = {"data": tmp_path / "images", "mean": "0", "std": "1", "metric": "accuracy"}
    measured: Any = quark.evaluate(DIGITS, made, **said)
    expected, feed = [], {"image": (images * (255 / 16)).round() / np.float32(255)}
    for file in (DIGITS, made):
        (found,) = onnxruntime.InferenceSession(str(file)).run(None, feed)
        expected.append((found.argmax(1) == digits).mean())
    assert measured.accuracy == pytest.approx(expected) and expected[0] > 0.9
    wrong = "".join(f"{path.relative_to(tmp_path / 'images')},0\n" for path in (tmp_path / "images").rglob("*.png"))
    (tmp_path / "images" / "labels.csv").write_text(wrong)
    share = float((digits == 0).mean())
    by_table: Any = quark.evaluate(DIGITS, DIGITS, **said)
    assert by_table.accuracy == pytest.approx((share, share), abs=0.05)


def test_the_accuracy_of_a_folder_on_labelled_images(tmp_path: Path) -> None:
    folder, data = model_folder("vit", tmp_path / "vit"), tmp_path / "images"
    config = ViTConfig.from_pretrained(folder, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    model = ViTForImageClassification(config).eval()
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    for index in range(8):
        (place := data / ("cat", "dog")[index % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(place / f"{index}.png")
    made = quark.quantize(folder, "int8_wo", output=tmp_path / "made")
    measured: Any = quark.evaluate(folder, made, data=data, metric="accuracy")
    processor, hits = AutoImageProcessor.from_pretrained(folder), []
    for path in sorted(data.rglob("*.png")):
        with torch.no_grad(), Image.open(path) as image:
            found = model(**processor(image, return_tensors="pt")).logits.argmax(1)
        hits.append(config.id2label[int(found)] == path.parent.name)
    assert measured.accuracy[0] == np.mean(hits) and len(measured.batches) == 8
    (data / "cat").rename(data / "bird")
    with pytest.raises(ConfigError, match="'bird' is no class of the model, which has 2"):
        quark.evaluate(folder, made, data=data, metric="accuracy")


def test_tasks_of_lm_eval_are_asked_of_both(
    source: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        quark.evaluate(source, quantized, tasks="absent.yaml")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependencyError, match="pip install lm_eval"):
        quark.evaluate(source, quantized, tasks="arc_easy")
    asked: list[dict[str, Any]] = []

    def simple_evaluate(model: Any, **said: Any) -> dict[str, Any]:
        asked.append({**said, "offline": os.environ["HF_HUB_OFFLINE"], "hub": huggingface_hub.constants.HF_HUB_OFFLINE})
        return {"results": {"mine": {"alias": "mine", "acc,none": len(asked) / 4, "acc_stderr,none": 0.1}}}

    package, models = ModuleType("lm_eval"), ModuleType("lm_eval.models.huggingface")
    package.simple_evaluate, models.HFLM = simple_evaluate, dict  # type: ignore[attr-defined]
    for name, module in (("lm_eval", package), ("lm_eval.models.huggingface", models)):
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "mine.yaml").touch()
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    measured: Any = quark.evaluate(source, quantized, tasks=f"arc_easy,{tmp_path / 'mine.yaml'}", windows=2)
    assert measured.harness.scores == {"mine acc": (0.25, 0.5)} and len(measured.batches) == 2
    wanted = {"tasks": ["arc_easy", str(tmp_path / "mine.yaml")], "limit": 2, "offline": "1", "hub": True}
    assert all(each.items() >= wanted.items() for each in asked) and len(asked) == 2
    assert before == huggingface_hub.constants.HF_HUB_OFFLINE and "HF_DATASETS_OFFLINE" not in os.environ


LM_EVAL_TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{completion}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_bytes}]
"""


@pytest.mark.slow
def test_lm_eval_finds_the_same_accuracy(source: Path, quantized: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{**row, "completion": row["choices"].index(each) if isinstance(each := row["completion"], str) else each}
            for row in COMPLETIONS]  # fmt: skip
    file, task = lines(tmp_path / "choices.jsonl", rows), tmp_path / "mine.yaml"
    task.write_text(LM_EVAL_TASK.replace("FILE", str(file)))
    measured: Any = quark.evaluate(source, quantized, data=file, tasks=str(task))
    assert measured.harness.scores["mine acc"] == measured.accuracy
    assert measured.harness.scores["mine acc_bytes"] == measured.task.scores["accuracy_norm"]


@pytest.mark.parametrize("said", ["metric: 'mine:length'", "tasks: [mine.yaml]"])
def test_a_recipe_runs_no_code(said: str, tmp_path: Path) -> None:
    file, data = tmp_path / "recipe.yaml", lines(tmp_path / "qa.jsonl", ROWS)
    file.write_text(
        f"recipe: 1\nmodel: {LANGUAGE_MODEL}\nscheme: int8_wo\noutput: {{path: {tmp_path / 'out'}}}\n"
        f"evaluation: {{data: {data}, {said}}}\n"
    )
    done = command("run", file)
    assert done.code != 0 and "code that runs" in done.err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_layers_are_listed_by_what_they_cost_the_output(source: Path, quantized: Path, tmp_path: Path) -> None:
    data = LANGUAGE_MODEL.parent / "text" / "heldout.txt"
    measured: Any = quark.evaluate(source, quantized, data=data, length=64, windows=2, layer_costs=True)
    after = import_model_from_safetensors(None, quantized)
    found = layer_errors(AutoModelForCausalLM.from_pretrained(source).eval(), after, measured.batches[:1], alone=True)
    assert measured.costs == pytest.approx({name: each.alone for name, each in found.layers.items()}, rel=1e-3)
    table = measured.tables(5)[-1]
    assert [row[0] for row in table.rows] == found.worst[:5] and table.headers[1] == "KL nats of it alone"
    with pytest.raises(ConfigError, match="layer_costs needs both models in memory"):
        quark.evaluate(source, quantized, data=data, layer_costs=True, stream=True)
