"""Regular expressions say what `re` says, within a bound of time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.base import bounded_regex
from quark.base.bounded_regex import full_match
from quark.core.names.patterns import matches
from quark.errors import ConfigError

BOMBS = [
    "(a+)+b",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*)*x",
    "a*a*a*a*a*a*a*a*a*b",
    "((a+)*)*b",
    "(?=(a+)+b)a*",
    "(a?){60}a{60}b",
]
REAL = [
    r".*lm_head.*", r"^(?!.*lm_head).*proj$", r".*\.layers\.(0|1|2)\..*", r"model\.layers\.\d+\.mlp\.(gate|up)_proj",
    r".*(?<!router)\.weight", r"\S+[^.]\b.*", r".*mlp\.experts\.[0-9]+\.(?:w1|w3)$",
]  # fmt: skip
NAMES = [
    "lm_head",
    "model.layers.12.mlp.gate_proj",
    "model.layers.1.x",
    "a.router.weight",
    "a.weight",
    "",
    "a\n",
    "é_1",
]


@pytest.mark.parametrize("pattern", BOMBS)
def test_bombs_end_at_once(pattern: str) -> None:
    for text in ("a" * 60, "a" * 200):
        start = time.process_time()
        try:
            assert not full_match(pattern, text) or re.fullmatch(r"\(a\|aa\)\+\$", pattern)
        except ConfigError as error:
            assert "takes too long" in str(error)
        assert time.process_time() - start < 20  # seconds on the slowest machine; years where ways are tried


@pytest.mark.parametrize("pattern", [*REAL, *BOMBS])
def test_both_ways_say_what_re_says(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names, and of short texts, on which bombs end in `re`, too."""
    for fast in (bounded_regex.FAST, -1):
        monkeypatch.setattr(bounded_regex, "FAST", fast)
        for text in (*(NAMES if pattern in REAL else ()), "aaab", "aaaa", "b", "ab", "", "x", "aax", "a\n"):
            assert full_match(pattern, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


PIECES = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", "", "(?=a)", "(?!b)", "(?<=a)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map("({})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda x: f"(?:{x[0]}){x[1]}"
        ),
    ),
    max_leaves=6,
)


@given(PIECES, st.text("ab1\n", max_size=6))
def test_any_pattern_matches_as_in_re(pattern: str, text: str) -> None:
    _, parsed = bounded_regex._compiled(pattern)
    found = len(text) in bounded_regex._Positions(pattern, text).ends(parsed, {0})
    assert found == bool(re.fullmatch(pattern, text))


def test_what_is_no_pattern_is_said() -> None:
    for pattern in ("(", "[z-a]", "a{99999999999}", "(" * 5000 + ")" * 5000, "x" * 20_000):
        with pytest.raises(ConfigError, match="is not a regular expression|has more than"):
            matches("name", f"re:{pattern}")
    with pytest.raises(ConfigError, match="groupref beside repeats"):
        matches("a" * 60, r"re:(a+)+\1b")


def test_what_a_later_python_may_read_otherwise_is_read_without_a_warning() -> None:
    assert full_match("[[a]", "[") and full_match("[a||b]", "|") and not full_match("[[a]", "b")
