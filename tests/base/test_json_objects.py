"""Texts of JSON that are refused: each with a ValueError, which readers of files turn into one line."""

from __future__ import annotations

import pytest

from quark.base.json_objects import plain_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": NaN}', "the value NaN"),
    ],
)
def test_what_readers_take_differently_or_cannot_take_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain_json(text)
