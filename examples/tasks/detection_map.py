"""Mean average precision of a detector, in float and in int8, on images with boxes in the form of COCO.

python examples/tasks/detection_map.py [--model FILE --images FOLDER --boxes WORDS] [-o detector-int8.onnx]

Without --model it is a detector of white squares, made here. For a real one: an ONNX file that gives boxes after
suppression of those that overlap, and a folder of images beside their boxes.json. --boxes says what its outputs are
called and what they hold, and --mean, --std and --resize how it reads an image: docs/howto/tasks.md. Measure on other
images than those that calibrate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_models

import quark


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", help="ONNX file of a detector")
    arguments.add_argument("--images", help="folder of images, with boxes.json")
    arguments.add_argument("--config", default="A8W8", help="or INT8_CPU, where integers are faster on a CPU")
    arguments.add_argument("--boxes", default="labels=,form=xyxy", help="what the outputs are; scores are of classes")
    for name, value in {"mean": "0", "std": "1", "resize": "pad"}.items():
        arguments.add_argument(f"--{name}", default=value)
    arguments.add_argument("-o", "--output", default="detector-int8.onnx")
    args = arguments.parse_args(words)
    reads: dict[str, Any] = {"mean": args.mean, "std": args.std, "resize": args.resize}
    with tempfile.TemporaryDirectory() as place:
        model = args.model or tiny_models.detector(Path(place) / "detector.onnx")
        images = args.images or tiny_models.squares(Path(place) / "squares", 16)

        made = quark.quantize(model, args.config, data=images, output=args.output, overwrite=True, **reads)

        measured = quark.evaluate(model, made, data=images, metric="map", boxes=args.boxes, **reads)
    for name, (before, after) in measured.task.scores.items():
        sys.stdout.write(f"{name}: {before:.3f} -> {after:.3f}\n")
    return float(measured.task.scores["mAP"][1])


if __name__ == "__main__":
    main()
