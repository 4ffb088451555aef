"""Text for training scripts: which windows and rows there are, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quark.compat.llm_scripts.training_text import get_loader, get_pile10k_dataloader, get_trainer_dataset
from quark.errors import CalibrationError, ConfigError


class Tokenizer:
    """A token for each character."""

    bos_token, eos_token = "<", ">"

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package `datasets` of three texts, and what it was asked for."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> list[dict[str, str]]:
        calls.append((path, name, split))
        return [{"text": text, "content": text, "summary": "!"} for text in ("abcd", "efghij", "kl")]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def texts(windows: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in windows.tolist()]


def test_a_loader_gives_the_windows_of_the_joined_text(asked: list[tuple[Any, ...]]) -> None:
    loader = get_loader("wikitext", "test", Tokenizer(), seqlen=5, batch_size=2)
    assert [texts(ids) for (ids,) in loader] == [["abcd\n", "\nefgh"], ["ij\n\nk"]]
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    chosen = [texts(ids) for (ids,) in get_loader("wikitext", "test", Tokenizer(), 5, num_batch=1, batch_size=2)]
    assert len(chosen) == 1 and set(chosen[0]) < {"abcd\n", "\nefgh", "ij\n\nk"} and len(set(chosen[0])) == 2
    (again,) = get_loader("wikitext", "test", Tokenizer(), 5, num_batch=1, batch_size=2)
    assert texts(again[0]) == chosen[0], "the same at each call"
    assert len(get_loader("shibing624/AdvertiseGen", "train", Tokenizer(), 4, num_batch=99)) == 4
    assert asked[-1] == ("shibing624/AdvertiseGen", None, "train")


def test_rows_of_a_trainer_have_the_ids_as_labels(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(default_data_collator=dict))
    found = get_trainer_dataset("shibing624/AdvertiseGen", "train", Tokenizer(), 2, 1, seqlen=6)
    assert found["data_collator"] is dict
    rows = found["train_dataset"]
    assert ["".join(map(chr, row["input_ids"])) for row in rows] == ["<abcd!", "><efgh"], "and a shorter rest"
    assert all(row["labels"] == row["input_ids"] and row["attention_mask"] == [1] * 6 for row in rows)
    assert ["".join(map(chr, row["input_ids"])) for row in found["eval_dataset"]] == ["<abcd>"]
    assert asked[-1] == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    whole = get_trainer_dataset("wikitext", "train", Tokenizer(), None, None, seqlen=6)
    assert len(whole["train_dataset"]) == len(whole["eval_dataset"]) == 3


def test_windows_of_the_pile_lie_within_one_text(asked: list[tuple[Any, ...]]) -> None:
    loader, none = get_pile10k_dataloader(Tokenizer(), train_size=5, seqlen=3, batch_size=8)
    assert none is None and asked == [("NeelNanda/pile-10k", None, "train")]
    (batch,) = loader
    assert batch.shape == (2, 3) and all(row in "abcd" or row in "efghij" for row in texts(batch))


def test_what_cannot_be_loaded_is_refused(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer()
    with pytest.raises(ConfigError, match=r"'wikitxt' is unknown.*wikitext"):
        get_loader("wikitxt", "train", tokenizer)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        get_loader("wikitext", "train", tokenizer, batch_size=0)
    with pytest.raises(CalibrationError, match="16 tokens; at least one window of 1024"):
        get_loader("wikitext", "train", tokenizer)
    with pytest.raises(CalibrationError, match="No text of NeelNanda/pile-10k is longer"):
        get_pile10k_dataloader(tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(default_data_collator=dict))
    with pytest.raises(CalibrationError, match="have 18 tokens; at least one row of 1024"):
        get_trainer_dataset("wikitext", "train", tokenizer, None, None)
    monkeypatch.setattr(Tokenizer, "eos_token", None)
    with pytest.raises(ConfigError, match="no end token"):
        get_trainer_dataset("wikitext", "train", tokenizer, None, None)
