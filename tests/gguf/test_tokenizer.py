"""What a GGUF file says of a tokenizer, and which ones its readers would take for others."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quark.errors import NotSupportedError
from quark.gguf.tokenizer import write_tokenizer
from quark.gguf.vocabularies.byte_level import GPT2, PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEXT = "The runner ran: it's 12345 times.\n\n  x = [1, 2]  naïve 日本"


def saved(tokenizer: Tokenizer, folder: Path, **special: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "</s>"} | special
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def written(folder: Path, rows: int | None = None, stops: tuple[int, ...] = (), name: str = "") -> dict[str, Any]:
    """The metadata of a file that holds nothing but the tokenizer of a folder."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    file = folder / "tokenizer.gguf"
    rows = rows or Tokenizer.from_str(json.dumps(described)).get_vocab_size()
    writer = gguf.GGUFWriter(file, "llama")
    try:
        write_tokenizer(writer, folder, rows, stops, name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return {name.removeprefix("tokenizer.ggml."): f.contents() for name, f in gguf.GGUFReader(file).fields.items()}


def split(expression: str) -> Any:
    return pre_tokenizers.Split(Regex(expression), "isolated")


def byte_level(*steps: Any, use_regex: bool = False, prefix: bool = False, **options: Any) -> Tokenizer:
    """A tokenizer of all bytes, `th`, `the` and `nan`, to which no merge leads."""
    tokens = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "nan"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")], **options))
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_rule(rule: PreTokenizer) -> Tokenizer:
    steps = [split(e) for e in rule.expressions if e != GPT2]
    return byte_level(*steps, use_regex=GPT2 in rule.expressions, ignore_merges=rule.ignore_merges)


# Byte-level BPE -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", PRE_TOKENIZERS, ids=lambda rule: rule.name)
def test_the_rule_is_named_by_its_expressions(rule: PreTokenizer, tmp_path: Path) -> None:
    found = written(saved(of_rule(rule), tmp_path))
    assert (found["model"], found["pre"]) == ("gpt2", rule.name)
    assert found["merges"] == ["t h", "th e"]


@pytest.mark.slow
def test_expressions_are_those_by_which_transformers_reads_files() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    both = [rule for rule in PRE_TOKENIZERS if rule.name in THEIRS]
    assert len(both) >= 6
    for rule in both:
        assert rule.expressions == (THEIRS[rule.name],)


SPELLINGS = {
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), split(GPT2)],
    "dbrx": [
        pre_tokenizers.Split(
            Regex(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+"
            ),
            "removed",
            invert=True,
        )
    ],
    "deepseek-coder": [
        *map(split, ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"]),
        pre_tokenizers.Digits(individual_digits=True),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_split_the_same_and_have_the_same_name(name: str, tmp_path: Path) -> None:
    tokenizer, ours = byte_level(*SPELLINGS[name]), of_rule(next(rule for rule in PRE_TOKENIZERS if rule.name == name))
    assert written(saved(tokenizer, tmp_path))["pre"] == name
    for text in (TEXT, "1 12 1234\r\n\r\n \n a", "WE'VE it's  'T", "x!!\n\n..\n y"):
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == ours.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.slow
def test_merges_that_are_ignored_must_lead_to_all_tokens(tmp_path: Path) -> None:
    """The rule of Qwen 2 has no name under which a token stays whole that no merges lead to."""
    (rule,) = [rule for rule in PRE_TOKENIZERS if rule.name == "qwen2"]
    with pytest.raises(NotSupportedError, match=r"takes ignore_merges=False.* 1 tokens, such as 'nan'"):
        written(saved(byte_level(split(rule.expressions[0]), ignore_merges=True), tmp_path))
    described = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["merges"] += [["n", "a"], ["na", "n"]]
    described["model"]["vocab"]["na"] = len(described["model"]["vocab"])
    assert written(saved(Tokenizer.from_str(json.dumps(described)), tmp_path))["pre"] == "qwen2"


def nfkc() -> Tokenizer:
    tokenizer = byte_level(use_regex=True)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


BYTE_LEVEL_REFUSED = {
    "it normalizes text by NFKC": nfkc,
    "a space is put before the text": lambda: byte_level(use_regex=True, prefix=True),
    "end of word suffix": lambda: byte_level(use_regex=True, end_of_word_suffix="</w>"),
    "has no name in llama.cpp; known: gpt-2": lambda: byte_level(split(r"\p{L}+")),
    "merged_with_next|MergedWithNext": lambda: byte_level(pre_tokenizers.Split(" ", "merged_with_next")),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", BYTE_LEVEL_REFUSED)
def test_byte_level_tokenizers_that_llama_cpp_would_read_as_others(reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        written(saved(BYTE_LEVEL_REFUSED[reason](), tmp_path))


# Sentencepiece --------------------------------------------------------------------------------------------------------

BYTES = [f"<0x{i:02X}>" for i in range(256)]


def sentencepiece_bpe(tokens: list[str], merges: list[tuple[str, str]], pieces: list[str] = BYTES) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *pieces, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def scored() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by falling score, and the merges that transformers makes of such."""
    from transformers.tokenization_utils_base import generate_merges

    tokens = ["▁r", "un", "▁run", "ne", "ner", "▁runner", "▁ran", *sorted(set("▁runea"))]
    ids = {token: index for index, token in enumerate(tokens)}
    return tokens, [(left, right) for left, right in generate_merges(ids, {t: -float(i) for t, i in ids.items()})]


@pytest.mark.slow
def test_scores_stand_for_merges(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = sentencepiece_bpe(*scored())
    found = written(saved(tokenizer, tmp_path, unk_token="<unk>", bos_token="<s>"))
    assert (found["model"], found["add_space_prefix"]) == ("llama", True)
    assert found["token_type"] == [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * len(scored()[0])
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert 0 > scores["▁r"] > scores["un"] > scores["▁run"] > scores["ner"] > scores["▁runner"]
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tokenizer.gguf")
    assert loaded("runner ran é", add_special_tokens=False)["input_ids"] == tokenizer.encode("runner ran é").ids


def with_normalizer(tokenizer: Tokenizer, normalizer: Any) -> Tokenizer:
    tokenizer.normalizer = normalizer
    return tokenizer


SENTENCEPIECE_REFUSED = {
    "not each byte has a token": lambda: sentencepiece_bpe(["a", "b"], [], BYTES[1:]),
    "'a' and 'b' do not merge": lambda: sentencepiece_bpe(["a", "b", "ab"], []),
    "merges to 'abc' stand before and after": lambda: sentencepiece_bpe(
        ["a", "b", "c", "ab", "bc", "abc"], [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]
    ),
    "normalizes text by {'type': 'NFKC'}": lambda: with_normalizer(sentencepiece_bpe(["a"], []), normalizers.NFKC()),
    "spaces become one, but stay": lambda: with_normalizer(
        sentencepiece_bpe(["a"], []), normalizers.Replace(Regex(" {2,}"), "▁")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", SENTENCEPIECE_REFUSED)
def test_merges_that_no_scores_stand_for_are_refused(reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        written(saved(SENTENCEPIECE_REFUSED[reason](), tmp_path))


# Unigram --------------------------------------------------------------------------------------------------------------


def charsmap(character: str, becomes: str) -> bytes:
    """A table of one character of one byte: a double array as sentencepiece stores it."""
    units = [0] * 1024
    code, base = ord(character), 256
    units[0] = base << 10
    units[base ^ code] = code | 1 << 8 | 256 << 10
    units[base ^ code ^ 256] = 1 << 31
    array = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(array)) + array + becomes.encode() + b"\0"


def unigram(table: bytes | None = None, byte_fallback: bool = False, pre: Any = None) -> Tokenizer:
    tokens = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.5), ("▁run", -3.25), ("ner", -4.0), ("r", -5.5)]
    tokens += [(letter, -6.0 - index / 4) for index, letter in enumerate("unea")]
    tokenizer = Tokenizer(models.Unigram(tokens, unk_id=2, byte_fallback=byte_fallback))
    if table is not None:
        tokenizer.normalizer = normalizers.Precompiled(table)
    tokenizer.pre_tokenizer = pre or pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


@pytest.mark.slow
def test_unigram_has_probabilities_and_a_table_of_characters(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    table = charsmap("\t", " ")
    assert normalizers.Precompiled(table).normalize_str("a\tb") == "a b"
    tokenizer = unigram(table)
    found = written(saved(tokenizer, tmp_path, unk_token="<unk>", pad_token="<pad>"))
    assert (found["model"], found["add_space_prefix"], found["remove_extra_whitespaces"]) == ("t5", True, False)
    assert bytes(found["precompiled_charsmap"]) == table
    assert found["scores"] == [score for _, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    assert (found["add_bos_token"], found["add_eos_token"]) == (False, True)
    assert (found["eos_token_id"], found["unknown_token_id"], found["padding_token_id"]) == (1, 2, 0)
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tokenizer.gguf")
    ours = tokenizer.encode("runner ran q", add_special_tokens=False).ids
    assert loaded("runner ran q", add_special_tokens=False)["input_ids"] == ours


@pytest.mark.slow
def test_spaces_that_become_one(tmp_path: Path) -> None:
    """As sentencepiece's own converter writes it, and as words between whitespace, where all of it became spaces."""
    tokenizer = unigram()
    steps = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    assert written(saved(tokenizer, tmp_path / "a"))["remove_extra_whitespaces"] is True
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    with pytest.raises(NotSupportedError, match=r"words end at U\+000A, U\+000B"):
        written(saved(unigram(charsmap("\t", " "), pre=words), tmp_path / "b"))


@pytest.mark.slow
def test_unigram_with_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="unknown characters become bytes"):
        written(saved(unigram(byte_fallback=True), tmp_path))


# WordPiece ------------------------------------------------------------------------------------------------------------


def wordpiece(lowercase: bool = True, frame: str = "[CLS] $A [SEP]") -> Tokenizer:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "run", "##ner", "a"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(tokens[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[("[CLS]", 2), ("[SEP]", 3), ("[PAD]", 0)]
    )
    return tokenizer


BERT = {"eos_token": None, "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


@pytest.mark.slow
def test_wordpiece_marks_what_begins_a_word(tmp_path: Path) -> None:
    found = written(saved(wordpiece(), tmp_path, **BERT))
    assert found["model"] == "bert"
    assert found["tokens"] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁run", "ner", "▁a"]
    assert (found["bos_token_id"], found["seperator_token_id"], found["add_sep_token"]) == (2, 3, True)
    with pytest.raises(NotSupportedError, match="letters of WordPiece small"):
        written(saved(wordpiece(lowercase=False), tmp_path, **BERT))
    with pytest.raises(NotSupportedError, match="between two special tokens"):
        written(saved(wordpiece(frame="[CLS] $A"), tmp_path, **BERT))


# Special tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kinds_of_tokens_and_what_ends_a_text(tmp_path: Path) -> None:
    tokenizer = byte_level(use_regex=True)
    tokenizer.add_special_tokens(["</s>", "<turn>"])
    tokenizer.add_tokens(["<tool>"])
    folder = saved(tokenizer, tmp_path)
    rows = tokenizer.get_vocab_size()
    ids = {token: tokenizer.token_to_id(token) for token in ("<turn>", "<tool>", "</s>")}
    found = written(folder, rows + 2, (ids["</s>"], ids["<turn>"]))
    assert [found["token_type"][ids[t]] for t in ("<turn>", "<tool>", "</s>")] == [CONTROL, USER_DEFINED, CONTROL]
    assert found["token_type"][-2:] == [UNUSED] * 2 and found["tokens"][-1] == f"[PAD{rows + 1}]"
    assert (found["eos_token_id"], found["eot_token_id"]) == (ids["</s>"], ids["<turn>"])
    assert "eom_token_id" not in found
    assert written(folder, None, (0, 5, 6))["eom_token_id"] == 6
    with pytest.raises(NotSupportedError, match="4 tokens end a text, and there is place for 3"):
        written(folder, None, (0, 5, 6, 7))


@pytest.mark.slow
def test_a_text_without_an_end_takes_that_of_the_model(tmp_path: Path) -> None:
    folder = saved(byte_level(use_regex=True), tmp_path, eos_token=None)
    with pytest.raises(NotSupportedError, match="no token ends a text"):
        written(folder)
    assert written(folder, None, (7,))["eos_token_id"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_take_spaces_along_are_refused(flag: str, tmp_path: Path) -> None:
    from tokenizers import AddedToken

    tokenizer = byte_level(use_regex=True)
    tokenizer.add_tokens([AddedToken("<x>", **{flag: True})])
    with pytest.raises(NotSupportedError, match=f"its token '<x>' has {flag}"):
        written(saved(tokenizer, tmp_path))


@pytest.mark.slow
def test_what_takes_spaces_along_as_in_phi_3_is_said_by_the_name(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    def folder(name: str, *stripping: str) -> Path:
        tokenizer = sentencepiece_bpe(["a"], [])
        added = [AddedToken(token, rstrip=token in stripping, special=True) for token in ("<|endoftext|>", "<|end|>")]
        tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True), *added])
        tokenizer.add_tokens([AddedToken("</s>", rstrip="</s>" in stripping)])
        return saved(tokenizer, tmp_path / name, bos_token=None, eos_token="<|endoftext|>")

    phi = folder("phi", "</s>", "<|end|>")
    for given, found in (("Phi-3-mini", "Phi-3-mini"), ("phi3", "phi3"), ("mine", "mine (phi-3)"), ("", "(phi-3)")):
        assert written(phi, name=given)["general.name"] == found
    for given, found in (("Phi-3-mini", "Phi 3-mini"), ("x-phi3", "x-phi 3"), ("mine", "mine")):
        assert written(folder("plain"), name=given)["general.name"] == found
    for others in (("<|end|>",), ("</s>",), ("</s>", "<|end|>", "<|endoftext|>")):
        with pytest.raises(NotSupportedError, match="has rstrip"):
            written(folder("other", *others), name="phi-3")


@pytest.mark.slow
def test_what_stands_around_a_text(tmp_path: Path) -> None:
    for frame, begins, ends in (("$A", 0, 0), ("<s> $A", 1, 0), ("$A </s>", 0, 1), ("<s> $A </s>", 1, 1)):
        tokenizer = sentencepiece_bpe(["a"], [])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=[("<s>", 1), ("</s>", 2), ("<unk>", 0)]
        )
        found = written(saved(tokenizer, tmp_path, bos_token="<s>", unk_token="<unk>"))
        assert (found["add_bos_token"], found["add_eos_token"]) == (bool(begins), bool(ends))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <unk> $A", special_tokens=[("<s>", 1), ("<unk>", 0)]
    )
    with pytest.raises(NotSupportedError, match="more than its first and last one"):
        written(saved(tokenizer, tmp_path, bos_token="<s>", unk_token="<unk>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <unk>", special_tokens=[("<unk>", 0)])
    with pytest.raises(NotSupportedError, match="text ends with token 0"):
        written(saved(tokenizer, tmp_path, bos_token="<s>", unk_token="<unk>"))


@pytest.mark.slow
def test_chat_templates_come_along(tmp_path: Path) -> None:
    folder = saved(byte_level(use_regex=True), tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert written(folder)["tokenizer.chat_template"] == "{{ messages }}"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    found = written(folder)
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.chat_template.tool_use"] == "{{ tools }}"


def test_the_table_of_characters_is_stored_as_transformers_has_it() -> None:
    table = charsmap("\t", " ")
    described = json.loads(unigram(table).to_str())["normalizer"]
    assert base64.b64decode(described["precompiled_charsmap"]) == table
