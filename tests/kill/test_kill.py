"""A slice of `make kill`, and that it finds what it looks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.base.files import atomic_file
from tests.kill.cases import Undisturbed, files_of, judge, moments, unsaid
from tests.kill.jobs import JOBS
from tests.kill.server import REFUSED, Disk, End, Moment, fork

ROOT = Path(__file__).parents[2]
FORCE = {job.name: job for job in JOBS}["folder --force"]
GRAPH = {job.name: job for job in JOBS}["ONNX --force"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork and SIGKILL")


@pytest.mark.slow
def test_kills_leave_nothing_behind() -> None:
    """In a process of its own: this one has the threads of whatever was tested before."""
    command = [sys.executable, "-m", "tests.kill", "--count", "8", "--seed", "1", "--job", "ONNX --force"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("kills, 0 wrong\n"), done.stdout + done.stderr


def graph(data: str) -> bytes:
    """An ONNX model whose weights lie in this file."""
    tensor = onnx.numpy_helper.from_array(np.zeros(2, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=data)
    proto: bytes = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    return proto


def test_what_a_kill_must_not_leave_is_found() -> None:
    known = Undisturbed({"out/a": b"1", "out/b": b"1"}, {"out/a": b"2", "out/b": b"2"}, End(0, ".", 1.0))
    for left, state, wrong in (
        (known.before, "old", 0),
        ({**known.after, ".quark-01234567.tmp/x": b""}, "new", 0),
        ({}, "absent", 1),
        ({"out/a": b"2", "out/b": b"1"}, "broken", 1),
        ({"out/a": b"2"}, "broken", 1),
    ):
        found, lines = judge(FORCE, left, known)
        assert (found, len(lines)) == (state, wrong), lines
    known = Undisturbed({"out.onnx": graph("d"), "d": b"1"}, {"out.onnx": graph("e"), "e": b"2"}, End(0, ".", 1.0))
    assert judge(GRAPH, {**known.before, "e": b"2"}, known) == ("old", [])
    assert judge(GRAPH, {"out.onnx": graph("d"), "d": b"2"}, known)[0] == "broken"


def test_what_a_command_does_not_say_is_found() -> None:
    known = Undisturbed({"out/a": b"1"}, {"out/a": b"2"}, End(0, ".", 1.0))
    line = "quark: Interrupted.\n"
    for code, left, said, wrong in (
        (143, ["out/a"], line, 0),
        (143, ["out/a", "out.partial/b"], f"1 block is kept in /x/out.partial.\n{line}", 0),
        (143, ["out/a", "out.partial/b"], line, 1),
        (143, ["out/a", ".quark-01234567.tmp/x"], line, 1),
        (143, ["out/a"], "", 1),
        (1, ["out/a"], "quark: Unexpected OSError in quark/base/files.py\n", 1),
        (-15, ["out/a"], "", 0),
        (-15, ["out/a", "tmp3"], "", 1),
    ):
        assert len(unsaid(FORCE, code, left, known, said)) == wrong, (code, left, said)


def test_a_disk_that_fills_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    disk.folder.mkdir()
    disk.make(4096)

    def write() -> None:
        disk.limit(4096)
        with atomic_file(disk.folder / "a") as file:
            file.write_bytes(bytes(1 << 16))

    try:
        assert fork(write, disk.folder, Moment(), tmp_path / "log").code == REFUSED
        assert not list(disk.folder.iterdir())
    finally:
        disk.clear()


def test_children_are_killed_before_the_event_that_is_named(tmp_path: Path) -> None:
    """Of a folder made, a file written, renamed and removed; what is read, or lies elsewhere, is no event."""
    (tmp_path / "case").mkdir()

    def write() -> None:
        folder = tmp_path / "case" / "folder"
        (tmp_path / "elsewhere").write_text("")
        folder.mkdir()
        (folder / "file").write_text("text")
        assert (folder / "file").read_text() == "text"
        (folder / "file").rename(folder / "other")
        (folder / "other").unlink()
        folder.rmdir()

    def left(event: int | None) -> list[str]:
        end = fork(write, tmp_path / "case", Moment(event=event), tmp_path / "log")
        assert (end.code, end.events) == ((0, 5) if event is None else (-9, event - 1))
        names = sorted(path.name for path in (tmp_path / "case").rglob("*"))
        for path in sorted((tmp_path / "case").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return names

    file, other = ["file", "folder"], ["folder", "other"]
    assert [left(event) for event in (None, 1, 2, 3, 4, 5)] == [[], [], ["folder"], file, other, ["folder"]]


def test_every_event_has_its_turn() -> None:
    known = {"one": Undisturbed({}, {}, End(0, "...", 1.0)), "two": Undisturbed({}, {}, End(0, ".", 2.0))}
    found = list(moments(known, 13, 0))
    assert len(found) == 13 and found == list(moments(known, 13, 0)) != list(moments(known, 13, 1))
    assert sorted(m.event for name, m in found if name == "one" and m.event) == [1, 2, 3]
    assert all(m.seconds is None or 0 <= m.seconds <= 2.1 for _, m in found)
    assert {m.signal.name for _, m in found if m.room is None} == {"SIGTERM", "SIGKILL", "SIGHUP", "SIGINT"}
    assert sum(m.room is not None for _, m in found) == 2


def test_events_around_a_rename_are_tried_whatever_the_count_is() -> None:
    known = {"one": Undisturbed({}, {}, End(0, ".....R....R", 1.0))}
    assert [moment.event for _, moment in moments(known, 0, 0)] == [5, 6, 7, 8, 10, 11]


def test_an_old_folder_that_is_removed_before_the_rename_is_always_found(tmp_path: Path) -> None:
    """A break that moments by chance found in four runs of five."""
    case, job = tmp_path / "case", FORCE

    def old() -> None:
        shutil.rmtree(case, ignore_errors=True)
        (case / "out").mkdir(parents=True)
        for name in "abcdefgh":
            (case / "out" / name).write_text("old")

    def run() -> None:
        (case / "new").mkdir()
        for name in "abcdefgh":
            (case / "new" / name).write_text("new")
        shutil.rmtree(case / "out")
        (case / "new").rename(case / "out")

    old()
    before = files_of(case)
    end = fork(run, case, Moment(), tmp_path / "log")
    known = Undisturbed(before, files_of(case), end)
    wrong = []
    for _, moment in moments({"job": known}, 0, 0):
        old()
        fork(run, case, moment, tmp_path / "log")
        wrong += judge(job, files_of(case), known)[1]
    assert "out was there before, and is gone" in wrong
