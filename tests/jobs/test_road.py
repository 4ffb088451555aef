"""A command opens its folder once, builds its class once, maps its names once, and makes one plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import quark as package
from benchmarks.road import ONCE, Road, returns
from tests.commands.program import quark
from tests.models.torch_zoo import LANGUAGE_MODEL

COMMANDS = {
    "in memory": ["quantize", LANGUAGE_MODEL, "--for", "vllm", "--no-stream", "--samples", "2", "--length", "64"],
    "block by block": ["quantize", LANGUAGE_MODEL, "--scheme", "int8_wo", "--stream"],
    "file to file": ["quantize", LANGUAGE_MODEL, "--scheme", "int8_wo", "--exclude", "*down_proj"],
    "a plan": ["plan", LANGUAGE_MODEL, "--for", "vllm"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_is_asked_for_once(name: str, tmp_path: Path) -> None:
    command, *words = COMMANDS[name]
    road = Road(Path(package.__file__).parent, LANGUAGE_MODEL)
    sys.setprofile(road.enter)
    try:
        done = quark(command, *words, *([] if command == "plan" else ["-o", tmp_path / "out"]))
    finally:
        sys.setprofile(None)
    assert done.code == 0, done.err
    assert {each: road.times[each] for each in ONCE} == dict.fromkeys(ONCE, 1)
    assert (road.depth is None) == (command == "plan")


def test_a_way_is_told_by_its_files() -> None:
    road = Road(Path("/package"), Path("model"))
    road.functions = dict.fromkeys([("a", "f"), ("a", "g"), ("b", "f"), ("a", "h"), ("c", "f"), ("b", "g")])
    assert road.files == ["a", "b", "a", "c", "b"] and returns(road.files) == 2
    road.audit("open", ("model/config.json", "r", 0))
    road.audit("open", ("other/config.json", "r", 0))
    road.audit("open", (3, "r", 0))
    assert road.times["config.json opened"] == 1
