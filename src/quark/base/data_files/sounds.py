"""Sounds of calibration data: one reader for all flows, of PCM .wav files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


def read_sound(file: Path | BinaryIO) -> tuple[int, np.ndarray[Any, np.dtype[np.float32]]]:
    """Samples a second, and the mean of the channels between -1 and 1.

    Raises ValueError for what is no PCM .wav of 8 to 32 bits; says what is wrong with it.
    """
    try:
        with wave.open(str(file) if isinstance(file, Path) else file) as opened:
            width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            size = opened.getnframes() * channels * width
            raw = opened.readframes(opened.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ValueError(f"cannot be read as PCM .wav: {error}. Possible: convert it.") from None
    if width > 4 or len(raw) != size:
        what = f"has samples of {8 * width} bits" if width > 4 else f"says {size} bytes of sound and holds {len(raw)}"
        raise ValueError(f"{what}. Possible: convert it to PCM .wav of 8 to 32 bits.")
    # Samples of a byte are unsigned; wider ones are signed, and 24 bits become the upper ones of 32.
    octets = np.frombuffer(raw, np.uint8).reshape(-1, channels, width)
    if width == 1:
        values = (octets[..., 0].astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((*octets.shape[:2], 4), np.uint8)
        wide[..., 4 - width :] = octets
        values = wide.view("<i4")[..., 0].astype(np.float32) / (1 << 31)
    return rate, values.mean(1)
