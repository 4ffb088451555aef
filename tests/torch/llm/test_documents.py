"""Texts, JSON lines and datasets as samples of token ids, and what is refused by its line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quark.errors import CalibrationError, FormatError, MissingDependencyError
from quark.torch.llm import chat_templates
from quark.torch.llm.documents import documents, samples_of
from quark.torch.llm.text import token_windows
from tests.models.torch_zoo import LANGUAGE_MODEL

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "Which module?"}, {"role": "assistant", "content": "The json module."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(LANGUAGE_MODEL)


@pytest.fixture
def chat_tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    loaded.chat_template = TEMPLATE
    return loaded


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_lines_are_packed_with_the_special_tokens_of_each(tokenizer: Any, tmp_path: Path) -> None:
    texts = ["The first document.", "A second\u2028 one, größer.", "And the third of them."]
    file = lines(tmp_path / "data.jsonl", *({"text": text, "id": 3} for text in texts))
    everything = [token for text in texts for token in tokenizer(text)["input_ids"]]
    windows = [window[0].tolist() for window in samples_of(tokenizer, file, 4, packing=True)]
    assert all(window[0] == tokenizer.bos_token_id for window in windows)
    begin = tokenizer.bos_token_id
    plain = [token for token in everything if token != begin]
    read = [token for window in windows for token in window if token != begin]
    assert read == plain[: len(read)] and len(plain) - len(read) < 4
    assert len(samples_of(tokenizer, file, 4, packing=True, limit=2)) == 2
    alone = samples_of(tokenizer, file, 6, packing=False)
    assert [sample[0].tolist() for sample in alone] == [tokenizer(text)["input_ids"][:6] for text in texts]


def test_a_conversation_is_what_the_chat_template_of_transformers_makes(chat_tokenizer: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    (sample,) = samples_of(chat_tokenizer, file, 512, packing=False)
    wanted = chat_tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert sample[0].tolist() == wanted
    (window,) = samples_of(chat_tokenizer, file, len(wanted), packing=True)
    assert window[0].tolist() == wanted


TOOLS = [{"type": "function", "function": {"name": "time", "description": "The time.", "parameters": {}}}]
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ begin | default('') }}" + TEMPLATE
GIVEN: dict[str, tuple[dict[str, Any], list[dict[str, str]], dict[str, Any]]] = {
    "tools": ({"messages": CHAT, "tools": TOOLS}, CHAT, {"tools": TOOLS}),
    "options": ({"messages": CHAT, "chat_template_kwargs": {"begin": "X"}}, CHAT, {"begin": "X"}),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Which module?"}, {"from": "gpt", "value": "The json module."}]},
        CHAT,
        {},
    ),
    "question": ({"prompt": "Which module?", "answer": "The json module."}, CHAT, {}),
    "conversational completion": ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT, {}),
}
"""A line -> the messages and options that `apply_chat_template` is given for it."""


@pytest.mark.parametrize("name", GIVEN)
def test_the_forms_of_conversations_are_read_as_the_template_writes_them(
    name: str, chat_tokenizer: Any, tmp_path: Path
) -> None:
    chat_tokenizer.chat_template = WITH_TOOLS
    row, messages, options = GIVEN[name]
    file = lines(tmp_path / "chat.jsonl", row)
    (sample,) = samples_of(chat_tokenizer, file, 512, packing=False)
    wanted = chat_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
    assert sample[0].tolist() == wanted
    (document,) = documents(file)
    if document.answer is not None:
        start = document.answer_start(chat_tokenizer)
        asked = chat_tokenizer.apply_chat_template(messages[:1], tokenize=True, return_dict=True)["input_ids"]
        assert start > 0 and wanted[:start] == asked[:start] and "json" in chat_tokenizer.decode(wanted[start:])


def test_a_prompt_and_its_completion_are_one_text(tokenizer: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "data.jsonl", {"prompt": "def f(x):", "completion": " return x"})
    (document,) = documents(file)
    whole = tokenizer("def f(x): return x")["input_ids"]
    assert document.token_ids(tokenizer) == whole
    assert tokenizer.decode(whole[document.answer_start(tokenizer) :]).strip() == "return x"


BEGIN, END = ("[B]", 1), ("[E]", 2)
PROCESSORS: dict[str, Any] = {
    "none": None,
    "begin": processors.TemplateProcessing("[B] $A", None, [BEGIN]),
    "both": processors.TemplateProcessing("[B] $A [E]", None, [BEGIN, END]),
    "end": processors.TemplateProcessing("$A [E]", None, [END]),
    "two": processors.TemplateProcessing("[B] [E] $A", None, [BEGIN, END]),
    "bert": processors.BertProcessing(END, BEGIN),
    "roberta": processors.RobertaProcessing(END, BEGIN),
}
MODELS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: (models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "words": lambda: (models.WordPiece(unk_token="[U]"), trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer()),
    "unigram": lambda: (models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("model", MODELS)
def test_a_window_begins_as_the_tokenizer_begins_a_text(model: str, processor: str, tmp_path: Path) -> None:
    """A window that holds all of a text has the ids of the tokenizer's own call, up to what it puts at the end."""
    text = "The river was high. Nobody crossed it before noon, and the mill stood still."
    kind, trainer, splitter = MODELS[model]()
    made = Tokenizer(kind)
    made.pre_tokenizer = splitter
    made.train_from_iterator([text] * 3, trainer(vocab_size=120, special_tokens=["[U]", "[B]", "[E]"]))
    if PROCESSORS[processor] is not None:
        made.post_processor = PROCESSORS[processor]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[U]")
    own = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    begin = own[: next(i for i in range(len(own)) if own[i : i + len(plain)] == plain)]
    (tmp_path / "text.txt").write_text(text)
    (window,) = token_windows(tokenizer, tmp_path / "text.txt", len(begin) + len(plain))
    assert window[0].tolist() == own[: len(begin) + len(plain)]
    windows = token_windows(tokenizer, tmp_path / "text.txt", 8)
    assert all(each[0, : len(begin)].tolist() == begin for each in windows)
    read = [token for each in windows for token in each[0, len(begin) :].tolist()]
    assert read == plain[: len(read)]


def test_a_text_that_is_not_packed_is_its_lines(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One line.\n\n  Another, longer line.  \n")
    found = samples_of(tokenizer, tmp_path / "text.txt", 99, packing=False)
    assert [x[0].tolist() for x in found] == [
        tokenizer(line)["input_ids"] for line in ("One line.", "Another, longer line.")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": ', "line 2, is not JSON"),
        ('"text"\n', "line 1, is no object; needed is 'text' or 'messages'"),
        ('{"prompt": "a", "n": 1}\n', "line 1, has prompt, n; needed is"),
        ('{"prompt": "a", "completion": [{"role": "user"}]}\n', "'prompt' and 'completion' are a text and messages"),
        ('{"text": "a", "messages": []}\n', "line 1, has text, messages; needed is"),
        ('{"text": 3}\n', "'text' is neither text nor a list of messages"),
        ('{"messages": ["hello"]}\n', "'messages' is neither text nor a list"),
        ('{"messages": []}\n', "'messages' is neither text nor a list"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "the tokenizer of the model has no chat template"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}\n', "of the type 'image'"),
        ('{"messages": [{"role": "user", "content": [{"image_url": {"url": "x"}}]}]}\n', "a folder of .npz files"),
        ('{"text": "a \\ud800 b"}\n', r"'a \\ud800 b' has half of a pair"),
        ('{"messages": [{"from": [], "value": "a"}]}\n', "the tokenizer of the model has no chat template"),
        ('{"messages": [{"role": "user", "content": [{"type": {}, "url": "a"}]}]}\n', "has no chat template"),
        ('{"text": ' + "[" * 20000, "is not JSON"),
        ("\n\n", "at least one window"),
    ],
)
def test_what_is_no_document_is_named_by_its_line(tokenizer: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(CalibrationError, match=message):
        samples_of(tokenizer, tmp_path / "data.jsonl", 4, packing=True)


def test_what_a_chat_template_refuses_is_named(chat_tokenizer: Any, tmp_path: Path) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    with pytest.raises(CalibrationError, match=r"line 1,: the chat template .* roles must alternate"):
        samples_of(chat_tokenizer, file, 4, packing=True)


def test_a_dataset_is_asked_for_by_name_split_and_column(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return [{"text": "a b", "body": "c"}, {"text": "", "body": "d"}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = {
        name: [document.content for document in documents(Path(f"datasets:{name}"))]
        for name in ("org/mine", "org/mine:test", "org/mine:test:body", "wikitext")
    }
    assert asked == [
        ("org/mine", None, "train"), ("org/mine", None, "test"), ("org/mine", None, "test"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    ]  # fmt: skip
    assert found["org/mine"] == ["a b"] and found["org/mine:test:body"] == ["c", "d"]
    with pytest.raises(CalibrationError, match="needed is 'boddy'"):
        samples_of(tokenizer, Path("datasets:org/mine:test:boddy"), 4, packing=True)
    for name in ("datasets:", "datasets:a:b:c:d"):
        with pytest.raises(CalibrationError, match="is no name of a dataset"):
            list(documents(Path(name)))


def test_without_the_package_datasets_its_pip_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install datasets"):
        list(documents(Path("datasets:org/mine")))


BOMBS = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}",
    "one number": "{{ (7 ** 900000000) | string | length }}",
    "memory": "{{ ('a' * 20000000000) | length }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_chat_template_has_a_bound_of_time_and_memory(
    name: str, chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops of 100,000 ran for minutes: the sandbox of jinja2 counts no steps. The next template runs."""
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0)
    sound = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = BOMBS[name]
    with pytest.raises(FormatError, match="on one conversation|more memory"):
        chat_templates.render_chat(chat_tokenizer, CHAT)
    chat_tokenizer.chat_template = sound
    expected = chat_tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert chat_templates.render_chat(chat_tokenizer, CHAT, add_generation_prompt=True) == expected
