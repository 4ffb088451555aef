"""Samples in files: where they lie, and what an .npy, an .npz or an image holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.data_files.images import files_in_turn, open_image
from quark.base.files import require_regular
from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, FormatError, MissingDependencyError
from quark.onnx.graph.proto_file import reason

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_NAMED = 3
"""Files that are skipped whose names are told."""
SOUND = ".wav"
SUFFIXES = frozenset({".npy", ".npz", SOUND}) | IMAGES


def find_samples(path: Path, inputs: Sequence[str]) -> list[dict[str, Path]]:
    """The files of each sample: input name -> file; of an .npz, which names its arrays itself, any input name.

    Raises:
        CalibrationError: Nothing there, or not the same files for each input.
    """
    if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        if path.suffix.lower() not in SUFFIXES:
            raise CalibrationError(f"{path} is no data file; possible: {', '.join(sorted(SUFFIXES))}, or a folder.")
        return [_by_input_names(path, inputs)]
    if not os.path.isdir(path):  # noqa: PTH112 - a pipe or a device is neither, and never opened
        raise CalibrationError(f"{path} is neither a folder nor a file.")
    if any(os.path.isdir(path / name) for name in inputs):  # noqa: PTH112
        files = {name: _data_files(path / name) for name in inputs}
        stems = {name: [file.stem for file in found] for name, found in files.items()}
        for name in inputs:
            if stems[name] != stems[inputs[0]]:
                raise CalibrationError(
                    f"{path / inputs[0]} has {len(stems[inputs[0]])} files and {path / name} {len(stems[name])}: "
                    "each sample needs a file of one name in the folder of every input."
                )
        return [dict(zip(inputs, row, strict=True)) for row in zip(*files.values(), strict=True)]
    return [_by_input_names(file, inputs) for file in _data_files(path)]


def _by_input_names(file: Path, inputs: Sequence[str]) -> dict[str, Path]:
    if len(inputs) > 1 and file.suffix.lower() != ".npz":
        raise CalibrationError(
            f"{file} is one array; the model has the inputs {', '.join(inputs)}. Possible: .npz files with these "
            "names, or a folder for each input."
        )
    return {inputs[0]: file}


def _data_files(folder: Path) -> list[Path]:
    found = files_in_turn(folder, lambda file: file.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not found:
        raise CalibrationError(f"{folder} holds no samples; possible: files of {', '.join(sorted(SUFFIXES))}.")
    others = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file not in found]
    if others:
        shown = ", ".join(others[:_NAMED]) + (" ..." if len(others) > _NAMED else "")
        logger.info("%d files of %s are no samples, and skipped: %s.", len(others), folder, shown)
    return found


def read_image(path: Path, mode: str | None = None, fit: Callable[[Any], Any] | None = None) -> NumpyArray:
    """The pixels of an image: uint8 [height, width, colours], or [height, width] of a grey one.

    Args:
        path: An image of 8 or 16 bits a colour; see `quark.base.data_files.images`.
        mode: "RGB" or "L"; None: grey stays grey, all else becomes RGB.
        fit: Makes of the image of Pillow the one that is returned, as `Resizing.apply` does.

    Raises:
        FormatError: It is no image, or one of 32 bits a colour.
        MissingDependencyError: pillow is not installed.
    """
    require_regular(path)
    try:
        image = open_image(path, mode)
        return np.asarray(image if fit is None else fit(image))
    except MissingDependencyError:
        raise
    except Exception as error:  # of Pillow: each format has its own
        raise FormatError(f"{path} is not an image that can be read: {reason(error)}") from error
