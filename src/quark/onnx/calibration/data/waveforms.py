"""waveforms: sounds for a model that reads samples of sound: [samples], [batch, samples] or [batch, 1, samples].

    floats lie from -1 to 1, int16 from -32768 to 32767          longer sounds are cut, shorter ones end in zeros

A `preprocessor_config.json` of transformers beside the model says how many samples a second it reads, and whether each
sound is normalized: (x - mean(x)) / sqrt(var(x) + 1e-7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.data_files.sounds import read_sound
from quark.base.files import require_regular
from quark.base.json_objects import plain_json
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, FormatError
from quark.onnx.calibration.data.inputs import Input
from quark.onnx.calibration.data.preprocessing_files import PREPROCESSOR, folders_of

_EPS = 1e-7
_RAW = "Wav2Vec2"
"""Begin of the names of the classes of transformers that give samples as they are; others give spectra."""


@dataclass(frozen=True)
class Waveforms:
    """How sounds are read.

    Attributes:
        rate: Samples a second; None where nobody says it: that of the first sound.
        normalizes: Whether each sound gets the mean 0 and the variance 1.
        source: Who says it, for errors.
    """

    rate: int | None = None
    normalizes: bool = False
    source: str = "the first sound"

    @classmethod
    def of(cls, model: Any) -> Waveforms:
        """Take what a file beside a model says. Raises FormatError for one that is no JSON object of numbers."""
        for folder in folders_of(model):
            file = folder / PREPROCESSOR
            if file.is_file():
                try:
                    said = plain_json(file.read_text("utf-8"))
                    kind = str(said.get("feature_extractor_type", ""))
                    rate = said.get("sampling_rate")
                    raw = kind.startswith(_RAW) and bool(said.get("do_normalize", True))
                    return cls(None if rate is None else int(rate), raw, str(file))
                except (ValueError, TypeError, AttributeError) as error:
                    raise FormatError(f"{file} does not say how sounds are read: {error!r}.") from None
        return cls()

    def read(self, path: Path, entry: Input) -> tuple[NumpyArray, Waveforms]:
        """A sound in the form of an input, without the batch axis; and this, with the rate that is known now.

        Raises:
            CalibrationError: The input reads no sound, or another rate.
            FormatError: The file is no PCM .wav.
        """
        shape, kind = entry.shape or (), np.dtype(entry.dtype)
        inner = len(shape) == 3 and shape[1] == 1
        if not (1 <= len(shape) <= 2 or inner) or not (kind.kind == "f" or kind == np.int16):
            raise CalibrationError(
                f"{path} is a sound, and the input {entry} reads no samples of sound: [samples], [batch, samples] or "
                "[batch, 1, samples]. Possible: .npz files with what the model reads."
            )
        require_regular(path)
        try:
            rate, values = read_sound(path)
        except ValueError as error:
            raise FormatError(f"{path} {error}") from None
        if self.rate not in (None, rate):
            raise CalibrationError(
                f"{path} has {rate} samples a second, and the model reads {self.rate} (by {self.source}): convert it."
            )
        if self.normalizes:
            values = (values - values.mean()) / np.sqrt(values.var() + _EPS)
        if isinstance(shape[-1], int):
            values = np.pad(values[: shape[-1]], (0, max(0, shape[-1] - len(values))))
        values = np.round(values * 32768).clip(-32768, 32767) if kind == np.int16 else values
        return values.astype(kind)[None] if inner else values.astype(kind), replace(self, rate=rate)
