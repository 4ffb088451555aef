"""Whisper: weights and inputs of its encoder and decoder in int8, calibrated on sounds.

python examples/tasks/whisper.py [--model FOLDER] [--sounds FOLDER] [-o whisper-int8]

Without --model it is a random tiny Whisper, and without --sounds the synthetic voice of speech.py. For a real one:
--model FOLDER (whisper-small ...) and --sounds FOLDER, with .wav files of its 16 kHz, and transcripts of the same names
(.txt), which the decoder then reads. The folder loads with `from_pretrained` of transformers, after `import quark`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import speech
import tiny_models
import torch
from transformers import WhisperForConditionalGeneration

import quark


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", help="folder of a Whisper")
    arguments.add_argument("--sounds", help="folder of .wav files")
    arguments.add_argument("-o", "--output", default="whisper-int8")
    args = arguments.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        model = args.model or tiny_models.whisper(Path(place) / "whisper")
        sounds = args.sounds or tiny_models.sounds(Path(place) / "sounds", speech.voice(8), 8)

        made = quark.quantize(model, "int8", data=sounds, effort="fast", output=args.output, overwrite=True)

        measured = quark.evaluate(model, made, data=sounds)
        sys.stdout.write(f"{measured}\n")
    loaded = WhisperForConditionalGeneration.from_pretrained(made).eval()
    features = measured.batches[0]["input_features"]
    with torch.no_grad():
        tokens = loaded.generate(features, max_new_tokens=8)
    sys.stdout.write(f"tokens of the first sound: {tokens[0].tolist()}\n")
    return float(min(output.sqnr for output in measured.outputs.values()))


if __name__ == "__main__":
    main()
