"""Texts of JSON that are refused: each with a ValueError, which readers of files turn into one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import quark
from quark.base.json_objects import plain_json
from quark.errors import FormatError
from quark.onnx.calibration.statistics import read_ranges
from quark.onnx.search.history import History
from quark.onnx.search.mixed_precision.candidates import Cache
from quark.torch import load_params
from quark.torch.bit_budget.sensitivity import SensitivityTable
from quark.torch.config.named_algorithms import load_quant_algo_config_from_file

SOURCES = Path(quark.__file__).parent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": NaN}', "the value NaN"),
        ('{"a": -1' + "0" * 400 + "}", "a number of 402 digits"),
    ],
)
def test_what_readers_take_differently_or_cannot_take_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain_json(text)


READERS: dict[str, Callable[[Path], object]] = {
    "trials": lambda file: History(file, resume=True),
    "sensitivities": lambda file: Cache(str(file), "key"),
    "an algorithm": load_quant_algo_config_from_file,
    "save_params": lambda file: load_params(nn.Linear(1, 1), json_path=file, safetensors_path=file),
    "a table of a budget": SensitivityTable.load,
    "ranges": read_ranges,
}
"""Files of JSON that a user gives, or an earlier run left."""


@pytest.mark.parametrize("name", READERS)
def test_files_that_are_nested_too_deep_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="deep.json"):
        READERS[name](file)


def test_files_of_users_have_no_other_reader() -> None:
    """But those of what a run has put down itself, and of what other libraries measure."""
    call = re.compile(r"json\.loads\([^\n]*read_text")
    found = {path.name for path in SOURCES.rglob("*.py") if call.search(path.read_text(encoding="utf-8"))}
    assert found == {"model_card.py", "resume.py", "pass_store.py", "kernels.py"}
