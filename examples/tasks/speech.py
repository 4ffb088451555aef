"""Speech: is somebody speaking? Silero VAD from the package silero-vad (1 MB of it, fetched once), without samples.

python examples/tasks/speech.py [--wav FILE] [-o vad-int8.onnx]

A file of your own is 16 bit, 16 kHz, mono. Without one, a synthetic voice (pulses through three
moving formants, syllables and pauses) takes its place. The figure is the share of windows of 32 ms where both models
say the same. For another ONNX model of sound, put its file in place of `source`, and its inputs in place of `feed`.
"""

from __future__ import annotations

import argparse
import sys
import wave
from typing import Any

import numpy as np
from compare import outputs, report
from wheels import packaged

from quark.onnx import ModelQuantizer, QConfig

RATE, WINDOW, CONTEXT = 16000, 512, 64
"""Samples of a second, of a window, and of the window before that the model sees again."""


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--wav", help="a file of 16 bit, 16 kHz, mono")
    arguments.add_argument("-o", "--output", default="vad-int8.onnx")
    args = arguments.parse_args(words)
    source = packaged("silero-vad", "silero_vad/data/silero_vad_16k_sequence.onnx")
    signal = read(args.wav) if args.wav else voice()
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), signal])
    starts = range(0, len(signal) - WINDOW + 1, WINDOW)
    if not starts:
        sys.exit(f"{args.wav} is shorter than {WINDOW} samples.")
    windows = np.stack([padded[start : start + CONTEXT + WINDOW] for start in starts])
    state = np.zeros((1, 1, 128), np.float32)
    feed = {"input": windows, "h": state, "c": state}

    # What `quark quantize model.onnx` takes without samples: inputs are quantized as they come.
    ModelQuantizer(QConfig.get_default_config("INT8_CPU_DYNAMIC")).quantize_model(source, args.output)

    (expected,), (found,) = (outputs(model, [feed]) for model in (source, args.output))
    sys.stdout.write(f"windows with speech: {int((expected > 0.5).sum())} of {expected.size}\n")
    same = float(((expected > 0.5) == (found > 0.5)).mean())
    return report(source, args.output, feed, "windows alike, quantized against float", same)


def read(path: str) -> np.ndarray[Any, Any]:
    """The samples of a file, from -1 to 1."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            sys.exit(
                f"{path} has {file.getframerate()} Hz, {file.getnchannels()} channels; needed: 16 bit, 16 kHz, mono"
            )
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def voice(seconds: int = 8) -> np.ndarray[Any, Any]:
    """Pulses of some 120 Hz through three resonators whose formants move; syllables, pauses, a little noise."""
    time = np.arange(RATE * seconds) / RATE
    noise = np.random.default_rng(0).normal(0, 0.003, (2, len(time)))
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.6 * time) + 10 * np.sin(2 * np.pi * 2.3 * time)
    pulses = np.diff(np.floor(np.cumsum(pitch) / RATE), prepend=0) - 120 / RATE + noise[0]
    voiced = np.zeros_like(time)
    for middle, swing, width in ((550, 250, 80), (1400, 500, 100), (2500, 200, 150)):
        radius = np.exp(-np.pi * width / RATE)
        turn = 2 * radius * np.cos(2 * np.pi * (middle + swing * np.sin(2 * np.pi * 1.7 * time + middle)) / RATE)
        last = before = 0.0
        for n, pulse in enumerate(pulses):
            last, before = pulse + turn[n] * last - radius**2 * before, last
            voiced[n] += last
    heard = (np.sin(2 * np.pi * 3.5 * time) > -0.6) & (np.sin(2 * np.pi * 0.25 * time) > -0.2)
    return (0.3 * voiced / np.abs(voiced).max() * heard + noise[1]).astype(np.float32)


if __name__ == "__main__":
    main()
