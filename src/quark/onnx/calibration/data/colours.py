"""Colours of images as a model was trained to read them: (image / 255 - mean) / std, each for a colour or for all.

Guides give the same pair in units of 0 to 255, as in (image - 127.5) / 128: mean / 255 and std / 255 here. In the wrong
units every image becomes a constant, which a range would be calibrated on without a sign that anything is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quark.core.array import NumpyArray
from quark.errors import ConfigError, FormatError

PREPROCESSOR = "preprocessor_config.json"
"""The file beside a model that says how its images are read."""
_LARGEST_MEAN, _LARGEST_STD = 1.0, 2.0
"""Of images from 0 to 1: no mean is larger, and under a larger std all of them lie within half of one."""


@dataclass(frozen=True)
class Colours:
    """How images are read as floats.

    Attributes:
        mean, std: In units of 0 to 1, float32: one value, or one for each colour.
        source: Where they are from, for the log.
    """

    mean: NumpyArray
    std: NumpyArray
    source: str

    @classmethod
    def given(cls, mean: Sequence[float], std: Sequence[float], source: str = "mean and std") -> Colours:
        """Take what was given. Raises ConfigError for a std that is not over 0, and for the units of 0 to 255."""
        if not np.all(np.asarray(std) > 0):
            raise ConfigError(f"The std of images must be over 0, got {list(std)}.")
        if max(mean) > _LARGEST_MEAN or max(std) > _LARGEST_STD:
            found = cls(np.array(mean, np.float32), np.array(std, np.float32), source)
            low, high = found.range
            pair = " ".join(
                f"--{name} {','.join(f'{value / 255:.4g}' for value in values)}"
                for name, values in (("mean", mean), ("std", std))
            )
            raise ConfigError(
                f"mean {_text(mean)} and std {_text(std)} are no values for (image / 255 - mean) / std: all images "
                f"would lie from {low:.4g} to {high:.4g}. In units of 0 to 255, as in (image - mean) / std, they are "
                f"{pair}."
            )
        return cls(np.array(mean, np.float32), np.array(std, np.float32), source)

    @classmethod
    def beside(cls, model: Any) -> Colours | None:
        """Return what the `preprocessor_config.json` beside a model file says; None without one.

        Raises:
            FormatError: It is no JSON object of numbers.
        """
        file = Path(model).parent / PREPROCESSOR if isinstance(model, (str, Path)) else None
        if file is None or not file.is_file():
            return None
        try:
            read = json.loads(file.read_text("utf-8"))
            factor = 255 * (float(read.get("rescale_factor", 1 / 255)) if read.get("do_rescale", True) else 1.0)
            normalizes = read.get("do_normalize", "image_mean" in read)
            mean, std = (read["image_mean"], read["image_std"]) if normalizes else ([0.0], [1.0])
            mean, std = ([float(value) / factor for value in np.atleast_1d(each)] for each in (mean, std))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{file} does not say how images are read: {error!r}.") from None
        return cls.given(mean, std, str(file))

    @property
    def range(self) -> tuple[float, float]:
        """Between which values all images lie."""
        return float(((0 - self.mean) / self.std).min()), float(((1 - self.mean) / self.std).max())

    def __call__(self, image: NumpyArray, path: Path) -> NumpyArray:
        """An image of 0 to 255, (height, width, colours), as floats. Raises ConfigError for other colours."""
        if {len(self.mean), len(self.std)} - {1, image.shape[-1]}:
            raise ConfigError(f"mean and std of {path} take one number or {image.shape[-1]}, one for each colour.")
        return (image / np.float32(255) - self.mean) / self.std

    def __str__(self) -> str:
        low, high = self.range
        return (
            f"(image / 255 - mean) / std with mean {_text(self.mean)} and std {_text(self.std)} (of {self.source}), so "
            f"from {low:.3g} to {high:.3g}"
        )


def _text(values: Any) -> str:
    return ",".join(f"{value:.4g}" for value in np.atleast_1d(values))
