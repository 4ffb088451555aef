"""`quark evaluate` on a user's own questions: what counts, and that an independent computation finds the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quark
from quark.errors import CalibrationError
from tests.commands.program import quark as command
from tests.models.torch_zoo import LANGUAGE_MODEL

ROWS = [
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
