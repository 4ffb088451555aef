"""Reading text in pictures: PP-OCRv4 from the package rapidocr-onnxruntime (11 MB, fetched once).

python examples/tasks/ocr.py [-o ocr-int8.onnx]

Words are drawn with Pillow, read by both models, and compared letter by letter. Recognition is sensitive: where too
many lines change, leave out the samples (weights of 8 bits alone), or look longer with `quark quantize --recover`. For
a model of yours, put its file in place of `source`, and real lines of text in place of `pictures`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from compare import outputs, report
from wheels import packaged

from quark.onnx import ModelQuantizer, QConfig

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.real_models.models import written


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("-o", "--output", default="ocr-int8.onnx")
    args = arguments.parse_args(words)
    source = packaged("rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")
    pictures = written(48, 192, 0.5, 0.5, lines=1)
    seen, unseen = ([{"x": x} for x in pictures(n, seed, source)] for n, seed in ((16, 0), (8, 1)))

    # Stored in 8 bits and decoded when the file is loaded: this model loses too much with quantized inputs.
    ModelQuantizer(QConfig.get_default_config("INT8_CPU_WEIGHTS")).quantize_model(source, args.output, seen)

    letters = alphabet(source)
    pairs = [[text(scores, letters) for scores in outputs(model, unseen)] for model in (source, args.output)]
    for expected, found in zip(*pairs, strict=True):
        sys.stdout.write(f"{expected!r:24} {found!r}\n")
    alike = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(*pairs, strict=True)]
    return report(source, args.output, unseen[0], "letters alike, quantized against float", float(np.mean(alike)))


def alphabet(model: Path) -> list[str]:
    """The letters of the model's classes, from the file; class 0 is the blank of CTC."""
    notes = {entry.key: entry.value for entry in onnx.load(model).metadata_props}
    return ["", *notes["character"].splitlines(), " "]


def text(scores: np.ndarray[Any, Any], letters: list[str]) -> str:
    """Greedy CTC of (1, steps, classes): the best class of each step, repetitions and blanks dropped."""
    best = scores[0].argmax(-1)
    return "".join(letters[k] for before, k in zip([0, *best[:-1]], best, strict=True) if k and k != before)


if __name__ == "__main__":
    main()
