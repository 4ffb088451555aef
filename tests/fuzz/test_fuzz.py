"""The harness sees each way in which a promise can be broken; and a slice of the cases, which keep all of them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import ConfigError
from tests.fuzz.bases import Bases
from tests.fuzz.bounds import onnx_bound, rounded_rows
from tests.fuzz.campaign import generator, preload
from tests.fuzz.case import Case, Place, WrongError
from tests.fuzz.child import Limits
from tests.fuzz.kinds import KINDS
from tests.fuzz.program import quark
from tests.fuzz.verdicts import Verdict, snapshot, verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "bases").mkdir()
    return Place(tmp_path / "case", Bases(tmp_path / "bases"))


def judged(place: Place, work: Callable[[], object], seconds: float = 10.0, **options: object) -> Verdict:
    case = Case("", lambda: work() and None, outputs=(place.outputs / "result",), **options)  # type: ignore[arg-type]
    return verdict(case, place, Limits(seconds), lambda: 30.0)


def refuse() -> None:
    raise ConfigError("no")


def fail(error: Exception) -> None:
    raise error


def test_a_refusal_is_clear(place: Place) -> None:
    assert judged(place, refuse) == Verdict("clear", "no")


def test_a_refusal_that_leaves_something_is_wrong(place: Place) -> None:
    def work() -> None:
        (place.outputs / "result").touch()
        refuse()

    found = judged(place, work)
    assert (found.name, "result made" in found.why) == ("wrong", True)


def test_a_refusal_of_several_lines_or_of_a_sound_input_is_no_clear_one(place: Place) -> None:
    assert judged(place, lambda: fail(ConfigError("no\nno"))).name == "foreign"
    assert judged(place, refuse, sound=True).name == "wrong"


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), SystemExit(3), RecursionError()])
def test_other_exceptions_are_foreign(place: Place, error: Exception) -> None:
    found = judged(place, lambda: fail(error))
    assert found.name == "foreign" and type(error).__name__ in found.why


def test_too_long_is_a_hang_and_nothing_of_it_goes_on(place: Place) -> None:
    def work() -> None:
        if os.fork() == 0:
            time.sleep(1)
            (place.outputs / "result").touch()
        time.sleep(60)

    assert judged(place, work, seconds=0.3).name == "hang"
    time.sleep(1)
    assert not (place.outputs / "result").exists()


def test_a_signal_is_a_crash(place: Place) -> None:
    assert judged(place, lambda: os.kill(os.getpid(), signal.SIGKILL)) == Verdict("crash", "signal 9")


def test_memory_is_bounded(place: Place) -> None:
    assert "MemoryError" in judged(place, lambda: bytearray(64 << 30) and None).why
    found = judged(place, lambda: b"x" * (600 << 20))
    assert (found.name, " MB, of an input of 0 MB" in found.why) == ("memory", True), found


def test_a_connection_is_seen_even_where_it_fails(place: Place) -> None:
    def work() -> None:
        with contextlib.suppress(OSError), socket.socket() as opened:
            opened.connect(("127.0.0.1", 9))

    found = judged(place, work)
    assert (found.name, "127.0.0.1" in found.why) == ("connected", True)


@pytest.mark.parametrize(("decibels", "name"), [(20.0, "right"), (19.9, "wrong"), (math.nan, "wrong"), (99.0, "right")])
def test_a_result_may_lie_a_margin_below_the_bound(place: Place, decibels: float, name: str) -> None:
    assert judged(place, lambda: None, judge=lambda: decibels).name == name


def test_a_bound_is_what_the_formula_of_rounding_leaves(tmp_path: Path) -> None:
    """Of one product and a Relu: all three tensors in 8 bits with a step that is a power of two."""
    random = np.random.default_rng(0)
    x, w = random.normal(size=(4, 8)).astype(np.float32), random.normal(size=(8, 3)).astype(np.float32)
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"]), onnx.helper.make_node("Relu", ["y"], ["z"])]
    infos = [onnx.helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 8), ("z", 3))]
    graph = onnx.helper.make_graph(nodes, "g", infos[:1], infos[1:], [onnx.numpy_helper.from_array(w, "w")])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "model.onnx")

    def rounded(array: Any) -> Any:
        step = 2.0 ** np.ceil(np.log2(np.abs(array).max() / 127))
        return np.floor(array / step + 0.5) * step

    z = np.maximum(x @ w, 0)
    noise = rounded(np.maximum(rounded(x @ rounded(w)), 0)) - z
    expected = 10 * np.log10((z**2).sum() / (noise**2).sum())
    assert onnx_bound(tmp_path / "model.onnx", {"x": x}, 4) == pytest.approx(expected, abs=0.01)
    rows = np.abs(rounded_rows(w.T) - w.T).max(axis=1)
    assert (rows <= np.abs(w).max(axis=0) / 254 * (1 + 1e-5)).all() and (rows > np.abs(w).max(axis=0) / 1000).any()


def test_what_the_judge_says_is_wrong(place: Place) -> None:
    assert judged(place, lambda: None, judge=lambda: fail(WrongError("zeros"))) == Verdict("wrong", "zeros")


@pytest.mark.parametrize("change", ["made", "changed", "removed", "run"])
def test_a_file_outside_of_the_output_is_wrong(place: Place, change: str) -> None:
    beside, kept = place.outputs / "beside", place.inputs / "model"
    kept.write_text("a")
    done: dict[str, Callable[[], object]] = {
        "made": beside.touch,
        "changed": lambda: kept.write_text("bc"),
        "removed": kept.unlink,
        "run": place.marker.touch,
    }
    assert judged(place, done[change]).name == "wrong"
    assert judged(place, lambda: (place.outputs / "result").touch()).name == "right"


@pytest.mark.parametrize(
    ("said", "code", "name"),
    [
        ("quark: no", 1, "clear"),
        ("a line of the log\nquark: no", 1, "clear"),
        ("quark: no", 2, "clear"),
        ("quark: no", 3, "foreign"),
        ("quark: no\nand more", 1, "foreign"),
        ("", 1, "foreign"),
        ("Traceback (most recent call last):\nquark: no", 1, "foreign"),
        ("quark: Unexpected TypeError in quark/files.py, line 3", 1, "foreign"),
        ("a line of the log", 0, "right"),
    ],
)
def test_a_command_is_judged_by_its_exit_code_and_its_last_line(
    place: Place, monkeypatch: pytest.MonkeyPatch, said: str, code: int, name: str
) -> None:
    def run(app: object, arguments: object) -> None:
        sys.stderr.write(said)
        sys.exit(code)

    monkeypatch.setattr("quark.base.command_line.run", run)
    assert judged(place, lambda: quark("inspect")).name == name


@pytest.mark.slow
def test_a_case_is_made_from_its_number_alone(tmp_path: Path) -> None:
    bases = Bases(tmp_path / "bases")
    bases.folder.mkdir()
    shown = []
    for turn in ("one", "two"):
        files, said = [], []
        for name in ("onnx", "calibration", "statistics"):
            place = Place(tmp_path / turn / name, bases)
            said.append(KINDS[name](generator(3, name, 5), place).said.replace(turn, ""))
            files += [path.relative_to(tmp_path / turn) for path in snapshot([place.folder])]
        shown.append((sorted(files), said))
    assert shown[0] == shown[1]


class Undamaged(np.random.Generator):
    """Chooses as any other, and never to damage."""

    def random(self, *args: Any, **options: Any) -> Any:
        return 0.0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.slow
def test_what_is_not_damaged_is_right(tmp_path: Path) -> None:
    """Of each kind: of a command that refuses all of its inputs, a campaign would say nothing."""
    bases = Bases(tmp_path / "bases")
    bases.folder.mkdir()
    preload()
    for name, make in KINDS.items():
        place = Place(tmp_path / name, bases)
        case = make(Undamaged(np.random.PCG64(3)), place)
        if case.sound:
            assert verdict(case, place, Limits(60.0), case.bound or (lambda: 0.0)) == Verdict("right"), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.slow
def test_a_slice_keeps_every_promise() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "40", "--seed", "0"]
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
