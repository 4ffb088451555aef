"""Image classification: handwritten digits, by the example classifier.

python examples/tasks/image_classification.py [--config XINT8] [-o digits-int8.onnx]

For the compiler of an NPU, --config names one of its configurations (docs/howto/npu.md). For a classifier of your own,
put its file in place of `source`, and its images, preprocessed as for training, in place of the digits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from compare import outputs, report

from quark.onnx import ModelQuantizer, QConfig

FOLDER = Path(__file__).parents[1] / "models" / "digits_cnn"


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    # INT8_CPU is what `quark quantize model.onnx --calib ...` takes: integers where they are faster on a CPU.
    arguments.add_argument("--config", default="INT8_CPU", help="XINT8, A8W8 or another for an NPU")
    arguments.add_argument("-o", "--output", default="digits-int8.onnx")
    args = arguments.parse_args(words)
    source, data = FOLDER / "model.onnx", np.load(FOLDER / "data.npz")
    seen, unseen = ((data[name] / 16).astype(np.float32) for name in ("calibration_images", "heldout_images"))

    samples = [{"image": batch} for batch in np.split(seen, 16)]
    ModelQuantizer(QConfig.get_default_config(args.config)).quantize_model(source, args.output, samples)

    (expected,), (found,) = (outputs(model, [{"image": unseen}]) for model in (source, args.output))
    labels = data["heldout_labels"]
    sys.stdout.write(f"accuracy of the float model: {float((expected.argmax(1) == labels).mean()):.3f}\n")
    accuracy = float((found.argmax(1) == labels).mean())
    return report(source, args.output, {"image": unseen}, "accuracy of the quantized model", accuracy)


if __name__ == "__main__":
    main()
