"""Pages of mapped files are given back, and only those that were mapped later than the object was made."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quark.torch.flows.on_load.mapped_files import MappedFiles


def resident(path: Path) -> int:
    """Bytes of the mapping of a file that lie in memory."""
    rows = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    sizes = (re.search(r"^Rss: +(\d+) kB", row, flags=re.M) for row in rows if str(path) in row)
    return sum(int(size[1]) * 1024 for size in sizes if size)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages are not given back")
def test_read_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    path, values = tmp_path / "model.safetensors", torch.arange(1 << 20)
    save_file({"x": values}, path)
    before: Any = safe_open(path, "pt")
    written = before.get_tensor("x")
    written += 1  # in this process alone
    mapped = MappedFiles()
    later: Any = safe_open(path, "pt")
    read = later.get_tensor("x")
    total = read.sum()
    whole = resident(path)
    assert whole >= 2 * values.nbytes
    mapped.release([tmp_path / "other.safetensors"])
    assert resident(path) == whole
    mapped.release([path])
    assert resident(path) < whole - values.nbytes // 2
    assert torch.equal(written, values + 1) and read.sum() == total
