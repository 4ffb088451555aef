"""Summaries that a model writes, their scores, and the perplexity of another model's answers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quark.contrib.llm_eval import (
    meteor_eval,
    mlperf_rouge_eval,
    ppl_eval_with_synthetic_dataset,
    rouge_eval,
    rouge_meteor_generations,
)
from quark.errors import CalibrationError, ConfigError, MissingDependencyError, NotSupportedError
from quark.torch.utils.llm import get_model, get_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
MODEL, HELDOUT = EXAMPLES / "language_model", EXAMPLES / "text" / "heldout.txt"
PARTS = [(0, 300, 50), (300, 1500, 100), (1500, 1600, 10), (2000, 6000, 3)]
"""Where sequences lie in the text, and how many of their tokens are the answer."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package `datasets`, and what it was asked for."""
    calls: list[tuple[Any, ...]] = []
    text = HELDOUT.read_text(encoding="utf-8")

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> list[dict[str, Any]]:
        calls.append((path, name, split))
        if path.startswith("amd/"):
            return [{"full_sequence": text[a:b], "num_generated_tokens": n} for a, b, n in PARTS]
        return [
            {
                "dialogue": text[i * 400 : i * 400 + 200 * (i + 1)],
                "article": text[:99],
                "summary": "s",
                "highlights": "h",
            }
            for i in range(4)
        ]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.slow
def test_the_perplexity_of_answers_is_what_amd_quark_measures(asked: list[tuple[Any, ...]]) -> None:
    """47.1329 was printed by amd-quark 0.13 for the same model in float32 and the same sequences."""
    model, tokenizer = get_model(MODEL, "float32", device="cpu")[0], get_tokenizer(MODEL)
    found = ppl_eval_with_synthetic_dataset(tokenizer, model, "cpu", "wikitext_gpt_oss_20b")
    assert f"{found.item():.4f}" == "47.1329"
    assert asked == [("amd/wikitext_gpt_oss_20b", None, "test")]
    with pytest.raises(ConfigError, match=r"'wikitext_gpt_oss' is unknown.*wikitext_gpt_oss_20b"):
        ppl_eval_with_synthetic_dataset(tokenizer, model, "cpu", "wikitext_gpt_oss")
    with pytest.raises(NotSupportedError, match="is_onnx_model"):
        ppl_eval_with_synthetic_dataset(tokenizer, model, "cpu", "wikitext_gpt_oss_20b", is_onnx_model=True)
    PARTS.append((0, 20, 99))
    try:
        with pytest.raises(CalibrationError, match="Row 4 .* 99 of them generated"):
            ppl_eval_with_synthetic_dataset(tokenizer, model, "cpu", "wikitext_gpt_oss_20b")
    finally:
        PARTS.pop()
    assert math.isfinite(found)


@pytest.mark.slow
def test_summaries_are_what_the_model_writes_alone(asked: list[tuple[Any, ...]]) -> None:
    model, tokenizer = get_model(MODEL, "float32", device="cpu")[0], get_tokenizer(MODEL)

    def written(batch_size: int, count: int) -> list[dict[str, Any]]:
        return rouge_meteor_generations(
            "xsum", model, tokenizer, count, "hf_format", None, {}, batch_size, "cpu", 6, seq_len=64
        )

    together, alone = written(3, 3), written(1, -1)
    assert asked[0] == ("knkarthick/xsum", None, "test") and len(alone) == 4
    assert [row["predicted"] for row in together] == [row["predicted"] for row in alone[:3]], "padding has no say"
    assert all(0 < len(tokenizer(row["predicted"])["input_ids"]) <= 8 and row["summary"] == "s" for row in alone)
    question = tokenizer("Summarize the following text.\n\n")["input_ids"]
    end = tokenizer("\n\nSummary:", add_special_tokens=False)["input_ids"]
    inside = tokenizer(alone[3]["dialogue"], add_special_tokens=False)["input_ids"][: 64 - len(question) - len(end)]
    ids = torch.tensor([[*question, *inside, *end]])
    answer = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, 64:]
    assert alone[3]["predicted"] == tokenizer.decode(answer, skip_special_tokens=True)
    for options, message in (
        ({"dataset": "xsums"}, "'xsums' is unknown"),
        ({"seq_len": 5}, "the question alone has"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"device": "cuda"}, "device is cuda"),
    ):
        given: dict[str, Any] = {
            "dataset": "xsum", "model": model, "tokenizer": tokenizer, "num_eval_data": 1, "batch_size": 1,
            "import_file_format": "hf_format", "import_model_dir": "", "model_args": {}, "device": "cpu",
            "max_new_toks": 4, "seq_len": 64,
        }  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            rouge_meteor_generations(**{**given, **options})
        with pytest.raises(NotSupportedError, match="get_model"):
            rouge_meteor_generations(**{**given, "import_model_dir": "folder"})


def test_scores_are_asked_of_the_package_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metric:
        def __init__(self, name: str) -> None:
            self.name = name

        def compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
            return {self.name: sum(a == b for a, b in zip(predictions, references, strict=True)) / len(references)}

    rows = [{"predicted": "a", "highlights": "a"}, {"predicted": "b", "highlights": "c"}]
    monkeypatch.setitem(sys.modules, "evaluate", None)
    for function, needed in ((rouge_eval, "rouge_score"), (meteor_eval, "nltk")):
        monkeypatch.setitem(sys.modules, needed, None)
        with pytest.raises(MissingDependencyError, match=f"pip install {needed}"):
            function("cnn_dm", rows)
        monkeypatch.setitem(sys.modules, needed, ModuleType(needed))
        with pytest.raises(MissingDependencyError, match="pip install evaluate"):
            function("cnn_dm", rows)
    package = ModuleType("evaluate")
    package.load = Metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evaluate", package)
    assert rouge_eval("cnn_dm", rows) == {"rouge": 0.5} and meteor_eval("cnn_dm", rows) == {"meteor": 0.5}
    with pytest.raises(ConfigError, match="'predicted' and 'summary'"):
        rouge_eval("xsum", rows)
    with pytest.raises(NotSupportedError, match="Python pickles"):
        mlperf_rouge_eval("folder", 10, None, "model", "cpu", "1")
