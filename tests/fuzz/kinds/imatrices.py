"""Importance matrices: numbers, names and bytes of both of llama.cpp's forms."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, odd_file
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT


def _make_base(file: Path, source: Path) -> None:
    quark(
        "quantize", source, "--scheme", "q4_k_m", "--export-format", "gguf", "--calib", TEXT / "heldout.txt",
        "--samples", 2, "--length", 16, "--save-imatrix", file, "-o", file.with_name(f"{file.name}.out.gguf"),
    )  # fmt: skip


def make(random: Random, place: Place) -> Case:
    source = place.bases.get("imatrix-llama")
    base = place.bases.made(pick(random, ("i.gguf", "i.dat")), partial(_make_base, source=source))
    file, said, sound = place.inputs / base.name, "undamaged", random.random() < SOUND
    data = base.read_bytes()
    if not sound:
        data, said = damage_bytes(random, data)
    file.write_bytes(data)
    if not sound and random.random() < 0.1:
        said = odd_file(random, file)
    output = place.outputs / "result.gguf"
    command = ("quantize", source, "--scheme", "q4_k_m", "--export-format", "gguf", "--imatrix", file, "-o", output)
    return Case(f"{said}: {shown(*command)}", partial(quark, *command), outputs=(output,), sound=sound)
