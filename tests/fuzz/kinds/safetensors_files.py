"""Bytes of safetensors files: the length of the header, its JSON, offsets, dtypes, and the end of the file."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, damage_json, header_of, join, odd_values, read_tensors, shorten
from tests.fuzz.kinds.model_folders import folder_case

DTYPES = ("F32", "F16", "BF16", "F64", "I8", "I64", "BOOL", "F8_E4M3", "F4", "U4", "", "float32", 5, None)


def _header_length(random: Random, header: bytes, body: bytes) -> tuple[bytes, str]:
    size = pick(random, (0, 1, len(header) - 1, len(header) + 1, len(header) + len(body) + 9, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", size) + header + body, f"header length {size}"


def _entry(random: Random, entries: dict[str, Any], body: bytes) -> tuple[bytes, str]:
    """One field of one tensor of the header."""
    name = pick(random, [name for name in entries if name != "__metadata__"])
    entry = entries[name]
    start, end = entry["data_offsets"]
    key = pick(random, ("dtype", "shape", "offsets", "offsets", "extra", "metadata"))
    if key == "dtype":
        entry["dtype"] = pick(random, DTYPES)
    elif key == "shape":
        shape = entry["shape"]
        shapes: tuple[Any, ...] = (
            [],
            [0],
            [-1],
            [2**62, 4],
            [*shape, 1],
            [1, *shape],
            shape[::-1],
            ["64"],
            None,
            [2**31] * 8,
        )
        entry["shape"] = pick(random, shapes)
    elif key == "offsets":
        offsets = ([0, end - start], [start + 4, end + 4], [start, end + 4], [start, end - 4], [end, start], [-4, end],
                   [start], [2**63, 2**63 + 4], [start, 1e30], None, [len(body), len(body) + end - start])  # fmt: skip
        entry["data_offsets"] = pick(random, offsets)
    elif key == "extra":
        entry["strides"] = [1, 2]
    else:
        entries["__metadata__"] = pick(random, odd_values())
    return join(json.dumps(entries).encode(), body), f"{key} of {name}: {shorten(entry)}"


def _header_text(random: Random, header: bytes, body: bytes) -> tuple[bytes, str]:
    how = pick(random, ("twice", "spaces", "bytes", "deep", "tree", "comma", "latin-1"))
    if how == "twice":
        header = header[:-1] + b"," + header[1:]
    elif how == "spaces":
        header = header + b" " * 64
    elif how == "bytes":
        header, how = damage_bytes(random, header)
    elif how == "deep":
        header = b'{"a":' * 5000 + b"1" + b"}" * 5000
    elif how == "tree":
        tree, how = damage_json(random, json.loads(header))
        header = json.dumps(tree).encode()
    elif how == "comma":
        header = header[:-1] + b",}"
    else:
        header = header.replace(b"weight", b"w\xe9ight", 1)
    return join(header, body), f"header: {how}"


def damage(random: Random, folder: Path, marker: Path) -> str:
    """One of the files of weights."""
    file = pick(random, sorted(folder.glob("*.safetensors")))
    entries, body = header_of(*read_tensors(file))
    header = json.dumps(entries).encode()
    how = int(random.integers(5))
    if how == 0:
        data, said = _header_length(random, header, body)
    elif how == 1:
        data, said = _header_text(random, header, body)
    elif how == 2:
        rest = pick(random, (body[: int(random.integers(len(body)))], body + b"\0" * 7, b""))
        data, said = join(header, rest), f"{len(rest)} bytes of tensors, not {len(body)}"
    else:
        data, said = _entry(random, entries, body)
    file.write_bytes(data)
    return f"{file.name}: {said}"


def make(random: Random, place: Place) -> Case:
    base = pick(random, ("llama", "llama", "sharded", "bert"))
    way = pick(random, ("memory", "--stream", "file to file"))
    return folder_case(place, base, way, None if random.random() < SOUND else partial(damage, random))
