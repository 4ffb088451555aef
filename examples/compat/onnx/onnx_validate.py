"""Compares a float and a quantized classifier: size, and accuracy of the first and of the first five guesses.

python examples/compat/onnx/onnx_validate.py --onnx-quant image_classification.onnx --results_folder results
python -m quark.onnx.tools.evaluate --baseline_results_folder results/float --quantized_results_folder results/quant
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from compat_data import DIGITS, digits


def predict(path: str, images: np.ndarray, size: int) -> np.ndarray:
    """Outputs for all images, in batches of `size`."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [images[start : start + size] for start in range(0, len(images), size)]
    return np.concatenate([session.run(None, {name: batch})[0] for batch in batches])


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx-float", default=str(DIGITS / "model.onnx"), help="the float model")
    parser.add_argument("--onnx-quant", default="", help="the quantized model; without it, only the float one")
    parser.add_argument("-b", "--batch-size", type=int, default=100)
    parser.add_argument("--results_folder", default="", help="where the outputs are saved, in float and quant")
    args = parser.parse_args(words)

    images, labels = digits("heldout")
    result: dict[str, float] = {}
    for kind, path in (("float", args.onnx_float), ("quant", args.onnx_quant)):
        if not path:
            continue
        logits = predict(path, images, args.batch_size)
        ranks = np.argsort(-logits, axis=1)
        result[f"{kind}_top1"] = float((ranks[:, 0] == labels).mean())
        result[f"{kind}_top5"] = float((ranks[:, :5] == labels[:, None]).any(axis=1).mean())
        result[f"{kind}_bytes"] = Path(path).stat().st_size
        if args.results_folder:
            folder = Path(args.results_folder) / kind
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "logits.npy", logits)
    for name, value in result.items():
        print(f"{name:12} {value:.4f}")
    return result


if __name__ == "__main__":
    main()
