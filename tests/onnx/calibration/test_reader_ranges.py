"""set_range, len and iteration of the readers, as onnxruntime's calibrators use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.errors import ConfigError, NotSupportedError
from quark.onnx import CachedDataReader, CalibrationDataReader, PathDataReader, RandomDataReader
from tests.models.onnx_zoo import Reader, mlp

ROWS = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)


def firsts(reader: Any) -> list[float]:
    """The first number of each sample."""
    found = []
    while (feed := reader.get_next()) is not None:
        found.append(float(feed["x"].flat[0]) / 32)
    return found


def readers(folder: Path) -> list[Any]:
    (folder / "rows").mkdir()
    for position, row in enumerate(ROWS):
        np.save(folder / "rows" / f"{position}.npy", row[None])
    np.save(folder / "all.npy", ROWS)
    return [
        CachedDataReader(Reader([{"x": row[None]} for row in ROWS])),
        PathDataReader(mlp(), folder / "rows"),
        PathDataReader(mlp(), folder / "all.npy", batch_size=1),
    ]


def test_a_range_of_samples_is_read(tmp_path: Path) -> None:
    for reader in readers(tmp_path):
        assert len(reader) == 6
        reader.set_range(2, 4)
        assert firsts(reader) == [2, 3]
        reader.set_range(0, 6)
        assert [float(feed["x"].flat[0]) / 32 for feed in reader] == [0, 1, 2, 3, 4, 5]
        reader.set_range(3, 3)
        assert firsts(reader) == []
        for start, end in ((-1, 2), (3, 2), (0, 7)):
            with pytest.raises(ConfigError, match="there are 6 samples"):
                reader.set_range(start, end)


def test_readers_that_only_go_forward_say_so() -> None:
    class Mine(CalibrationDataReader):
        def get_next(self) -> Any:
            return None

    with pytest.raises(NotSupportedError, match="Mine has no set_range"):
        Mine().set_range(0, 1)
    with pytest.raises(StopIteration):
        next(Mine())
    reader = RandomDataReader(mlp())
    assert len(reader) == 1 and next(reader)["x"].shape == (1, 32)
