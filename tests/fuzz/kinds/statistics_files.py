"""Statistics files of calibration: entries missing, of other types, sizes and orders, and damaged bytes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, odd_file
from tests.fuzz.kinds.onnx_models import bound_of, feeds
from tests.fuzz.oracles import judge_onnx
from tests.fuzz.program import quark, shown

CONFIGS = ("A8W8", "XINT8", "S8S8_AAWS", "INT8_CNN_DEFAULT")


def entries(random: Random, file: Path) -> str:
    """One array of the file."""
    with np.load(file) as opened:
        arrays: dict[str, Any] = {name: opened[name] for name in opened.files}
    name = pick(random, arrays)
    array, odd = arrays[name], None
    how = pick(
        random, ("drop", "type", "short", "long", "scalar", "axis", "reverse", "nan", "negative", "text", "rename")
    )
    if how == "drop":
        del arrays[name]
    elif how == "rename":
        arrays[f"{name}_"] = arrays.pop(name)
    elif how in ("nan", "negative") and array.dtype.kind == "f":
        odd = np.full_like(array, np.nan if how == "nan" else -1)
    elif how in ("short", "long") and array.ndim:
        odd = array[:-1] if how == "short" else np.concatenate([array, array])
    elif how == "reverse" and array.ndim:
        odd = array[::-1]
    elif how == "type" and array.dtype.kind in "fiu":
        odd = array.astype(pick(random, (np.int8, np.complex64, np.float16, bool)))
    elif how == "scalar":
        odd = np.array(3)
    elif how == "axis":
        odd = array[..., None]
    else:
        how, odd = "text", np.array(["a"] * max(array.size, 1)).reshape(array.shape)
    if odd is not None:
        arrays[name] = odd
    np.savez(file, **arrays)
    return f"{name}: {how}"


def some_bytes(random: Random, file: Path) -> str:
    changed, said = damage_bytes(random, file.read_bytes())
    file.write_bytes(changed)
    return said


def odd(random: Random, file: Path) -> str:
    return odd_file(random, file)


DAMAGES = (entries, entries, entries, some_bytes, odd)


def _statistics(place: Place, base: str, config: str) -> Path:
    """A sound file, written once."""
    source = place.bases.get(base) / "model.onnx"

    def make(file: Path) -> None:
        data, output = file.with_suffix(".data.npz"), file.with_suffix(".onnx")
        np.savez(data, **feeds(str(source.parent)))
        quark("quantize", source, "--config", config, "--calib", data, "--statistics", file, "-o", output)

    return place.bases.made(f"{base}-{config}-statistics.npz", make)


def _case(place: Place, base: str, config: str, random: Random | None) -> Case:
    file = Path(shutil.copy(_statistics(place, base, config), place.inputs / "statistics.npz"))
    said = pick(random, DAMAGES)(random, file) if random else "undamaged"
    source, output = place.bases.get(base) / "model.onnx", place.outputs / "result.onnx"
    command = ("quantize", source, "--config", config, "--statistics", file, "-o", output)
    one = {name: array[:4] for name, array in feeds(str(source.parent)).items()}
    return Case(
        f"{base}: {said}: {shown(*command)}", partial(quark, *command), partial(judge_onnx, source, output, one),
        (output, file), like=base, bound=partial(bound_of, source.parent),
        sound=random is None,
    )  # fmt: skip


def make(random: Random, place: Place) -> Case:
    return _case(
        place,
        pick(random, ("onnx-mlp", "onnx-cnn")),
        pick(random, CONFIGS),
        None if random.random() < SOUND else random,
    )
