"""What is free, and errors where it is certainly too little."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quark import memory_and_disk
from quark.errors import OutputError, TooLittleMemoryError
from quark.memory_and_disk import available_memory, check_disk, check_memory, free_disk

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
    with pytest.raises(OutputError, match="out will take about 1125899.91 GB"):
        check_disk(tmp_path / "out", 1 << 50)
