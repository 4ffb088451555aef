"""Calibration data: arrays, archives, images and folders for ONNX models, text for language models."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.case import Case, Place, Random, pick
from tests.fuzz.damage import ODD_FILES, damage_bytes, hostile_pickle
from tests.fuzz.kinds.onnx_models import bound_of, feeds
from tests.fuzz.oracles import judge_folder, judge_onnx
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT

Array = Any
ENDINGS = (".npz", ".npy", "")
CHANGES: dict[str, Callable[[Random, Array], Array]] = {
    "as it is": lambda random, x: x,
    "float64": lambda random, x: x.astype(np.float64),
    "big-endian": lambda random, x: x.astype(">f4"),
    "fortran": lambda random, x: np.asfortranarray(x),
    "no rows": lambda random, x: x[:0],
    "one row": lambda random, x: x[:1],
    "another axis": lambda random, x: x[..., None],
    "flat": lambda random, x: x.reshape(-1),
    "a scalar": lambda random, x: np.float32(1.0),
    "narrower": lambda random, x: x[..., :-1],
    "zeros": lambda random, x: np.zeros_like(x),
    "one value": lambda random, x: np.full_like(x, 3.0),
    "tiny": lambda random, x: np.full_like(x, 1e-42),
    "huge": lambda random, x: np.full_like(x, 3e38),
    "NaN": lambda random, x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x).astype(x.dtype),
    "Inf": lambda random, x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.inf, x).astype(x.dtype),
    "int64": lambda random, x: (x * 10).astype(np.int64),
    "bool": lambda random, x: x > 0,
    "complex": lambda random, x: x.astype(np.complex64),
    "texts": lambda random, x: x.astype(str),
    "dates": lambda random, x: x.astype("datetime64[s]"),
    "records": lambda random, x: np.zeros(len(x), dtype=[("a", "f4"), ("b", "i4")]),
}
FREE = ("huge", "one value", "int64")
"""Calibrated on these, a model may be as bad as it likes."""


def _raw_npy(array: Array) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def _objects(marker: Path) -> bytes:
    """A .npy file of pickled objects."""
    header = _raw_npy(np.zeros(1)).split(b"\n")[0].replace(b"<f8", b"|O ")[:128]
    return header + b"\n" + hostile_pickle(marker)


def _archive(file: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as made:
        for name, data in entries.items():
            made.writestr(name, data)


def arrays(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    """An archive or an array whose values, shape or dtype are others."""
    how = pick(random, list(CHANGES))
    changed = {name: CHANGES[how](random, array) for name, array in data.items()}
    if file.suffix == ".npy":
        np.save(file, next(iter(changed.values())))
    else:
        np.savez(file, **changed)
    return how, how in FREE


def archives(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    """An archive that holds something else than arrays of the model's inputs."""
    entries = {f"{name}.npy": _raw_npy(array) for name, array in data.items()}
    how = pick(
        random, ("another name", "one more", "empty", "no array", "objects", "twice", "up", "folder", "no suffix")
    )
    first = next(iter(entries))
    if how == "another name":
        entries["other.npy"] = entries.pop(first)
    elif how == "one more":
        entries["other.npy"] = entries[first]
    elif how == "empty":
        entries = {}
    elif how == "no array":
        entries[first] = b"hello"
    elif how == "objects":
        entries[first] = _objects(marker)
    elif how == "up":
        entries["../other.npy"] = entries[first]
    elif how == "folder":
        entries["folder/"] = b""
    elif how == "no suffix":
        entries[first.removesuffix(".npy")] = entries.pop(first)
    _archive(file, entries)
    if how == "twice":
        with zipfile.ZipFile(file, "a") as made, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the second entry of a name, which is meant
            made.writestr(zipfile.ZipInfo(first), _raw_npy(np.zeros(3)))
    return f"archive: {how}", True


def some_bytes(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    np.savez(file, **data)
    changed, said = damage_bytes(random, file.read_bytes())
    file.write_bytes(changed)
    return said, True


def header(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    """An array file whose header promises another array."""
    raw = _raw_npy(next(iter(data.values())))
    old, new = pick(random, (
        (b"(", b"(99999999, "), (b"'<f4'", b"'|O'"), (b"'<f4'", b"'<f0'"), (b"False", b"True"), (b"descr", b"other"),
        (b"{", b"__import__('os') or {"), (b"'shape': (", b"'shape': (-"),
    ))  # fmt: skip
    file = file.with_suffix(".npy")
    file.write_bytes(raw.replace(old, new, 1))
    return f"header: {old!r} is {new!r}", True


def odd(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    how = pick(random, ODD_FILES)
    how(file)
    return f"{file.name} is {how.__name__}", True


def folders(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    """A folder of samples, one of which is odd."""
    file.mkdir()
    for index in range(4):
        np.savez(file / f"{index}.npz", **{name: array[index : index + 1] for name, array in data.items()})
    how = pick(random, ("sound", "a text", "an image", "odd", "bytes", "deeper", "hidden", "shape"))
    if how == "a text":
        (file / "notes.txt").write_text("hello")
    elif how == "an image":
        (file / "9.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    elif how == "odd":
        pick(random, ODD_FILES)(file / "9.npz")
    elif how == "bytes":
        (file / "1.npz").write_bytes(damage_bytes(random, (file / "1.npz").read_bytes())[0])
    elif how == "deeper":
        (file / "deeper").mkdir()
        (file / "0.npz").rename(file / "deeper" / "0.npz")
    elif how == "hidden":
        (file / "0.npz").rename(file / ".0.npz")
    elif how == "shape":
        np.savez(file / "1.npz", **{name: array[:, :-1] for name, array in data.items()})
    return f"folder: {how}", how != "sound"


def images(random: Random, file: Path, data: dict[str, Array], marker: Path) -> tuple[str, bool]:
    """A folder of images of the model's size, or not."""
    from PIL import Image

    file.mkdir()
    mode, size = (
        pick(random, ("RGB", "L", "RGBA", "P", "1", "I;16")),
        pick(random, ((16, 16), (8, 8), (1, 1), (16, 15))),
    )
    kind = pick(random, ("png", "jpeg", "png"))
    if kind == "jpeg":
        mode = "RGB"
    for index in range(4):
        made = io.BytesIO()
        Image.new(mode, size, index).save(made, kind)
        raw = made.getvalue()
        if index == 2 and random.random() < 0.4:
            raw = damage_bytes(random, raw)[0]
        (file / f"{index}.{kind}").write_bytes(raw)
    return f"images: {mode} {size} {kind}", True


DAMAGES = (arrays, arrays, arrays, archives, some_bytes, header, odd, folders, images)
TEXTS: dict[str, bytes] = {
    "empty": b"", "one word": b"word", "latin-1": "é".encode("latin-1") * 5000, "zeros": bytes(20000),
    "utf-16": ("word " * 5000).encode("utf-16"), "one letter": b"a" * 40000, "lines": b"\n" * 40000,
    "marks": "\u202e\ufeff\u0301".encode() * 5000, "astral": "\U0001f600".encode() * 4000, "cut": "é".encode()[:1],
    "special": b"<s></s><unk><pad>" * 2000,
}  # fmt: skip


def _text_case(random: Random, place: Place) -> Case:
    """Calibration text of a language model."""
    file, output = place.inputs / "text.txt", place.outputs / "result"
    how = pick(random, [*TEXTS, "odd", "bytes", "gone"])
    if how in TEXTS:
        file.write_bytes(TEXTS[how])
    elif how == "odd":
        how = pick(random, ODD_FILES).__name__
        {odd.__name__: odd for odd in ODD_FILES}[how](file)
    elif how == "bytes":
        file.write_bytes(damage_bytes(random, (TEXT / "calibration.txt").read_bytes()[:20000])[0])
    return _with_text(place, file, how, output)


def _with_text(place: Place, file: Path, how: str, output: Path) -> Case:
    source = place.bases.get("llama")
    command = ("quantize", source, "--scheme", "int8", "--calib", file, "--samples", 2, "-o", output)
    return Case(
        f"text: {how}: {shown(*command)}", partial(quark, *command), partial(judge_folder, source, output), (output,),
        margin=None,
    )  # fmt: skip


def _data_case(place: Place, base: str, file: Path, said: str, free: bool, config: str) -> Case:
    """Judged on rows that it was calibrated with: of others, a range says nothing."""
    source, output = place.bases.get(base) / "model.onnx", place.outputs / "result.onnx"
    command = ("quantize", source, "--config", config, "--calib", file, "-o", output)
    one = {name: array[: 1 if said == "one row" else 4] for name, array in feeds(str(source.parent)).items()}
    return Case(
        f"{base}: {said}: {shown(*command)}",
        partial(quark, *command),
        partial(judge_onnx, source, output, one),
        (output,),
        margin=None if free else 10.0,
        like=base,
        bound=partial(bound_of, source.parent),
    )


def make(random: Random, place: Place) -> Case:
    if random.random() < 0.15:
        return _text_case(random, place)
    base, config = pick(random, ("onnx-mlp", "onnx-cnn")), pick(random, ("A8W8", "XINT8", "A16W8", "S8S8_AAWS"))
    damage = pick(random, DAMAGES)
    base = "onnx-cnn" if damage is images else base
    file = (
        place.inputs
        / f"data{pick(random, ENDINGS) if damage is arrays else '' if damage in (folders, images) else '.npz'}"
    )
    said, free = damage(random, file, feeds(str(place.bases.get(base))), place.marker)
    made = next((path for path in sorted(place.inputs.iterdir()) if path.stem == "data"), file)
    return _data_case(place, base, made, said, free, config)
