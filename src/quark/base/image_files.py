"""Images of calibration data: one reader for all flows, of formats that Pillow decodes itself, in 8 bits a colour."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import ConfigError, did_you_mean, require_packages

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Others have no place in data from elsewhere: Pillow runs another program for EPS, whatever the file is called."""


def open_image(path: Path, mode: str | None = None) -> Any:
    """The image of Pillow in a file, loaded and closed.

    Args:
        path: A regular file in one of FORMATS.
        mode: "RGB" or "L"; None: grey stays grey, all else becomes RGB.

    Raises:
        MissingDependencyError: pillow is not installed.
        ValueError: Its pixels have no 8-bit form.
        Exception: Of Pillow, for what it cannot read; each format has its own.
    """
    require_packages(f"Reading the image {path.name}", "images", "PIL")
    from PIL import Image, UnidentifiedImageError  # of an extra: only where images are read

    with warnings.catch_warnings():
        # Pillow warns of more pixels than a photograph has, and refuses twice as many.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            opened = Image.open(path, formats=FORMATS)
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
        if self.way == "stretch":
            return image.resize((width, height), Image.Resampling.BILINEAR)
        ratios = height / image.height, width / image.width
        ratio = max(ratios) if self.way == "crop" else min(ratios)
        size = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
        scaled = image.resize(size, Image.Resampling.BILINEAR)
        left, top = (width - scaled.width) // 2, (height - scaled.height) // 2
        full = Image.new(image.mode, (width, height), (_GREY,) * len(image.getbands()))
        full.paste(scaled, (left, top))
        return full
