"""Images of calibration data: one reader for all flows, of formats that Pillow decodes itself, in 8 bits a colour."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import SEEK_END
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quark.base.log import logger
from quark.errors import CalibrationError, ConfigError, did_you_mean, require_packages

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Others have no place in data from elsewhere: Pillow runs another program for EPS, whatever the file is called."""
_FREE = 1 << 26
"""Bytes of pixels that any file may unfold to."""
_RATIO = 100
"""Above them: so many bytes of pixels for each byte of a file. Photographs have less than 40."""


def open_image(file: Path | BinaryIO, mode: str | None = None) -> Any:
    """The image of Pillow in a file, loaded and closed.

    Args:
        file: A regular file in one of FORMATS, or what is in it.
        mode: "RGB" or "L"; None: grey stays grey, all else becomes RGB.

    Raises:
        MissingDependencyError: pillow is not installed.
        ValueError: Its pixels have no 8-bit form, or are many more bytes than those of a picture of this file's size.
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
        _check_size(image, file)
        # Pillow cuts off what is above 255 where it converts these.
        wide = _in_8_bits(image) if image.mode[0] in "IF" else image
        return wide.convert(mode or ("L" if wide.mode in ("1", "L") else "RGB"))


def _check_size(image: Any, file: Path | BinaryIO) -> None:
    """Raise ValueError for a file of a few bytes that unfolds to very many, of which readers make copies."""
    unfolded = image.width * image.height * len(image.getbands())
    stored = file.stat().st_size if isinstance(file, Path) else _length(file)
    if unfolded > max(_FREE, _RATIO * stored):
        raise ValueError(
            f"its {stored} bytes unfold to {image.width} x {image.height} pixels, as no photograph does. Possible: "
            "scale it down"
        )


def _length(file: BinaryIO) -> int:
    place = file.tell()
    length = file.seek(0, SEEK_END)
    file.seek(place)
    return length


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
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""Names of the filters of Pillow."""
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)


@dataclass(frozen=True)
class Resizing:
    """How images get the size of an input.

    Attributes:
        way: One of WAYS.
        height, width: In pixels; None for those of the input.
        scale: With "crop", what the image is scaled to before: pixels of the shorter side, or height and width. None:
            just enough to cover the input.
        filter: One of FILTERS.
        fill: With "pad", the grey around the image, of 0 to 255.
        corner: With "pad", whether the image is in the upper left corner; else in the middle.
    """

    way: str
    height: int | None = None
    width: int | None = None
    scale: tuple[int, ...] | None = None
    filter: str = "bilinear"
    fill: int = _GREY
    corner: bool = False

    @classmethod
    def parse(cls, text: str) -> Resizing:
        """Of "pad", or of "crop:224x224,scale=256,filter=bicubic", height first. Raises ConfigError for another."""
        first, *more = text.split(",")
        way, colon, size = first.partition(":")
        if way not in WAYS:
            raise ConfigError(f"Images cannot be resized by {way!r}. {did_you_mean(way, WAYS)}")
        matched = _SIZE.fullmatch(size)
        if colon and matched is None:
            raise ConfigError(f"The size of images is HEIGHTxWIDTH, as in {way}:480x640, got {text!r}.")
        sides = (None, None) if matched is None else tuple(map(int, matched.groups()))
        return cls(way, *sides, **dict(_said_of(way, part) for part in more))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        size = "" if self.height is None else f":{self.height}x{self.width}"
        scale = "" if self.scale is None else f",scale={'x'.join(map(str, self.scale))}"
        kind = "" if self.filter == "bilinear" else f",filter={self.filter}"
        fill = "" if self.fill == _GREY else f",fill={self.fill}"
        return f"{self.way}{size}{scale}{kind}{fill}{',corner' if self.corner else ''}"

    def apply(self, image: Any, height: int, width: int) -> Any:
        """An image of Pillow in the given size [pixels]; one that has it is returned as it is, if nothing is cut."""
        from PIL import Image  # of an extra: only where images are read

        if image.size == (width, height) and self.scale is None:
            return image
        (across, down), left, top = self._place(image.size, height, width)
        scaled = image.resize((across, down), Image.Resampling[self.filter.upper()])
        if self.way == "stretch":
            return scaled
        fill = self.fill if self.way == "pad" else 0
        full = Image.new(image.mode, (width, height), (fill,) * len(image.getbands()))
        full.paste(scaled, (left, top))
        return full

    def boxes(self, corners: Any, size: tuple[int, int], height: int, width: int) -> Any:
        """The boxes of an image where they are after `apply`.

        Args:
            corners: (boxes, 4), x and y of two corners [pixels].
            size: Width and height of the image.
            height, width: Of the input.
        """
        if size == (width, height) and self.scale is None:
            return corners
        (across, down), left, top = self._place(size, height, width)
        factors, shift = np.array([across / size[0], down / size[1]] * 2), np.array([left, top] * 2)
        return np.clip(corners * factors + shift, 0, np.array([width, height] * 2))

    def _place(self, size: tuple[int, int], height: int, width: int) -> tuple[tuple[int, int], int, int]:
        """The width and height that an image of so many pixels gets, and where it begins in the input."""
        if self.way == "stretch":
            return (width, height), 0, 0
        if self.scale is not None and len(self.scale) == 2:
            across, down = self.scale[1], self.scale[0]
        elif self.scale is not None:
            # As others do it: the longer side is cut to whole pixels.
            across, down = (int(self.scale[0] * side / min(size)) for side in size)
        else:
            ratios = height / size[1], width / size[0]
            ratio = max(ratios) if self.way == "crop" else min(ratios)
            across, down = max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))
        if self.way == "crop":
            return (across, down), -((across - width) // 2), -((down - height) // 2)
        left, top = (0, 0) if self.corner else ((width - across) // 2, (height - down) // 2)
        return (across, down), left, top


def _said_of(way: str, part: str) -> tuple[str, Any]:
    """The field of a Resizing that a part of its text says, and its value. Raises ConfigError for another."""
    name, _, value = part.partition("=")
    sizes = _SIZE.fullmatch(value)
    if way == "crop" and name == "scale" and (sizes is not None or re.fullmatch(r"[1-9]\d{0,4}", value, re.ASCII)):
        return "scale", tuple(map(int, (value,) if sizes is None else sizes.groups()))
    if name == "filter" and value in FILTERS:
        return "filter", value
    if way == "pad" and name == "fill" and re.fullmatch(r"\d{1,3}", value, re.ASCII) and int(value) <= 255:
        return "fill", int(value)
    if way == "pad" and part == "corner":
        return "corner", True
    possible = {"crop": "scale=256, scale=256x256, ", "pad": "fill=0 to 255, corner, "}.get(way, "")
    raise ConfigError(f"resize: {part!r} says nothing of {way!r}. Possible: {possible}filter={', '.join(FILTERS)}.")


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
