"""Loops say how far they are: lines, bars, lines of JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quark.base.progress import (
    OUTPUT_ERROR,
    bars,
    check_log,
    log_to,
    notebook_bars,
    progress,
    report,
    seconds_and_peak,
    seconds_text,
    status,
)
from quark.base.progress import events as events_file
from quark.base.progress.bar_display import _Bars
from quark.errors import OutputError, OutputExistsError


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(seconds_and_peak, "seconds_now", clock)
    monkeypatch.setattr(seconds_and_peak, "peak_mb", lambda: 1234.5)
    return clock


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_block(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for name in progress(["b.1", "b.2"], "blocks", 3, name=str, done=1):
        clock.now += 90
        report(f"{name}.q", 0.5, 0.1, "loss")
        report(f"{name}.k", 0.3, 0.2, "loss")
    assert capsys.readouterr().err.splitlines() == [
        "[QUARK-INFO]: blocks 2/3, b.1: loss 0.4 -> 0.15 (mean of 2), 90 s, peak 1.23 GB, about 90 s left.",
        "[QUARK-INFO]: blocks 3/3, b.2: loss 0.4 -> 0.15 (mean of 2), 90 s, peak 1.23 GB.",
    ]


def test_the_time_left_goes_by_the_sizes_of_the_steps(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress([1, 3, 6], "blocks", 3, name=str, size=float):
        clock.now += 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("about ")[2] for line in lines] == ["18 s left.", "6.0 s left.", ""]


def test_short_steps_without_errors_speak_seldom(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress([f"conv{index}" for index in range(100)], "layers", 100, name=str):
        clock.now += 0.25
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" layers 40/100, conv39", " layers 80/100, conv79"]


def test_steps_without_names_speak_seldom(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress(range(100), "samples", 100):
        clock.now += 0.25
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[QUARK-INFO]: samples 40/100, about 15 s left.",
        "[QUARK-INFO]: samples 80/100, about 5.0 s left.",
    ]


def test_a_long_step_is_heard_of(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress(["conv"], "layers", 1, name=str):
        for loss in range(12):
            clock.now += 1
            status(f"loss {loss}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[QUARK-INFO]: layers 0/1, loss 9." and len(lines) == 2


def test_a_status_that_takes_time_is_made_when_it_is_said(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def run() -> None:
        for step in progress(range(100), "steps", 100):
            clock.now += 0.25
            status(lambda step=step: made.append(step) or f"loss {step}")  # type: ignore[misc]

    run()
    assert made == [39, 79]  # as lines of the log
    made.clear()
    monkeypatch.setattr(sys, "stderr", Terminal())
    with bars():
        run()
    assert made == [*range(0, 100, 4)]  # once in a second


def test_errors_reach_the_loop_with_names(clock: Clock, tmp_path: Path) -> None:
    with log_to(tmp_path / "log"):
        for name in progress(["a", "b"], "blocks", 2, name=str):
            for _ in progress(range(3), "steps", 3):
                clock.now += 1
            report(name, 2.0, float("nan"), "loss")
    begin, first, second, end, done = events(tmp_path / "log")
    assert (begin["event"], end["event"], done["event"]) == ("begin", "end", "done")
    assert [row["layer"] for row in first["layers"] + second["layers"]] == ["a", "b"]
    assert first["error_before"] == 2.0 and first["error_after"] is None, "NaN is no JSON"
    assert (first["seconds"], first["eta_s"], first["peak_mb"]) == (3.0, 3.0, 1234.5)
    assert (second["index"], second["total"], second["eta_s"]) == (2, 2, 0.0)


def test_the_log_says_how_it_ended(tmp_path: Path) -> None:
    with log_to(tmp_path / "log"):
        pass
    with pytest.raises(ValueError, match="two"), log_to(tmp_path / "log"):
        raise ValueError("one\ntwo")
    assert [(e["event"], e.get("error")) for e in events(tmp_path / "log")] == [("done", None), ("failed", "one two")]


def test_events_are_there_at_once(tmp_path: Path) -> None:
    with log_to(tmp_path / "log"):
        steps: Iterator[str] = progress(["a", "b"], "blocks", 2, name=str)
        next(steps), next(steps)
        assert [event["event"] for event in events(tmp_path / "log")] == ["begin", "block"]


def test_a_log_goes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\x00\xff\x00")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / "fifo")
    for name, error in (
        ("weights", OutputExistsError), ("config.json", OutputExistsError), ("fifo", OutputError),
        (".", OutputExistsError), ("weights/log", OutputError),
    ):  # fmt: skip
        with pytest.raises(error):
            check_log(tmp_path / name)
    assert (tmp_path / "weights").read_bytes() == b"\x00\xff\x00"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_file, "check_log", lambda path: None)
    with pytest.raises(OutputError, match="No space left"), log_to(Path("/dev/full")):
        list(progress(["a"], "blocks", 1, name=str))


def test_a_loop_that_breaks_off_takes_no_reports(clock: Clock, tmp_path: Path) -> None:
    with log_to(tmp_path / "log"):
        for name in progress(["a", "b"], "blocks", 2, name=str):
            report(name, 1.0, 0.5, "loss")
            with pytest.raises(ZeroDivisionError) as kept:
                for layer in progress(["a.q"], "layers", 1, name=str):
                    raise ZeroDivisionError(layer)
            assert kept.value
    blocks = [event for event in events(tmp_path / "log") if event["event"] == "block"]
    assert [[row["layer"] for row in event["layers"]] for event in blocks] == [["a"], ["b"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow  # rich is loaded
def test_a_terminal_has_bars_in_a_program_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        for name in progress(["a", "b"], "blocks", 2, name=str):
            list(progress(range(3), "steps", 3))
            report(name, 0.5, 0.25, "loss")
            logging.getLogger("quark").warning("seen %s", name)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run()
    assert "\x1b" not in terminal.getvalue(), "a library logs lines"
    with bars():
        run()
    text = terminal.getvalue()
    assert "\x1b" in text and "2/2" in text and "seen b" in text and "blocks: 2 in" in text
    assert _Bars.display is None


@pytest.mark.slow  # rich is loaded
def test_a_narrow_terminal_leaves_out_the_end_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with bars():
        for _ in progress(["a", "b"], "blocks", 2, name=lambda letter: f"model.layers.{letter * 40}"):
            _Bars.display.refresh()
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    drawn = [line for line in re.split(r"[\r\n]", text) if "1/2" in line]
    assert drawn and all(len(line) <= 60 for line in drawn), drawn
    assert all(re.match(r"blocks \S+ *1/2 about .* left, model[.].*…$", line.rstrip()) for line in drawn), drawn


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.31, "0.31 s"), (4.25, "4.2 s"), (12, "12 s"), (100, "2 min"), (7800, "2 h 10 min")]
)
def test_times_are_said_shortly(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_notebook_has_bars_of_html(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    page = SimpleNamespace(HTML=str, display=lambda html, display_id: handle)
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel, display=page))
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    monkeypatch.setattr(notebook_bars, "_SHOWN_SECONDS", 0.0)
    for name in progress(["a<b", "c"], "blocks", 2, name=str):
        for _ in progress(range(3), "samples"):
            pass
        report(name, 0.2, 0.1, OUTPUT_ERROR)
    assert any("max='2' value='1'" in html and "0/?" in html and "a&lt;b" in html for html in shown)
    assert shown[-1] == "" and "blocks: 2 in" in capsys.readouterr().err
    kernel.config.clear()
    shown.clear()
    list(progress(["a"], "blocks", 1, name=str))
    assert not shown
