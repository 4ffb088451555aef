"""Images of calibration data: one reader for all flows, of formats that Pillow decodes itself, in 8 bits a colour."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import require_packages

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
