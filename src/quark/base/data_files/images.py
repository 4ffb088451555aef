"""Images of calibration data: one reader for all flows, of formats that Pillow decodes itself, in 8 bits a colour."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quark.base.log import logger
from quark.errors import CalibrationError, ConfigError, did_you_mean, require_packages

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Others have no place in data from elsewhere: Pillow runs another program for EPS, whatever the file is called."""


def open_image(file: Path | BinaryIO, mode: str | None = None) -> Any:
    """The image of Pillow in a file, loaded and closed.

    Args:
        file: A regular file in one of FORMATS, or what is in it.
        mode: "RGB" or "L"; None: grey stays grey, all else becomes RGB.

    Raises:
        MissingDependencyError: pillow is not installed.
        ValueError: Its pixels have no 8-bit form.
        Exception: Of Pillow, for what it cannot read; each format has its own.
    """
    require_packages(f"Reading {f'the image {file.name}' if isinstance(file, Path) else 'images'}", "images", "PIL")
    from PIL import Image, UnidentifiedImageError  # of an extra: only where images are read

    with warnings.catch_warnings():
        # Pillow warns of more pixels than a photograph has, and refuses twice as many.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            opened = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"it is none of {', '.join(FORMATS)}, or damaged") from None
    with opened as image:
        # Pillow cuts off what is above 255 where it converts these.
        wide = _in_8_bits(image) if image.mode[0] in "IF" else image
        return wide.convert(mode or ("L" if wide.mode in ("1", "L") else "RGB"))


def _in_8_bits(image: Any) -> Any:
    """A grey image of 16 bits, their whole range scaled. Raises ValueError for wider ones, which have no range."""
    from PIL import Image

    # Some versions of Pillow open a PNG of 16 bits as one of 32.
    if not image.mode.startswith("I;16") and not (image.mode == "I" and image.format == "PNG"):
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}, of which no range is known: convert it to 8 or 16 bits")
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


_GREY = 114
"""The grey that `pad` puts beside an image, of 0 to 255: the usual value of detectors."""
WAYS = {
    "stretch": "both sides are scaled to the size of the input",
    "crop": "the image is scaled to cover the input, and its middle is taken",
    "pad": "the image is scaled to fit into the input, with grey around it",
}
"""How an image gets the size of an input."""


@dataclass(frozen=True)
class Resizing:
    """How images get the size of an input: one of WAYS, and the size [pixels] where the input leaves it open."""

    way: str
    height: int | None = None
    width: int | None = None

    @classmethod
    def parse(cls, text: str) -> Resizing:
        """Of "pad", or of "pad:480x640", height first. Raises ConfigError for anything else."""
        way, _, size = text.partition(":")
        if way not in WAYS:
            raise ConfigError(f"Images cannot be resized by {way!r}. {did_you_mean(way, WAYS)}")
        if not size and ":" not in text:
            return cls(way)
        if not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", size, re.ASCII):
            raise ConfigError(f"The size of images is HEIGHTxWIDTH, as in {way}:480x640, got {text!r}.")
        height, width = map(int, size.split("x"))
        return cls(way, height, width)

    def apply(self, image: Any, height: int, width: int) -> Any:
        """An image of Pillow in the given size [pixels], bilinear; one that has it already is returned as it is."""
        from PIL import Image  # of an extra: only where images are read

        if image.size == (width, height):
            return image
        (across, down), left, top = self._place(image.size, height, width)
        if self.way == "stretch":
            return image.resize((width, height), Image.Resampling.BILINEAR)
        scaled = image.resize((across, down), Image.Resampling.BILINEAR)
        full = Image.new(image.mode, (width, height), (_GREY,) * len(image.getbands()))
        full.paste(scaled, (left, top))
        return full

    def boxes(self, corners: Any, size: tuple[int, int], height: int, width: int) -> Any:
        """The boxes of an image where they are after `apply`.

        Args:
            corners: (boxes, 4), x and y of two corners [pixels].
            size: Width and height of the image.
            height, width: Of the input.
        """
        if size == (width, height):
            return corners
        (across, down), left, top = self._place(size, height, width)
        factors, shift = np.array([across / size[0], down / size[1]] * 2), np.array([left, top] * 2)
        return np.clip(corners * factors + shift, 0, np.array([width, height] * 2))

    def _place(self, size: tuple[int, int], height: int, width: int) -> tuple[tuple[int, int], int, int]:
        """The width and height that an image of so many pixels gets, and where it begins in the input."""
        if self.way == "stretch":
            return (width, height), 0, 0
        ratios = height / size[1], width / size[0]
        ratio = max(ratios) if self.way == "crop" else min(ratios)
        across, down = max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))
        return (across, down), (width - across) // 2, (height - down) // 2


LABELS = "labels.csv"
"""Beside images: a line of each, its file and its label."""


def files_in_turn(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """The files of a folder by name; of one without, those of its subfolders, such as of classes: one of each in turn.

    Args:
        folder: Where they are.
        wanted: Which of the files count.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if files := [path for path in entries if not path.is_dir() and wanted(path)]:
        return files
    inner = [files_in_turn(each, wanted) for each in entries if each.is_dir()]
    return [path for row in zip_longest(*inner) for path in row if path is not None]


def labels_of(folder: Path, files: Sequence[Path]) -> list[str]:
    """The label of each file of `files_in_turn`: by labels.csv of the folder, else the name of its subfolder.

    Raises CalibrationError where there is none.
    """
    table = folder / LABELS
    if not table.is_file():
        if loose := [path for path in files if path.parent == folder]:
            raise CalibrationError(
                f"{loose[0]} has no label. Possible: a subfolder for each class, or {table} with lines of file,label."
            )
        return [path.relative_to(folder).parts[0] for path in files]
    named = _named_labels(table)
    names = [path.relative_to(folder).as_posix() for path in files]
    if missing := [name for name in names if name not in named]:
        raise CalibrationError(f"{table} has no label of {missing[0]} (and of {len(missing) - 1} others).")
    return [named[name] for name in names]


def _named_labels(table: Path) -> dict[str, str]:
    """File -> label. Raises CalibrationError for a table that cannot be read, or has other columns."""
    try:
        with table.open(encoding="utf-8", newline="") as handle:
            rows = [row for row in csv.reader(handle) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{table} cannot be read: {error}.") from None
    if wrong := [row for row in rows if len(row) != 2]:
        raise CalibrationError(f"{table}: {','.join(wrong[0])[:80]!r} is no file and label.")
    return {file.strip(): label.strip() for file, label in rows}


def class_numbers(labels: Sequence[str], count: int, known: Mapping[str, int], place: str) -> list[int]:
    """The class of each label: by its name, by its number, or where no name is known, by its place among all names.

    Args:
        labels: Of the images.
        count: Classes of the model.
        known: Name of a class -> its number, by the model.
        place: Of the images, for errors.

    Raises:
        ConfigError: They are neither, or not as many names as there are classes.
    """
    if all(label in known for label in labels):
        return [known[label] for label in labels]
    if all(label.isdecimal() and int(label) < count for label in labels):
        return [int(label) for label in labels]
    names = sorted(set(labels))
    if len(names) == count and not any(name in known for name in names):
        logger.info("The classes of %s are numbered in the order of their names: %s.", place, ", ".join(names)[:200])
        return [names.index(label) for label in labels]
    strange = next(label for label in labels if label not in known)
    raise ConfigError(
        f"{place}: the label {strange!r} is no class of the model, which has {count}. {did_you_mean(strange, known)} "
        f"Also possible: numbers below {count}."
    )
