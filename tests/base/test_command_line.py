"""How a program ends: one line whatever goes wrong, and the work is never lost to a stream that cannot be written."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import pytest
import typer
from rich.console import Console

import quark
from quark.base import command_line
from quark.base.command_line import new_table, program, results, run
from quark.base.log import UnfailingStream, logger
from quark.base.progress import progress
from quark.errors import ConfigError

SOURCE = Path(quark.__file__).parents[1]


def ended(function: Callable[..., None], *words: str) -> int:
    """The exit code of a program of this function."""
    try:
        run(program(function), "tool", words)
    except SystemExit as end:
        assert isinstance(end.code, int) and end.code
        return end.code
    return 0


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> NoReturn:
        """Fail."""
        raise error

    return fail


def deep() -> None:
    """Go too deep."""
    deep()


def wrapping() -> None:
    """Raise another error for Ctrl-C, as libraries do."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise RuntimeError("a callback failed") from error


FAILURES: dict[str, tuple[Callable[[], None], int, str]] = {
    "interrupt within a library": (wrapping, 130, r"Interrupted\."),
    "own": (raising(ConfigError("No such\nscheme.")), 1, "No such scheme."),
    "foreign": (
        raising(TypeError("bad\nthing.")),
        1,
        r"Unexpected TypeError in quark/base/command_line.py, line \d+: bad",
    ),
    "pipe of a worker": (raising(BrokenPipeError(32, "Broken pipe")), 1, "Unexpected BrokenPipeError in .*: .*Broken"),
    "end of a file": (raising(EOFError()), 1, "Unexpected EOFError"),
    "a path that is none": (
        lambda: Path("x" * 400).is_file() and None,
        1,
        "x{60} ... is no path of this system: File name too long.",
    ),
    "depth": (deep, 1, "Unexpected RecursionError in .*: maximum recursion depth"),
    "memory": (raising(MemoryError()), 1, r"Out of memory in quark/base/command_line.py, line \d+\."),
    "memory of numpy": (raising(MemoryError("Unable to allocate 1 GiB")), 1, "Out of memory in .*: Unable to allocate"),
    "a package that is absent": (
        raising(ModuleNotFoundError("No module named 'onnxslim'", name="onnxslim")),
        1,
        r"This needs the package onnxslim, which is not installed: pip install 'openquark\[slim\]'\.",
    ),
    "interrupt": (raising(KeyboardInterrupt()), 130, "Interrupted."),
}


@pytest.mark.parametrize("how", ["plain", "flag", "variable"])
@pytest.mark.parametrize("kind", FAILURES)
def test_every_failure_is_one_line(
    kind: str, how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, code, message = FAILURES[kind]
    monkeypatch.setenv("QUARK_DEBUG", "1" if how == "variable" else "0")
    monkeypatch.delitem(sys.modules, "onnxslim", raising=False)  # as where it is absent, whatever ran before
    assert ended(function, *(["--debug"] if how == "flag" else [])) == code
    shown = capsys.readouterr()
    *before, line = shown.err.splitlines()
    assert re.match(f"tool: {message}", line) and shown.out == ""
    assert bool(before) == (how != "plain") and ("Traceback" in shown.err) == (how != "plain")
    if "Unexpected" in line:
        assert line.endswith(
            "Run again with --debug for the traceback, and please report it." if how == "plain" else "Please report it."
        )


@pytest.mark.parametrize("module", ["typer", "quark.commands"])
def test_an_interrupt_while_modules_are_read_is_one_line(module: str) -> None:
    """Before the program runs: the finder of modules is where Ctrl-C falls."""
    code = f"""
import runpy, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
runpy.run_module("quark", run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "quark: Interrupted.\n")


def test_the_help_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(deep, "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: tool" in shown and "--debug" in shown and "QUARK_DEBUG=1" in shown


def test_names_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> None:
        """Print."""
        results().print("a[/b]:smile:[bold].onnx", highlight=False)

    assert ended(show) == 0 and capsys.readouterr().out == "a[/b]:smile:[bold].onnx\n"
    assert ended(raising(ConfigError("[/b]:smile:"))) == 1 and "[/b]:smile:" in capsys.readouterr().err


# Streams that cannot be written. --------------------------------------------------------------------------------------


def work(file: Annotated[Path, typer.Argument()]) -> None:
    """Log, write a file, print a table."""
    from rich.table import Table

    logger.info("begins: ü")
    file.write_text("done")
    table = Table("name")
    table.add_row("ü")
    results().print(table)


def job(file: Path, redirections: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same as a process, with its streams redirected by a shell."""
    code = "from tests.base.test_command_line import *; run(program(work), 'tool')"
    paths = {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(Path(__file__).parents[2])])}
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "{code}" "$1" {redirections}', sys.executable, str(file)],
        env={**os.environ, **paths, **environment}, capture_output=True, text=True, check=False, errors="replace",
    )  # fmt: skip


FULL = "tool: All is done, but the results could not be printed: No space left on device.\n"
STREAMS = {
    "> /dev/full": (1, "[QUARK-INFO]: begins: ü\n" + FULL),
    "2> /dev/full": (0, ""),
    "> /dev/full 2> /dev/full": (1, ""),
    ">&-": (0, "[QUARK-INFO]: begins: ü\n"),
    ">&- 2>&-": (0, ""),
    "| true; exit ${PIPESTATUS[0]}": (0, "[QUARK-INFO]: begins: ü\n"),
    "2>&1 | true; exit ${PIPESTATUS[0]}": (0, ""),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("redirections", STREAMS)
def test_work_is_not_lost_to_a_stream(redirections: str, tmp_path: Path) -> None:
    code, said = STREAMS[redirections]
    done = job(tmp_path / "file", redirections, PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (code, said)
    assert (tmp_path / "file").read_text() == "done"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="locales of POSIX")
@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", r"| \xfc    |"), ("latin-1", "| \ufffd    |"), ("utf-8", "│ ü    │")]
)
def test_narrow_encodings(encoding: str, shown: str, tmp_path: Path) -> None:
    done = job(tmp_path / "file", "", LC_ALL="C", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and shown in done.stdout and "Traceback" not in done.stderr


class Broken(io.StringIO):
    """Fails, as a terminal does that is gone."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stream", [Broken(), None])
def test_log_and_bars_never_raise(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    logger.warning("lost")
    assert list(progress(range(3), "bar", 3)) == [0, 1, 2]


def test_the_log_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger.warning("said")
    assert capsys.readouterr() == ("", "[QUARK-WARNING]: said\n")


def test_a_stream_that_failed_is_left_alone() -> None:
    closed = io.StringIO()
    closed.close()
    for within in (Broken(), closed):
        stream = UnfailingStream(within)
        assert stream.write("abc") == 3 and isinstance(stream.error, (OSError, ValueError))
        stream.flush()
    assert not UnfailingStream(closed).isatty() and not UnfailingStream(None).isatty()
    assert UnfailingStream(None).write("abc") == 3


def test_closed_descriptors_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next file that is opened is where C libraries print."""
    opened = []

    class System:
        devnull, O_RDWR = os.devnull, os.O_RDWR

        @staticmethod
        def fstat(descriptor: int) -> None:
            if descriptor == 1:
                raise OSError

        @staticmethod
        def open(path: str, flags: int) -> None:
            opened.append(path)

    monkeypatch.setattr(command_line, "os", System)
    command_line._open_descriptors()
    assert opened == [os.devnull]


def test_no_cell_of_a_table_is_cut() -> None:
    """Names of nodes differ at their ends."""
    name, printed = "/model.22/" + "x" * 60 + "/Mul_55", io.StringIO()
    table = new_table("node", "op", title="Layers")
    table.add_row(name, "Mul")
    Console(file=printed, width=40).print(table)
    assert "…" not in printed.getvalue() and printed.getvalue().replace("│", "").count("x") == 60


@pytest.mark.parametrize(("words", "asked"), [([], "error"), (["--verbose"], None)])
def test_other_libraries_are_silent_unless_more_is_asked_for(
    words: list[str], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read it while they are imported, which the command does; what the user has set stays."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "info")
    seen: list[str | None] = []

    def work() -> None:
        seen.extend(os.environ.get(name) for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"))

    run(program(work), "tool", words)
    assert seen == [asked, "info"] and "TRANSFORMERS_VERBOSITY" not in os.environ


HOSTILE = "\x1b[2J\x1b[Hdone\x9b31m\u202e\x07"


def test_control_characters_of_names_are_shown_as_escapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In results, errors, logs, JSON, events, notebooks and pages: nothing that a terminal acts on."""
    from quark.base.command_line import Results, new_table, results
    from quark.base.log import logger
    from quark.errors import one_line
    from quark.report.page import PageTable, Section, render
    from quark.report.shown import text_table

    table = new_table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    for item in (HOSTILE, table, text_table(PageTable(("a",), [(HOSTILE,)]))):
        results().print(item)
    logger.warning("%s", HOSTILE)
    printed = capsys.readouterr()
    page = render(HOSTILE, [Section("s", HOSTILE, [PageTable(("a",), [(HOSTILE,)])])])
    for text in (printed.out, printed.err, one_line(HOSTILE), page):
        assert "\\u001b[2J" in text and "\\u009b" in text and "\\u202e" in text, text
        assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)
    monkeypatch.setattr(Results, "collected", {"tables": [], "lines": []})
    results().print(HOSTILE)
    assert Results.collected == {"tables": [], "lines": [HOSTILE]}  # of which JSON writes escapes


WAITS = """
import signal, sys, time
from pathlib import Path
import typer
from quark.base.command_line import run
from quark.base.files import scratch_folder

app = typer.Typer()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it


@app.command()
def wait() -> None:
    with scratch_folder(Path(sys.argv[1])):
        print("ready", flush=True)
        time.sleep(60)


run(app, "quark", [])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_program_as_ctrl_c_does(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        assert len([*tmp_path.iterdir()]) == 1
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (128 + number, "quark: Interrupted.\n")
    assert not [*tmp_path.iterdir()]
