"""Outputs are whole or absent, the leavings of dead runs are removed, and what cannot be written is said at once."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import Any

import onnx_ir as ir
import pytest

from quark.base import files
from quark.base.files import (
    atomic_file,
    atomic_folder,
    check_apart,
    check_file,
    check_folder,
    digest_of,
    move_folder,
    replace_file,
    require_config,
    scratch_folder,
    temporary_folder,
)
from quark.errors import FormatError, OutputError, OutputExistsError, QuarkError
from quark.onnx_ops.saving import save
from tests.models.onnx_zoo import cnn

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="locks and special files of POSIX")
SOURCE = Path(files.__file__).parents[1]


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text(text)
    (folder / "config.json").touch()  # of a model, which may be replaced
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)


# Replacing. ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("before", ["nothing", "empty", "folder", "file", "old"])
def test_a_folder_replaces_what_is_there(before: str, tmp_path: Path) -> None:
    target = tmp_path / ("old" if before == "old" else "out")  # the name of nothing that a run makes
    if before == "file":
        target.write_text("old")
    elif before != "nothing":
        target.mkdir()
    if before in ("folder", "old"):
        write(target, "old")
    with atomic_folder(target, overwrite=True) as folder:
        write(folder, "new")
        assert names(tmp_path) == sorted([folder.parent.name, *([target.name] if before != "nothing" else [])])
    assert (target / "file").read_text() == "new" and names(tmp_path) == [target.name]


@pytest.mark.usefixtures("either_way")
def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out", overwrite=True) as folder:
        write(folder, "new")
        raise ZeroDivisionError
    with pytest.raises(OutputError, match="Could not write .*out: No space"), atomic_folder(tmp_path / "out", True):
        raise OSError(28, "No space left on device")
    with pytest.raises(OutputError), atomic_file(tmp_path / "made" / "on the way" / "file"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2")
def test_two_names_are_exchanged_in_one_step(tmp_path: Path) -> None:
    write(tmp_path / "one", "one"), write(tmp_path / "other", "other")
    assert files._exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "other" and (tmp_path / "other" / "file").read_text() == "one"
    assert not files._exchange(tmp_path / "one", tmp_path / "absent")


def test_a_folder_is_replaced_where_the_system_is_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There ctypes opens no library without a name, and before Python 3.12 no path says whether it is a mount."""

    def refuse(*_: object) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr(files.sys, "platform", "win32")
    monkeypatch.setattr(files.ctypes, "CDLL", refuse)
    monkeypatch.setattr(Path, "is_mount", refuse)
    with atomic_folder(write(tmp_path / "out", "old"), overwrite=True, anything=True) as folder:
        write(folder, "new")
    assert (tmp_path / "out" / "file").read_text() == "new" and names(tmp_path) == ["out"]


def test_an_error_between_two_renames_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    write(tmp_path / "out", "old")
    with pytest.raises(OutputError), atomic_folder(tmp_path / "out", overwrite=True) as folder:
        folder.rmdir()
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_a_folder_of_another_file_system_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def across(self: Path, target: Path) -> Path:
        if self == tmp_path / "work":
            raise OSError(18, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", across)
    move_folder(write(tmp_path / "work", "new"), write(tmp_path / "out", "old"))
    assert (tmp_path / "out" / "file").read_text() == "new" and names(tmp_path) == ["out", "work"]


@POSIX
def test_a_link_to_a_folder_stays_and_a_link_to_a_file_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "disk", "old")
    (tmp_path / "link").symlink_to("disk")
    with atomic_folder(tmp_path / "link", overwrite=True) as folder:
        write(folder, "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "file").read_text() == "new"
    (tmp_path / "link to file").symlink_to("disk/file")
    with atomic_file(tmp_path / "link to file") as file:
        file.write_text("other")
    assert not (tmp_path / "link to file").is_symlink() and (tmp_path / "disk" / "file").read_text() == "new"


def test_a_full_disk_in_a_part_of_an_output_names_its_place(tmp_path: Path) -> None:
    """Not the temporary folder, which is gone when the message is read."""
    place = tmp_path / "whole" / "part"
    with pytest.raises(OutputError, match=f"^{re.escape(f'Could not write {place}: No space left')}"):  # noqa: SIM117
        with atomic_folder(tmp_path / "whole") as folder, atomic_folder(folder / "part"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert not any(tmp_path.iterdir())


def test_a_folder_without_a_model_is_never_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    with pytest.raises(OutputExistsError, match="home is a folder that holds no model, but 'letters'"):
        check_folder(home, overwrite=True)
    with pytest.raises(OutputExistsError), atomic_folder(home, overwrite=True):
        pass
    for name in ("model.gguf", "config.json", "model_index.json", "modules.json"):
        (home / name).touch()
        assert check_folder(home, overwrite=True) == home
        (home / name).unlink()


@POSIX
def test_an_output_is_never_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, blobs, file = tmp_path / "a" / "model", tmp_path / "blobs", tmp_path / "data.npz"
    for folder in (source, blobs):
        folder.mkdir(parents=True)
    (blobs / "1").touch(), (source / "config.json").symlink_to(blobs / "1"), file.touch()
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    for output, what in {
        source: "is", "a/../a/./model": "is", "link": "is", "a": "holds", "blobs": "holds", tmp_path: "holds",
        "link/new": "lies in", source / "out": "lies in",
    }.items():  # fmt: skip
        with pytest.raises(OutputExistsError, match=rf"{output} {what} .*model.*, which is read\. Choose"):
            check_apart(output, source, whole=True)
    (tmp_path / "other.npz").symlink_to(file)
    for name in ("data.npz", "other.npz"):
        with pytest.raises(OutputExistsError, match=f"{name} is data.npz itself"):
            check_apart(name, None, "data.npz")
    with pytest.raises(OutputExistsError):
        check_apart("new", "./new")
    check_apart("new", "data.npz", None, source), check_apart("a/model2", source, whole=True)
    check_apart("a/model/new", source)


@pytest.mark.parametrize("length", [241, 255])
def test_names_as_long_as_the_system_takes(length: int, tmp_path: Path) -> None:
    with atomic_file(tmp_path / ("f" * length)) as file:
        file.write_text("")
    for _ in range(2):
        with atomic_folder(tmp_path / ("d" * length), overwrite=True) as folder:
            write(folder, "")
    assert names(tmp_path) == ["d" * length, "f" * length]


# What a dead run left. -----------------------------------------------------------------------------------------------


CHILD = """
import os, signal, sys
from pathlib import Path
from quark.base import files
files._exchange = lambda one, other: False
def stop(*args):
    if sys.argv[2] == "alive":
        print("ready", flush=True)
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "between":
    rename = Path.rename
    Path.rename = lambda self, target: stop() if "new" in str(self.parent) or self.parent.suffix == ".tmp" else rename(
        self, target)
with files.atomic_folder(Path(sys.argv[1]), overwrite=True) as folder:
    (folder / "file").write_text("new")
    if sys.argv[2] != "between":
        stop()
"""


def child(target: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(target), how]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def living(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that is busy with a folder."""
    with child(tmp_path / "living", "alive") as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@POSIX
@pytest.mark.slow
def test_what_a_dead_run_left_is_removed_and_nothing_of_a_living_one(
    living: subprocess.Popen[str], tmp_path: Path
) -> None:
    (kept,) = names(tmp_path)
    write(tmp_path / "out", "old")
    child(tmp_path / "out", "killed").communicate()
    (dead,) = set(names(tmp_path)) - {"out", kept}
    (tmp_path / ".quark-mine.tmp").mkdir()
    with atomic_file(tmp_path / "other") as file:
        file.write_text("")
        assert (tmp_path / kept / "living" / "file").read_text() == "new" and not (tmp_path / dead).exists()
    assert names(tmp_path) == sorted([kept, ".quark-mine.tmp", "other", "out"])
    living.communicate()
    with atomic_file(tmp_path / "other") as file:
        file.write_text("")
    assert names(tmp_path) == [".quark-mine.tmp", "other", "out"]


def test_what_an_output_no_longer_reads_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "out.data").write_text("old")
    with temporary_folder(tmp_path / "out") as temporary:
        (temporary / "out").write_text("new")
        replace_file(temporary / "out", tmp_path / "out", {tmp_path / "out.data"})
    assert names(tmp_path) == ["out"]


@POSIX
@pytest.mark.parametrize("state", ["replaced", "not replaced yet", "another file of the name"])
def test_a_kill_before_that_is_made_up_for(state: str, tmp_path: Path) -> None:
    stale, dead = tmp_path / "out.data", tmp_path / ".quark-00000000.tmp"
    stale.write_text("old")
    (dead / files.GONE).mkdir(parents=True)
    os.link(stale, dead / files.GONE / stale.name)
    if state == "not replaced yet":
        (dead / "out").touch()
    if state == "another file of the name":
        stale.unlink()
        stale.write_text("mine")
    with files.scratch_folder(tmp_path):
        assert not dead.exists() and stale.exists() == (state != "replaced")


@POSIX
@pytest.mark.slow
def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    child(tmp_path / "out", "between").communicate()
    assert not (tmp_path / "out").exists()
    with atomic_file(tmp_path / "other") as file:
        file.write_text("")
    assert names(tmp_path) == ["other", "out"] and (tmp_path / "out" / "file").read_text() == "old"


@POSIX
def test_a_folder_that_was_taken_for_dead_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may find it before its lock is held."""
    hold, found = files.hold, []

    def meanwhile(folder: Path) -> int | None:
        found.append(folder)
        if len(found) == 1:
            raise BlockingIOError
        if len(found) == 2:
            shutil.rmtree(folder)
        lock = hold(folder)
        if len(found) == 3:
            shutil.rmtree(folder)
        return lock

    monkeypatch.setattr(files, "hold", meanwhile)
    with temporary_folder(tmp_path / "out") as folder:
        assert folder.is_dir() and found.index(folder) == 3


@POSIX
def test_samples_and_activations_of_a_dead_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".quark-01234567.tmp").mkdir()
    with scratch_folder(tmp_path) as folder:
        assert names(tmp_path) == [folder.name] and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_listed_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with atomic_file(tmp_path / "out") as file:
        file.write_text("")
    assert (tmp_path / "out").exists()


@POSIX
def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".quark-01234567.tmp").mkdir()
    for missing in (True, False):
        if missing:
            monkeypatch.setattr(files, "fcntl", None)
        else:
            monkeypatch.undo()
        with atomic_file(tmp_path / "out") as file:
            file.write_text("")
        assert names(tmp_path) == [*([".quark-01234567.tmp"] if missing else []), "out"]


# What may be written. ------------------------------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (_fifo, "is a pipe, which is never replaced"),
    "socket": (_socket, "is a socket, which is never replaced"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which does not exist"),
    "link to a device": (lambda path: path.symlink_to("/dev/null"), "is a device"),
}


@POSIX
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_file_and_no_folder_stays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = REFUSED[kind]
    make(tmp_path / "out")
    mode = (tmp_path / "out").lstat().st_mode
    for check in (check_file, check_folder):
        with pytest.raises(OutputError, match=message):
            check("out", overwrite=True)
    with pytest.raises(OutputError, match=message), atomic_file("out"):
        raise AssertionError
    assert (tmp_path / "out").lstat().st_mode == mode


def test_outputs_that_cannot_be_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "full", "")
    monkeypatch.chdir(tmp_path / "full")
    refused: dict[str, tuple[Callable[..., Path], object, bool]] = {
        "file is not a folder": (check_file, tmp_path / "file" / "x", True),
        "has more than": (check_file, tmp_path / "absent" / ("x" * 256), True),
        "File name too long": (check_folder, tmp_path / ("x" * 256), True),
        "is no path of an output": (check_file, "", True),
        r"'a\\x00b' is no path": (check_file, "a\0b", True),
        "is a folder, and the output is a file": (check_file, tmp_path / "full", True),
        "full exists already": (check_folder, tmp_path / "full" / ".." / "full", False),
        "file exists already": (check_file, tmp_path / "file", False),
        "folder that this program runs in": (check_folder, "..", True),
        "is a mount point": (check_folder, "/", True),
    }
    monkeypatch.setattr(Path, "is_mount", lambda self: self == Path("/"))
    for message, (check, path, overwrite) in refused.items():
        if "exists already" in message:
            monkeypatch.chdir(tmp_path)
        with pytest.raises(QuarkError, match=message):
            check(path, overwrite)
    assert check_folder(tmp_path / "new" / "er", overwrite=False) == tmp_path / "new" / "er"
    assert names(tmp_path) == ["file", "full"]


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root, as whom tests may run, can write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputError, match="is read-only, for this user or at all"):
        check_file(tmp_path / "new" / "file", overwrite=False)
    with pytest.raises(OutputExistsError):
        check_folder(write(tmp_path / "out", ""), overwrite=False)


def test_a_folder_that_is_nearly_a_model_says_what_to_do(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--tiny"
    snapshot = cache / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    with pytest.raises(FormatError, match=r"no config\.json\.$"):
        require_config(cache)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(FormatError, match=rf"Possible: {re.escape(str(snapshot))}\.$"):
        require_config(cache)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"It is an adapter: `quark quantize` takes it"):
        require_config(tmp_path)
    encoder, lora = tmp_path / "encoder", tmp_path / "lora"
    for folder, name in ((encoder, "modules.json"), (encoder / "0_Transformer", "config.json"),
                         (lora, "pytorch_lora_weights.safetensors")):  # fmt: skip
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("[]")
    with pytest.raises(FormatError, match=r"It is a list of modules .* other commands take its model: .*0_Transformer"):
        require_config(encoder)
    with pytest.raises(FormatError, match=r"It is a LoRA of diffusers.* fuse_lora"):
        require_config(lora)


def test_a_folder_that_takes_no_file_is_found_at_once() -> None:
    """root may write everywhere, and no one into /proc."""
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc")
    for check in (check_file, check_folder):
        with pytest.raises(OutputError, match=r"/proc (takes no file|is read-only)"):
            check("/proc/model.onnx", False)


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and renamed from now on, in order, by name."""
    events: list[str] = []
    flush, rename, replace = os.fsync, Path.rename, Path.replace

    def note_fsync(descriptor: int) -> None:
        events.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        flush(descriptor)

    def note(call: Any) -> Any:
        def noted(self: Path, target: Path) -> Path:
            events.append(f"rename {self.name}")
            moved: Path = call(self, target)
            return moved

        return noted

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note(rename))
    monkeypatch.setattr(Path, "replace", note(replace))
    return events


@pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors")
def test_what_is_renamed_is_on_the_disk_before_and_its_name_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves the old output or the new one: files, then the names in their folders, then the name."""
    events, here = synced(monkeypatch), tmp_path.name
    with atomic_file(tmp_path / "file") as file:
        file.write_text("new")
    assert events == ["flush file", "rename file", f"flush {here}"]
    events.clear()
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("new")
    assert set(events[:3]) == {"flush weights", "flush inner", "flush folder"}
    assert events[3:] == ["rename folder", f"flush {here}"]
    events.clear()
    save(ir.serde.deserialize_model(cnn()), tmp_path / "m.onnx", external_data=True)
    renamed = [index for index, event in enumerate(events) if event.startswith("rename m.")][-2:]
    assert [events[index].split()[1] for index in renamed] == ["m.onnx.data", "m.onnx"]
    for index in renamed:
        assert events[index - 1] == events[index].replace("rename", "flush")
    assert events[-1] == f"flush {here}"


@pytest.mark.parametrize("size", [0, 1, mmap.ALLOCATIONGRANULARITY, 3 * mmap.ALLOCATIONGRANULARITY + 5])
def test_a_digest_is_of_all_bytes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", mmap.ALLOCATIONGRANULARITY)
    file, content = tmp_path / "weights", os.urandom(size)
    file.write_bytes(content)
    assert digest_of(file) == hashlib.sha256(content).hexdigest()


def test_a_digest_that_nobody_needs_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", mmap.ALLOCATIONGRANULARITY)
    (tmp_path / "weights").write_bytes(bytes(2 * mmap.ALLOCATIONGRANULARITY))
    ended = Event()
    ended.set()
    with pytest.raises(CancelledError):
        digest_of(tmp_path / "weights", ended)


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_what_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    for place, write in ((tmp_path / "a.bin", False), (tmp_path / "folder", True)):
        for mode in (0o640, 0o600):
            with (atomic_folder if write else atomic_file)(place, True) as new:
                (new / "config.json" if write else new).write_text("{}")
            inner = place / "config.json" if write else place
            inner.chmod(mode)
            place.chmod(mode | 0o110 * write)
            with (atomic_folder if write else atomic_file)(place, True) as new:
                (new / "config.json" if write else new).write_text("[]")
            assert stat.S_IMODE(inner.stat().st_mode) == mode and inner.read_text() == "[]"
            assert stat.S_IMODE(place.stat().st_mode) == mode | 0o110 * write


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_signal_while_a_temporary_folder_is_removed_leaves_none(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def interrupted(folder: Path, **options: Any) -> None:
        removed.append(folder)
        if late or len(removed) > 1:
            real(folder, **options)
        if len(removed) == 1:
            raise KeyboardInterrupt

    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), files.atomic_file(tmp_path / "a") as file:
        file.write_text("new")
    assert not [path for path in tmp_path.iterdir() if files.is_temporary(path)] and len(removed) == 2
