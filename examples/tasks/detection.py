"""Detection: a YOLOv8n from the package nudenet, which finds faces, on a photograph from scikit-image.

python examples/tasks/detection.py [--image FILE] [-o detector-int8.onnx]

Both packages (12 and 13 MB) are fetched once. Parts of the photograph calibrate, other parts are held out. The figure
is box F1: of the boxes of both models, the share that overlap by half and have one class. For a detector of your own,
make samples as it was trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from compare import outputs, report
from PIL import Image
from wheels import packaged

from quark.onnx import ModelQuantizer, QConfig

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.real_models.models import box_f1


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--image", help="another photograph")
    arguments.add_argument("-o", "--output", default="detector-int8.onnx")
    args = arguments.parse_args(words)
    source = packaged("nudenet", "nudenet/320n.onnx")
    photograph = Image.open(args.image or packaged("scikit-image", "skimage/data/astronaut.png")).convert("RGB")
    seen, unseen = ([{"images": x} for x in parts(photograph, count, seed)] for count, seed in ((16, 0), (8, 1)))

    ModelQuantizer(QConfig.get_default_config("INT8_CPU")).quantize_model(source, args.output, seen)

    pairs = zip(outputs(source, unseen), outputs(args.output, unseen), strict=True)
    hits, all_boxes = map(sum, zip(*(box_f1(x, y) for x, y in pairs), strict=True))
    if not all_boxes:
        sys.exit("Neither model finds anything in these parts: take another photograph.")
    sys.stdout.write(f"boxes of both models: {int(all_boxes)}\n")
    return report(source, args.output, unseen[0], "box F1, quantized against float", hits / all_boxes)


def parts(photograph: Image.Image, count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Parts of the upper left, each (1, 3, 320, 320), from 0 to 1."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        left, top = (int(size * random.uniform(0, 0.2)) for size in photograph.size)
        side = int(min(photograph.size) * random.uniform(0.55, 0.8))
        part = photograph.crop((left, top, left + side, top + side)).resize((320, 320), Image.Resampling.BILINEAR)
        found.append((np.asarray(part, np.float32) / 255).transpose(2, 0, 1)[None])
    return found


if __name__ == "__main__":
    main()
