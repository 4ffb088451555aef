"""Calibration data by name and from text files: which windows there are, and what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quark.compat.llm_scripts.calibration_text import get_calib_dataloader, get_wikitext2
from quark.errors import CalibrationError, ConfigError, MissingDependencyError, NotSupportedError
from quark.torch.llm.text import read_text

TEXT = Path(__file__).parents[3] / "examples" / "models" / "text" / "calibration.txt"


class Tokenizer:
    """A token for each word: its number in the order of first appearance."""

    chat_template: str | None = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, return_tensors: str | None = None, **options: object) -> dict[str, Any]:
        ids = [self.known.setdefault(word, len(self.known)) for word in text.split()]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)


class Rows(list[dict[str, Any]]):
    def shuffle(self, seed: int) -> Rows:
        return Rows(random.Random(seed).sample(self, len(self)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package `datasets` of ten texts of 3, 4, 5 ... words, and what it was asked for."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> Rows:
        calls.append((path, name, split))
        rows = Rows()
        for index in range(10):
            words = " ".join(f"{index}.{k}" for k in range(index + 3))
            messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
            rows.append({"text": words, "article": f"a{words}", "messages": messages})
        return rows

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def words(tokenizer: Tokenizer, ids: torch.Tensor) -> list[str]:
    names = list(tokenizer.known)
    return [names[index] for index in ids.flatten().tolist()]


def test_a_text_file_is_cut_into_windows() -> None:
    tokenizer = Tokenizer()
    batches = list(get_calib_dataloader(TEXT, tokenizer=tokenizer, batch_size=3, num_calib_data=7, seqlen=16))
    assert [tuple(batch.shape) for batch in batches] == [(3, 16), (3, 16), (1, 16)]
    assert words(tokenizer, torch.cat(batches)) == TEXT.read_text(encoding="utf-8").split()[: 7 * 16]


@pytest.mark.parametrize(
    ("name", "source", "first"),
    [
        ("pileval", ("mit-han-lab/pile-val-backup", None, "validation"), "0.0 0.1 0.2 1.0"),
        ("wikitext", ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"), "0.0 0.1 0.2 1.0"),
        ("cnn_dailymail", ("abisee/cnn_dailymail", "3.0.0", "train"), "a0.0 0.1 0.2 a1.0"),
        ("HuggingFaceH4/ultrachat_200k", ("HuggingFaceH4/ultrachat_200k", None, "train_sft"), "0.0 0.1 0.2 yes"),
    ],
)
def test_texts_of_a_dataset_are_packed_in_order(
    asked: list[tuple[Any, ...]], name: str, source: tuple[Any, ...], first: str
) -> None:
    tokenizer = Tokenizer()
    ids = torch.cat(list(get_calib_dataloader(name, tokenizer=tokenizer, num_calib_data=5, seqlen=4)))
    assert ids.shape == (5, 4) and ids.dtype == torch.int64
    assert words(tokenizer, ids[0]) == first.split()
    assert asked == [source]


def test_a_conversation_has_the_form_that_the_model_reads(asked: list[tuple[Any, ...]]) -> None:
    tokenizer = Tokenizer()
    tokenizer.chat_template = "of the model"
    ids = torch.cat(list(get_calib_dataloader("HuggingFaceH4/ultrachat_200k", tokenizer=tokenizer, seqlen=6)))
    assert words(tokenizer, ids[0]) == ["<user>", "0.0", "0.1", "0.2", "<assistant>", "yes"]


def test_the_benchmark_of_awq_is_shuffled_and_leaves_longer_texts_out(asked: list[tuple[Any, ...]]) -> None:
    tokenizer = Tokenizer()
    loader = get_calib_dataloader("pileval_for_awq_benchmark", tokenizer=tokenizer, num_calib_data=99, seqlen=5)
    order = random.Random(42).sample(range(10), 10)
    wanted = [f"{index}.{k}" for index in order if index + 3 <= 5 for k in range(index + 3)]
    assert words(tokenizer, torch.cat(list(loader))) == wanted[:10], "12 words are two windows"


def test_the_benchmark_of_gptq_takes_random_places(asked: list[tuple[Any, ...]]) -> None:
    tokenizer = Tokenizer()
    everything = [f"{index}.{k}" for index in range(10) for k in range(index + 3)]
    places = random.Random(0)
    starts = [places.randint(0, len(everything) - 6 - 1) for _ in range(20)]
    wanted = [word for start in starts for word in everything[start : start + 6]]
    loader = get_calib_dataloader("wikitext_for_gptq_benchmark", tokenizer=tokenizer, num_calib_data=20, seqlen=6)
    assert words(tokenizer, torch.cat(list(loader))) == wanted
    assert words(tokenizer, get_wikitext2(tokenizer, 20, 6, "cpu")) == wanted
    assert not torch.equal(get_wikitext2(tokenizer, 20, 6, None, seed=1), get_wikitext2(tokenizer, 20, 6, None))


def test_shuffling_changes_the_order_and_nothing_else(asked: list[tuple[Any, ...]]) -> None:
    options: dict[str, Any] = {"tokenizer": Tokenizer(), "num_calib_data": 12, "seqlen": 4}
    plain = torch.cat(list(get_calib_dataloader("pileval", **options)))
    torch.manual_seed(1)
    shuffled = torch.cat(list(get_calib_dataloader("pileval", shuffle=True, **options)))
    assert not torch.equal(plain, shuffled)
    assert sorted(map(tuple, plain.tolist())) == sorted(map(tuple, shuffled.tolist()))


WRONG: dict[str, tuple[type[Exception], str, Callable[[], Iterator[Any]]]] = {
    "unknown": (ConfigError, "Did you mean 'pileval'", lambda: load("pilval")),
    "no tokenizer": (ConfigError, "needs the tokenizer", lambda: load("pileval", tokenizer=None)),
    "images": (NotSupportedError, "ScienceQA holds images", lambda: load("ScienceQA")),
    "processor": (NotSupportedError, "only text is read", lambda: load("pileval", processor=object())),
    "no window": (ConfigError, "seqlen is 0", lambda: load("pileval", seqlen=0)),
    "no samples": (ConfigError, "num_calib_data is -1", lambda: load("pileval", num_calib_data=-1)),
    "short dataset": (CalibrationError, "has 75 tokens", lambda: load("pileval", seqlen=76)),
    "short benchmark": (CalibrationError, "has 75 tokens", lambda: load("wikitext_for_gptq_benchmark", seqlen=75)),
    "short file": (CalibrationError, "at least one window", lambda: load(TEXT, seqlen=10**6)),
}


def load(name: str | Path, **options: Any) -> Iterator[Any]:
    return iter(get_calib_dataloader(name, **{"tokenizer": Tokenizer(), **options}))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(asked: list[tuple[Any, ...]], case: str) -> None:
    kind, message, use = WRONG[case]
    with pytest.raises(kind, match=message):
        use()


def test_an_absent_package_is_named_and_a_file_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install datasets. A text file can be given"):
        load("wikitext")


def test_a_dataset_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(CalibrationError, match="abisee/cnn_dailymail cannot be loaded: .* text file"):
        load("cnn_dailymail")


def test_a_device_is_no_text() -> None:
    """It would be read for ever."""
    with pytest.raises(CalibrationError, match="/dev/zero is a folder, a pipe or a device"):
        read_text(Path("/dev/zero"))
