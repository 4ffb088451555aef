"""YAML is read as version 1.2 says, and as no reader reads otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from quark.base.yaml_objects import plain_yaml, write_yaml

TEXTS = ("010", "0o10", "1:30", "1e3", "1.5", "no", "yes", "true", "null", "~", "", "2020-01-01", "0x1F", "x: y")
VALUES: dict[str, Any] = {
    "10": 10, "-3": -3, "0o10": 8, "0x1F": 31, "1e3": 1000.0, "1e-5": 1e-5, ".5": 0.5, "true": True, "~": None,
    "": None, "1:30": "1:30", "no": "no", "on": "on", "1_000": "1_000", "2020-01-01": "2020-01-01", "'010'": "010",
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_values_are_those_of_yaml_1_2(text: str) -> None:
    found = plain_yaml(f"key: {text}")["key"]
    assert found == VALUES[text] and type(found) is type(VALUES[text])


@pytest.mark.parametrize("text", ["010", "-012", "&x 1", "*x", "!!float 1:30", "!!python/object:os.system x"])
def test_what_readers_differ_in_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        plain_yaml(f"key: {text}")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_written_so_that_readers_of_both_versions_take_them_for_texts(text: str) -> None:
    written = write_yaml({"key": text, "list": [text]})
    assert plain_yaml(written) == yaml.safe_load(written) == {"key": text, "list": [text]}
