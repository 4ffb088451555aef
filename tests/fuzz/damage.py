"""Ways to damage JSON, bytes, files, and files in the safetensors format. Each says what it did."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.case import Random, pick


def odd_values() -> list[Any]:
    """What may stand in a JSON file in place of any value."""
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    return [
        None, True, False, -1, 0, 1, 3, 10**9, 2**31, 2**63, 10**30, 10**400, -0.5, 1e-42, 1e308, math.nan, math.inf,
        "", "64", "None", "float32", "../../../etc/passwd", "/etc/passwd", "a\0b", "é" * 40, "x" * 5000, [], {}, [None],
        {"a": 1}, ["a", 1], {"": {}}, [[]], deep,
    ]  # fmt: skip


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry of a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in entries:
        found += [(*path, key), *_places(value, (*path, key))]
    return found


def damage_json(random: Random, tree: Any) -> tuple[Any, str]:
    """A copy with one entry removed, replaced, renamed, wrapped or copied over another."""
    tree = copy.deepcopy(tree)
    places = _places(tree)
    if not places or random.random() < 0.03:
        value = pick(random, odd_values())
        return value, f"all of it is {shorten(value)}"
    path = pick(random, places)
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    name, where = path[-1], ".".join(map(str, path))
    how = pick(random, ("odd", "odd", "odd", "remove", "rename", "wrap", "copy"))
    if how == "remove":
        del holder[name]
        return tree, f"{where} removed"
    if how == "rename" and isinstance(holder, dict):
        holder[f"{name}_"] = holder.pop(name)
        return tree, f"{where} renamed"
    if how == "wrap":
        holder[name] = pick(random, ([holder[name]], {"value": holder[name]}, json.dumps(holder[name])))
    elif how == "copy":
        other: Any = tree
        for key in pick(random, places):
            other = other[key]
        holder[name] = copy.deepcopy(other)
    else:
        holder[name] = pick(random, odd_values())
    return tree, f"{where} = {shorten(holder[name])}"


def damage_bytes(random: Random, data: bytes) -> tuple[bytes, str]:
    """Bits turned, cut off, cut out, doubled or zeroed."""
    at = int(random.integers(max(len(data), 1)))
    if random.random() < 0.5:
        at = min(at, int(random.integers(1, 400)))  # headers stand at the front
    size = int(random.integers(1, 64))
    how = pick(random, ("bit", "bits", "cut", "out", "double", "zero", "empty"))
    changed = bytearray(data)
    if how in ("bit", "bits") and data:
        for _ in range(1 if how == "bit" else 20):
            place = at if how == "bit" else int(random.integers(len(data)))
            changed[place] ^= 1 << int(random.integers(8))
    elif how == "cut":
        del changed[at:]
    elif how == "out":
        del changed[at : at + size]
    elif how == "double":
        changed[at:at] = changed[at : at + size]
    elif how == "zero":
        changed[at : at + size] = bytes(len(changed[at : at + size]))
    elif how == "empty":
        changed.clear()
    return bytes(changed), f"bytes: {how} at {at} of {len(data)}"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "else")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_the_system(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def device(path: Path) -> None:
    """A device of its own, so that none of the machine's is written; without the right to make one, a FIFO."""
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 7))
    except PermissionError:
        os.mkfifo(path)


def empty(path: Path) -> None:
    path.touch()


def folder(path: Path) -> None:
    path.mkdir()


ODD_FILES: tuple[Callable[[Path], None], ...] = (fifo, dangling, loop, link_to_the_system, device, empty, folder)


def odd_file(random: Random, path: Path) -> str:
    """Put something odd in the place of a file."""
    path.unlink(missing_ok=True)
    how = pick(random, ODD_FILES)
    how(path)
    return f"{path.name} is {how.__name__.replace('_', ' ')}"


class _Command:
    """Pickled, a command that is run where it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def hostile_pickle(marker: Path) -> bytes:
    """Writes the marker when it is read."""
    return pickle.dumps(_Command(marker))


@dataclass
class Tensor:
    """As a safetensors file holds it."""

    dtype: str
    shape: list[int]
    data: bytes


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a sound file, and its metadata."""
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = header.pop("__metadata__", {})
    tensors = {n: Tensor(e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for n, e in header.items()}
    return tensors, metadata


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    header, body = header_of(tensors, metadata)
    file.write_bytes(join(json.dumps(header).encode(), body))


def header_of(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    return header, b"".join(tensor.data for tensor in tensors.values())


def join(header: bytes, body: bytes) -> bytes:
    """The bytes of a file: the length of the header, the header, the tensors."""
    return struct.pack("<Q", len(header)) + header + body
