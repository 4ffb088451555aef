"""preprocessing: how images become what a model was trained to read. The result is checked, and told in a line.

    resize, crop or pad -> order of the colours -> (image / 255 - mean) / std -> the layout of the input

What nobody gave is what the model or a file beside it says (`preprocessing_files.py`). Guides give mean and std in
units of 0 to 255 as well, as in (image - 127.5) / 128. In the wrong units every image becomes a constant, or a range
that no network was trained with, without a sign that anything is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.base.data_files.images import Resizing
from quark.core.array import NumpyArray
from quark.errors import ConfigError

ORDERS = ("RGB", "BGR")
_LARGEST_MEAN, _LARGEST_STD = 1.0, 2.0
"""Of images from 0 to 1: no mean is larger, and under a larger std all of them lie within half of one."""
_WIDEST = 512.0
"""No network reads images of a wider range: raw ones reach 255."""


@dataclass(frozen=True)
class Preprocessing:
    """How the images of one model are read.

    Attributes:
        mean, std: In units of 0 to 1, float32: one value, or one for each colour. None where nobody says them.
        resizing: How images get their size; None where they have it.
        order: Of the colours, one of ORDERS; "" where nobody says it, which is RGB.
        source: Who says it, for the log.
    """

    mean: NumpyArray | None = None
    std: NumpyArray | None = None
    resizing: Resizing | None = None
    order: str = ""
    source: str = ""

    @classmethod
    def given(
        cls,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        resize: str | None = None,
        order: str | None = None,
        pixel_max: float | None = None,
    ) -> Preprocessing:
        """Take what a user gave.

        Args:
            mean, std: As in (pixels - mean) / std, both or neither.
            resize: See `Resizing.parse`.
            order: "RGB" or "BGR".
            pixel_max: The value of a white pixel before mean and std, 1 or 255; None for 1. Of 255 without mean and
                std, pixels stay 0 to 255.

        Raises:
            ConfigError: For a std that is not over 0, for the units of 0 to 255, and for a range that no network reads.
        """
        if (mean is None) != (std is None):
            raise ConfigError("mean and std of images belong together: give both or neither.")
        if pixel_max is not None and pixel_max not in (1, 255):
            raise ConfigError(f"The value of a white pixel (--pixel-max) is 1 or 255, got {pixel_max:g}.")
        if order is not None and order.upper() not in ORDERS:
            raise ConfigError(f"The order of colours (--colours) is RGB or BGR, got {order!r}.")
        white, source = float(pixel_max or 1), "mean and std"
        if mean is None and pixel_max is not None:
            mean, std, source = [0.0], [1.0], "pixel_max"
        pair: dict[str, Any] = {}
        if mean is not None and std is not None:
            pair = {"mean": [value / white for value in mean], "std": [value / white for value in std]}
        return cls.of(**pair, resizing=None if resize is None else Resizing.parse(resize), order=order, source=source)

    @classmethod
    def of(
        cls,
        source: str,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        resizing: Resizing | None = None,
        order: str | None = None,
    ) -> Preprocessing:
        """Make one of numbers in units of 0 to 1. Raises ConfigError as `given` does."""
        if mean is None or std is None:
            return cls(None, None, resizing, (order or "").upper(), source)
        if not np.all(np.asarray(std) > 0):
            raise ConfigError(f"The std of images must be over 0, got {list(std)}.")
        found = cls(np.array(mean, np.float32), np.array(std, np.float32), resizing, (order or "").upper(), source)
        low, high = found.range
        if max(mean) > _LARGEST_MEAN or max(std) > _LARGEST_STD:
            pair = " ".join(
                f"--{name} {','.join(f'{value / 255:.4g}' for value in values)}"
                for name, values in (("mean", mean), ("std", std))
            )
            raise ConfigError(
                f"mean {_text(mean)} and std {_text(std)} (of {source}) are no values for (image / 255 - mean) / std: "
                f"all images would lie from {low:.4g} to {high:.4g}. In units of 0 to 255, as in (image - mean) / std, "
                f"they are {pair}, or themselves with --pixel-max 255."
            )
        if high - low > _WIDEST:
            raise ConfigError(
                f"mean {_text(mean)} and std {_text(std)} (of {source}) make images from {low:.4g} to {high:.4g}, "
                "which no network reads. Possible: --mean, --std and --pixel-max of its training; --pixel-max 255 "
                "alone for pixels of 0 to 255 as they are."
            )
        return found

    def over(self, said: Preprocessing | None) -> Preprocessing:
        """This one, and of another what this one leaves open."""
        if said is None:
            return self
        mean, std = (said.mean, said.std) if self.mean is None else (self.mean, self.std)
        own = self.mean is not None
        others = (self.resizing is None and said.resizing) or (not self.order and said.order)
        source = f"{self.source} and {said.source}" if own and others else self.source if own else said.source
        return Preprocessing(mean, std, self.resizing or said.resizing, self.order or said.order, source)

    @property
    def range(self) -> tuple[float, float]:
        """Between which values all images lie."""
        if self.mean is None or self.std is None:
            return 0.0, 255.0
        return float(((0 - self.mean) / self.std).min()), float(((1 - self.mean) / self.std).max())

    @property
    def as_options(self) -> dict[str, str]:
        """The options of a command, and keys of a recipe, that say the same."""
        said: dict[str, str] = {}
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None:
                said[name] = ",".join(np.format_float_positional(value, trim="-") for value in np.atleast_1d(values))
        if self.resizing is not None:
            said["resize"] = str(self.resizing)
        if self.order:
            said["colours"] = self.order.lower()
        return said

    def in_order(self, image: NumpyArray) -> NumpyArray:
        """An image (height, width, colours), of RGB, in the order of the model."""
        return image[..., ::-1] if self.order == "BGR" and image.shape[-1] == 3 else image

    def normalised(self, image: NumpyArray, where: str) -> NumpyArray:
        """An image of 0 to 255, (height, width, colours), as floats. Raises ConfigError for other colours."""
        assert self.mean is not None and self.std is not None
        if {len(self.mean), len(self.std)} - {1, image.shape[-1]}:
            raise ConfigError(f"mean and std of {where} take one number or {image.shape[-1]}, one for each colour.")
        return (image / np.float32(255) - self.mean) / self.std

    def told(self, shape: Sequence[int], first: bool, floats: bool) -> str:
        """A line for the log.

        Args:
            shape: Height, width and colours of an image.
            first: Whether colours are the first axis of the input.
            floats: Whether the input is of floats; else its pixels are 0 to 255.
        """
        order = "grey" if shape[-1] == 1 else self.order or "RGB"
        how = "as they are" if self.resizing is None else str(self.resizing)
        size = f"Images are read as {order}, {shape[0]}x{shape[1]} ({how}), {'CHW' if first else 'HWC'}"
        if not floats or self.mean is None or self.std is None:
            return f"{size}, 0 to 255."
        low, high = self.range
        return (
            f"{size}: (image / 255 - mean) / std with mean {_text(self.mean)} and std {_text(self.std)} (of "
            f"{self.source}), so from {low:.3g} to {high:.3g}."
        )


def _text(values: Any) -> str:
    return ",".join(f"{value:.4g}" for value in np.atleast_1d(values))
