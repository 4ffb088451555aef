"""Arrays and images of files: nothing is unfolded before its header was looked at."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quark.base.data_files import arrays, images
from quark.base.data_files.arrays import read_npy, read_npz
from quark.errors import CalibrationError, FormatError


def member(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """The bytes of an .npy file, with another shape in its header where one is given."""
    stream = io.BytesIO()
    np.save(stream, array)
    said = str(array.shape).encode()
    return stream.getvalue().replace(said, str(shape).encode().ljust(len(said))) if shape else stream.getvalue()


def archive(file: Path, data: bytes, packed: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(file, "w", packed) as written:
        written.writestr("x.npy", data)


def encrypted(file: Path) -> None:
    archive(file, member(np.ones(4)))
    data = bytearray(file.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= 1
    file.write_bytes(data)


def of_unknown_packing(file: Path) -> None:
    archive(file, member(np.ones(4)))
    data = bytearray(file.read_bytes())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(mark) + place : data.index(mark) + place + 2] = struct.pack("<H", 97)
    file.write_bytes(data)


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "more values than bytes": (lambda file: archive(file, member(np.ones((100, 100)), (10**4, 90))), "promises"),
    "fewer values than bytes": (lambda file: archive(file, member(np.ones((30, 40)), (3, 4))), "promises"),
    "objects": (lambda file: np.savez(file, x=np.array([{}])), "Python objects"),
    "encrypted": (encrypted, "is encrypted"),
    "unknown packing": (of_unknown_packing, "packed in the way 97"),
    "no archive": (lambda file: file.write_bytes(b"x" * 100), "not a zip file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_archive_is_named(case: str, tmp_path: Path) -> None:
    make, words = DAMAGED[case]
    make(tmp_path / "data.npz")
    with pytest.raises(FormatError, match=rf"data\.npz is not an \.npz file: .*{words}"):
        read_npz(tmp_path / "data.npz")


def test_what_unfolds_to_much_more_is_refused_by_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(1 << 20))
    assert read_npz(tmp_path / "zeros.npz")["x"].shape == (1 << 20,)  # eight megabytes are read of any file
    monkeypatch.setattr(arrays, "_FREE", 1 << 20)
    monkeypatch.setattr(arrays, "_array_of", None)  # nothing is unfolded
    with pytest.raises(FormatError, match=r"unfold to 8388608"):
        read_npz(tmp_path / "zeros.npz")
    monkeypatch.setattr(arrays, "_FREE", 1 << 28)
    monkeypatch.setattr(arrays, "available_memory", lambda: 1 << 20)
    with pytest.raises(FormatError, match=r"1048576 bytes of memory are free"):
        read_npz(tmp_path / "zeros.npz")


@pytest.mark.parametrize("wrap", [Path, lambda path: io.BytesIO(path.read_bytes())], ids=["file", "bytes"])
def test_an_image_that_unfolds_to_much_more_is_refused(
    wrap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (400, 300)).save(tmp_path / "black.png")
    assert images.open_image(wrap(tmp_path / "black.png")).size == (400, 300)
    monkeypatch.setattr(images, "_FREE", 1 << 16)
    with pytest.raises(ValueError, match="unfold to 400 x 300 pixels"):
        images.open_image(wrap(tmp_path / "black.png"))


def test_a_check_sees_headers_before_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3), np.float32), y=np.arange(4))

    def check(headers: object) -> None:
        assert {name: (h.shape, str(h.dtype)) for name, h in headers.items()} == {  # type: ignore[attr-defined]
            "x": ((2, 3), "float32"),
            "y": ((4,), "int64"),
        }
        raise CalibrationError("no")

    assert read_npz(tmp_path / "x.npz")["y"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CalibrationError, match="^no$"):
        read_npz(tmp_path / "x.npz", check)


def test_an_array_of_another_size_than_its_header_says_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(100, dtype=np.int16))
    assert read_npy(tmp_path / "x.npy").sum() == 4950
    (tmp_path / "x.npy").write_bytes(member(np.arange(100, dtype=np.int16), (999,)))
    with pytest.raises(FormatError, match=r"x\.npy is not an \.npy file: its header promises 1998 bytes"):
        read_npy(tmp_path / "x.npy")
