"""The documented file of calibrated ranges (SaveAndRestore, TensorsRangeFile): JSON, to be read and edited.

    {"quark_version": "...", "tensors_range": {"conv1_out": [[-1.5], [2.0]], ...}}

A range is [low, high]; each side may be a list of one number. The documented system also writes the state of a
fine-tuning that was stopped. That is not taken up: fine-tuning begins with the float weights, which a warning says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.files import atomic_file, require_regular
from quark.base.log import logger
from quark.errors import FormatError, one_line

Range = tuple[float, float]
KEY = "tensors_range"


def read_ranges(path: str | os.PathLike[str]) -> dict[str, Range]:
    """Tensor name -> (low, high).

    Raises:
        FormatError: It is no JSON of this form, or a range is not finite, or its low is above its high.
    """
    require_regular(Path(path))
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON file of tensor ranges: {one_line(error)}") from error
    entries = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise FormatError(f"{path} holds no {KEY!r}. Possible: another file name, to calibrate and write it.")
    if "model_to_finetune" in content:
        logger.warning(f"{path}: its ranges are used; fine-tuning, if any, begins with the float weights.")
    return {name: _range(entry, f"{path}: {name}") for name, entry in entries.items()}


def write_ranges(path: str | os.PathLike[str], ranges: Mapping[str, Range]) -> None:
    """Write a file, whole or not at all. Raises OutputError."""
    from quark.__version__ import __version__

    entries = {name: [[low], [high]] for name, (low, high) in ranges.items()}
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps({"quark_version": __version__, KEY: entries}, indent=2), encoding="utf-8")


def _range(entry: Any, where: str) -> Range:
    sides = entry if isinstance(entry, list) and len(entry) == 2 else []
    numbers = [side[0] if isinstance(side, list) and len(side) == 1 else side for side in sides]
    if len(numbers) != 2 or not all(type(number) in (int, float) for number in numbers):
        raise FormatError(f"{where}: expected [low, high], got {one_line(json.dumps(entry))[:80]}.")
    with np.errstate(over="ignore"):
        low, high = (float(np.float32(number)) for number in numbers)
    if not (np.isfinite([low, high]).all() and low <= high):
        raise FormatError(f"{where}: [{numbers[0]}, {numbers[1]}] is no range of float32.")
    return low, high
