"""Command lines: words dropped, doubled, of other kinds, and outputs where none can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.fuzz.case import Case, Place, Random, nothing_to_compare, pick
from tests.fuzz.damage import ODD_FILES
from tests.fuzz.kinds.onnx_models import feeds
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT

WORDS = (
    "", " ", "-", "--", "-o", "--force", "--nothing", "0", "-1", "1e9", "99999999999999999999", "nan", "é", "\u202e",
    "a\nb", "x" * 300, "x" * 5000, "../in", ".", "*", "$(touch marker)", "`id`", "%s%n", "int8", "A8W8", "re:(", "a=b",
    "*=int8", "=", "cpu", "cuda:99", "--stream", "--samples", "--calib", "--scheme", "quantize", "schemes", "--debug",
    "None", "\udcff",
)  # fmt: skip
OUTPUT_OPTIONS = ("-o", "--output", "--statistics")


def _lines(place: Place) -> dict[str, list[object]]:
    """Sound command lines."""
    model, cnn = place.bases.get("llama"), place.bases.get("onnx-cnn") / "model.onnx"
    data = place.inputs / "data.npz"
    np.savez(data, **feeds(str(cnn.parent)))
    folder, file = place.outputs / "result", place.outputs / "result.onnx"
    return {
        "int8": ["quantize", model, "--scheme", "int8", "--calib", TEXT / "heldout.txt", "--samples", 1, "-o", folder],
        "wo": ["quantize", model, "--scheme", "uint4_wo_32", "--exclude", "*.o_proj", "--layer", "*.q_proj=int8_wo",
               "--pack-method", "order", "--max-shard-size", "300KB", "--dtype", "float32", "-o", folder],
        "gguf": ["quantize", model, "--scheme", "int4_wo_32", "--export-format", "gguf", "-o", folder],
        "awq": ["quantize", model, "--scheme", "uint4_wo_32", "--export-format", "awq", "-o", folder],
        "onnx": ["quantize", cnn, "--config", "A8W8", "--calib", data, "--batch-size", 2, "--samples", 2, "--target",
                 "ort_x64", "--exclude", "y_node", "--statistics", place.outputs / "statistics.npz", "-o", file],
        "evaluate": ["evaluate", cnn, cnn, "--data", data, "--samples", 1, "--layers", 3],
        "plan": ["plan", model, "--scheme", "mxfp4", "--exclude", "*.o_proj"],
        "inspect": ["inspect", cnn],
        "schemes": ["schemes"],
    }  # fmt: skip


def dropped(random: Random, line: list[object]) -> str:
    at = int(random.integers(len(line)))
    return f"without {line.pop(at)!s:.40}"


def doubled(random: Random, line: list[object]) -> str:
    at = int(random.integers(len(line)))
    line.insert(at, line[at])
    return f"twice {line[at]!s:.40}"


def replaced(random: Random, line: list[object]) -> str:
    at = int(random.integers(len(line)))
    before, line[at] = line[at], pick(random, WORDS)
    return f"{before!s:.40} is {line[at]!s:.40}"


def inserted(random: Random, line: list[object]) -> str:
    at = int(random.integers(len(line) + 1))
    line.insert(at, pick(random, WORDS))
    return f"{line[at]!s:.40} at {at}"


def swapped(random: Random, line: list[object]) -> str:
    one, other = int(random.integers(len(line))), int(random.integers(len(line)))
    line[one], line[other] = line[other], line[one]
    return f"{line[one]!s:.40} and {line[other]!s:.40} change places"


DAMAGES: tuple[Callable[[Random, list[object]], str], ...] = (dropped, doubled, replaced, replaced, inserted, swapped)


def _odd_output(random: Random, place: Place, line: list[object]) -> tuple[str, bool]:
    """An output that is something else, or in a folder that cannot be written."""
    at = line.index("-o") + 1
    output = Path(str(line[at]))
    how = pick(random, (*ODD_FILES, "read-only", "under a file", "long", "same as input", "slash"))
    if callable(how):
        how(output)
        if random.random() < 0.5:
            line.append("--force")
        return f"the output is {how.__name__}", False
    if how == "read-only":
        os.chmod(output.parent, 0o555)  # noqa: PTH101
    elif how == "under a file":
        (output.parent / "file").touch()
        line[at] = output.parent / "file" / output.name
    elif how == "long":
        length = int(random.integers(200, 260))
        line[at] = output.parent / ("n" * (length - len(output.suffix)) + output.suffix)
    elif how == "same as input":
        line[at] = line[1]
    else:
        line[at] = f"{output}/"
    return f"output {how}", how == "read-only"


def _allowed(folder: Path, line: list[object]) -> list[Path]:
    """What the line, run in a folder, names as outputs, and the weights beside them."""
    named = [folder / str(value) for option, value in pairwise(line) if option in OUTPUT_OPTIONS]
    named = [path for path in named if path != folder]
    return [*named, *(path.with_name(f"{path.name}.data") for path in named if path.name)]


def make(random: Random, place: Place) -> Case:
    lines = _lines(place)
    name = pick(random, lines)
    line = list(lines[name])
    user = False
    if "-o" in line and random.random() < 0.35:
        said, user = _odd_output(random, place, line)
    else:
        said = "; ".join(pick(random, DAMAGES)(random, line) for _ in range(int(random.integers(1, 3))) if line)
    allowed = tuple(_allowed(place.outputs, line))
    return Case(
        f"{name}: {said!r}: {shown(*line)!r}", partial(_run, place.outputs, line), nothing_to_compare, allowed,
        margin=None, user=user,
    )  # fmt: skip


def _run(folder: Path, line: list[object]) -> None:
    """In the folder of outputs, where relative names lead."""
    os.chdir(folder)
    quark(*line)
