"""Token ids of texts."""

from __future__ import annotations

import pytest
import tokenizers
import transformers

from quark.errors import FormatError
from quark.torch.llm.text import token_ids


def test_a_pattern_of_a_tokenizer_that_has_no_end_is_a_line() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+b"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    assert token_ids(tokenizer, "a") == [0]
    with pytest.raises(FormatError, match=r"tokenizer\.json whose regular expressions fail"):
        token_ids(tokenizer, "a" * 30 + "c")
