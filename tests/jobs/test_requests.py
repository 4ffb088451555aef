"""Requests of Python: wrong words are refused before any work, in the words of the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quark
from quark.errors import ConfigError
from quark.jobs import request_of
from tests.models.torch_zoo import LANGUAGE_MODEL

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"nonsense": 1}, "There is no option 'nonsense'"),
    "too small": ({"samples": 0}, "samples=0 is none: it takes int of 1 or more"),
    "no number": ({"length": "x"}, "length='x' is none: it takes int of 1 or more"),
    "no word": ({"device": 3}, "device=3 is none: it takes str"),
    "twice": ({"calib": "x"}, "calib: said twice"),
    "effort": ({"effort": "bst"}, "effort='bst' is unknown. Did you mean 'best'"),
    "of the other kind": ({"config": "A8W8"}, "config does not apply to .*: it is for an ONNX file"),
    "report": ({"report": "r.html"}, "report: written by the command alone"),
    "recipe": ({"write_recipe": "r.yaml"}, "write_recipe: written by the command alone"),
    "log": ({"log_file": "l.jsonl"}, "log_file: written by the command alone"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_refused_before_any_work(name: str, tmp_path: Path) -> None:
    said, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        quark.quantize(LANGUAGE_MODEL, "int8_wo", output=tmp_path / "out", **said)
    assert not list(tmp_path.iterdir())


def test_one_text_is_one_of_several_and_places_are_paths() -> None:
    request = request_of(LANGUAGE_MODEL, {"exclude": "*.down_proj", "layer": ["*.a=int8"], "imatrix": "x.gguf"})
    assert request.exclude == ("*.down_proj",) and vars(request)["layer"] == ("*.a=int8",)
    assert vars(request)["imatrix"] == Path("x.gguf") and request.said == {"exclude", "layer", "imatrix"}
