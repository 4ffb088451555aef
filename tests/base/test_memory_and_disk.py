"""What is free, and errors where it is certainly too little."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from pathlib import Path

import pytest

from quark.base import memory_and_disk
from quark.base.memory_and_disk import (
    available_memory,
    check_disk,
    check_memory,
    free_disk,
    give_back_memory,
    memory_in_use,
)
from quark.errors import OutputError, TooLittleMemoryError

MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    4000 kB\nSwapFree:  1000 kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 5000 kB free, whose limits are files in a folder."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(memory_and_disk, "PROC", tmp_path)
    monkeypatch.setattr(memory_and_disk, "CGROUPS", tmp_path)
    return tmp_path


def test_memory_is_what_is_available_and_swap(machine: Path) -> None:
    assert available_memory() == 5000 * 1024
    (machine / "meminfo").write_text("MemTotal: 9000 kB\n")
    assert available_memory() is None


def test_memory_in_use_grows_by_what_is_made(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_in_use() == 0  # a machine that does not say it
    monkeypatch.setattr(memory_and_disk, "PROC", Path("/proc"))
    before = memory_in_use()
    made = bytearray(os.urandom(1 << 26))
    assert before + len(made) <= memory_in_use() + (1 << 22)


@pytest.mark.parametrize(
    ("group", "file"), [("0::/job", "job/memory.max"), ("4:memory:/job", "memory/job/memory.limit_in_bytes")]
)
def test_a_container_has_less(machine: Path, group: str, file: str) -> None:
    (machine / "self" / "cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    (machine / file).parent.mkdir(parents=True)
    for limit, expected in (("1000000", 1000000), ("max", 5000 * 1024)):
        (machine / file).write_text(f"{limit}\n")
        assert available_memory() == expected


def test_too_little_memory_is_an_error_before_the_work(machine: Path) -> None:
    check_memory(5000 * 1024, "This", "less")
    with pytest.raises(TooLittleMemoryError, match=r"at least 0.01 GB of memory, .* Possible: less."):
        check_memory(5000 * 1024 + 1, "This", "less")
    with pytest.raises(MemoryError):
        check_memory(1 << 50, "This", "less")


def test_the_disk_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert free_disk(tmp_path / "not" / "there" / "yet") == pytest.approx(free, rel=0.1)
    check_disk(tmp_path / "out", 1)
    with pytest.raises(
        OutputError, match=r"^The output 'out' will take about 1125899906.84 MB, and [\d.]+ MB are free"
    ):
        check_disk(tmp_path / "out", 1 << 50)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not asked to give memory back")
def test_freed_memory_between_used_pieces_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size, pieces = 1 << 16, 512  # 32 MiB, each piece below what the C library maps by itself
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    held = [libc.malloc(size) for _ in range(pieces)]
    for address in held:
        ctypes.memset(address, 1, size)
    for address in held[:-1]:  # the last one keeps the heap as long as it is
        libc.free(address)
    before = resident()
    give_back_memory()
    given = before - resident()
    libc.free(held[-1])
    assert given > pieces * size * 3 // 4


def test_a_group_of_which_nothing_is_seen_has_the_limit_of_the_container(machine: Path) -> None:
    (machine / "self" / "cgroup").write_text("0::/job\n")
    (machine / "memory.max").write_text("1000000\n")
    assert available_memory() == 1000000


def test_what_just_fits_onto_the_disk_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_and_disk, "free_disk", lambda path: 1000)
    check_disk(tmp_path / "out", 1000)
    with pytest.raises(OutputError):
        check_disk(tmp_path / "out", 1001)
