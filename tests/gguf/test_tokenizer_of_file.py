"""Tokenizers of GGUF files as folders have them: the ids of texts are those of the tokenizer that was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quark.errors import FormatError, NotSupportedError
from quark.gguf.tokenizer import write_tokenizer
from quark.gguf.tokenizer_of_file import OTHER_NAMES, write_tokenizer_files
from quark.gguf.vocabularies.byte_level import PRE_TOKENIZERS, PreTokenizer
from tests.gguf.test_tokenizer import of_rule, saved, scored, sentencepiece_bpe

TEXTS = (
    "The runner ran: it's 12345 times.\n\n  x = [1, 2]  naïve 日本",
    " a  b",
    "12 34  5",
    "WE'VE </s> nan\r\n",
    "the<s>the",
)


class Field:
    """One of a reader's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def contents(self) -> Any:
        return self.value


class Reader:
    """Of a file that has no tensors."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = {key: Field(value) for key, value in fields.items()}

    def get_field(self, key: str) -> Field | None:
        return self.fields.get(key)


def back(folder: Path, change: Callable[[dict[str, Any]], None] = lambda fields: None, fewer: int = 0) -> Any:
    """The tokenizer of a folder after it was written into a file and read.

    Args:
        folder: The folder.
        change: Alters the fields of the file.
        fewer: By how many rows the embedding is shorter than the vocabulary.
    """
    from transformers import AutoTokenizer

    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    rows = Tokenizer.from_str(json.dumps(described)).get_vocab_size() + 3  # tokens that fill up come behind
    writer = gguf.GGUFWriter(folder / "tokenizer.gguf", "llama")
    write_tokenizer(writer, folder, rows)
    fields = {key: value.value for key, value in writer.kv_data[0].items()}
    change(fields)
    writer.close()

    write_tokenizer_files(Reader(fields), folder / "back", len(fields.get("tokenizer.ggml.tokens", ())) - fewer, None)
    return AutoTokenizer.from_pretrained(folder / "back")


def agrees(tokenizer: Tokenizer, read: Any) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert read(text)["input_ids"] == ids, text
        assert read.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False), text


@pytest.mark.slow
@pytest.mark.parametrize("rule", PRE_TOKENIZERS, ids=lambda rule: rule.name)
def test_each_rule_splits_text_as_before(rule: PreTokenizer, tmp_path: Path) -> None:
    tokenizer = of_rule(rule)
    tokenizer.add_special_tokens(["</s>"])
    agrees(
        tokenizer,
        back(saved(tokenizer, tmp_path), lambda fields: fields.update({"tokenizer.ggml.add_bos_token": False})),
    )


def test_other_names_of_a_rule_are_of_rules_that_there_are() -> None:
    assert {*OTHER_NAMES} <= {rule.name for rule in PRE_TOKENIZERS}
    others = [name for names in OTHER_NAMES.values() for name in names]
    assert len({*others}) == len(others) and not {*others} & {rule.name for rule in PRE_TOKENIZERS}


def test_names_of_rules_split_as_transformers_splits_under_them() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    splits = getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if splits is None:
        pytest.skip("this transformers has no table of rules")
    rules = {rule.name: rule for rule in PRE_TOKENIZERS}
    for name, others in OTHER_NAMES.items():
        for other in {*others} & {*splits}:
            assert rules[name].expressions == (splits[other],)


def test_digits_are_split_under_a_name_that_transformers_passes_over(tmp_path: Path) -> None:
    """SmolLM: of "34  5" the two spaces are one piece, since digits are split before all else."""
    (rule,) = [rule for rule in PRE_TOKENIZERS if rule.name == "starcoder"]
    tokenizer = of_rule(rule)
    tokenizer.add_special_tokens(["</s>"])
    read = back(saved(tokenizer, tmp_path), lambda fields: fields.update({"tokenizer.ggml.pre": "smollm"}))
    agrees(tokenizer, read)
    assert read.backend_tokenizer.pre_tokenizer.pre_tokenize_str("34  5") == [
        ("3", (0, 1)), ("4", (1, 2)), ("ĠĠ", (2, 4)), ("5", (4, 5)),
    ]  # fmt: skip


def test_scores_become_the_merges_that_they_were_made_of(tmp_path: Path) -> None:
    tokenizer = sentencepiece_bpe(*scored())
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    single = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.post_processor = single
    read = back(saved(tokenizer, tmp_path, bos_token="<s>", unk_token="<unk>"))
    agrees(tokenizer, read)
    assert (read.bos_token, read.unk_token) == ("<s>", "<unk>")


def test_the_merge_with_the_higher_score_comes_first(tmp_path: Path) -> None:
    tokenizer = sentencepiece_bpe(["a", "b", "c", "▁", "ab", "bc"], [("b", "c"), ("a", "b")])
    read = back(saved(tokenizer, tmp_path, unk_token="<unk>"))
    assert read.tokenize("abc") == tokenizer.encode("abc").tokens == ["▁", "a", "bc"]


def test_unigrams_keep_their_probabilities(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -1.0), *((letter, -3.0) for letter in "therun12")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    read = back(saved(tokenizer, tmp_path, unk_token="<unk>"))
    for text in ("the run", " there  the 12 ", "other"):
        assert read(text)["input_ids"] == tokenizer.encode(text).ids, text


def test_a_template_of_chats_comes_back(tmp_path: Path) -> None:
    tokenizer = of_rule(PRE_TOKENIZERS[0])
    folder = saved(tokenizer, tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    read = back(folder, lambda fields: fields.update({"tokenizer.chat_template": template}))
    assert read.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has 263 tokens; its embedding has 262 rows"):
        back(saved(of_rule(PRE_TOKENIZERS[0]), tmp_path), fewer=1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rule": ({"pre": None}, "pre is None, a rule that splits text and is not known. Possible: "),
    "no merges": ({"merges": None}, "no merges"),
    "a merge of one": ({"merges": ["th"]}, "'th' is not one of two"),
    "a merge of nothing that there is": ({"merges": ["q qq"]}, "vocabulary is none"),
    "a token twice": ({"tokens": ["a"] * 260, "token_type": [1] * 260}, "a token twice"),
    "too few kinds": ({"token_type": [1]}, "of which kind"),
    "no tokens": ({"tokens": None}, "no tokens"),
    "an id of none": ({"eos_token_id": -1}, "eos_token_id is -1"),
    "another vocabulary": ({"model": "rwkv"}, "'rwkv', a vocabulary that is not read. Possible: gpt2, llama, t5"),
    "no scores": ({"model": "llama"}, "no score for each"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_vocabulary_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    values, message = WRONG[name]

    def change(fields: dict[str, Any]) -> None:
        for key, value in values.items():
            fields.pop(f"tokenizer.ggml.{key}", None)
            if value is not None:
                fields[f"tokenizer.ggml.{key}"] = value

    with pytest.raises((FormatError, NotSupportedError), match=message):
        back(saved(of_rule(PRE_TOKENIZERS[0]), tmp_path), change)
