"""A GGUF file for llama.cpp, with and without an importance matrix.

python examples/tasks/gguf_imatrix.py [--model FOLDER] [--imatrix FILE] [--scheme q3_k_m] [-o imatrix.gguf]

Without --model it is the example language model. Without --imatrix the matrix is made of a text. Those that others
publish beside a model fit too: --imatrix FILE (.gguf or .dat), with the folder of the same model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import quark

MODELS = Path(__file__).parents[1] / "models"


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", default=str(MODELS / "language_model"), help="folder of a language model")
    arguments.add_argument("--imatrix", type=Path, help="importance matrix of llama.cpp")
    arguments.add_argument("--text", default=str(MODELS / "text" / "calibration.txt"), help="text to make one of")
    arguments.add_argument("--scheme", default="q3_k_m", help="a mix of llama.cpp")
    arguments.add_argument("-o", "--output", default="imatrix.gguf")
    args = arguments.parse_args(words)
    losses = {}
    with tempfile.TemporaryDirectory() as place:
        common: dict[str, Any] = {"goal": "llama.cpp", "effort": "fast", "verdict": False, "overwrite": True}
        plain, matrix = Path(place) / "plain.gguf", args.imatrix or Path(place) / "imatrix.gguf"
        made_of = {"data": args.text, "samples": 32, "length": 256, "save_imatrix": matrix}
        quark.quantize(args.model, args.scheme, output=plain, **common, **({} if args.imatrix else made_of))

        quark.quantize(args.model, args.scheme, imatrix=matrix, output=args.output, **common)

        for name, file in (("without", plain), ("with", args.output)):
            data = {"data": MODELS / "text" / "heldout.txt", "windows": 8, "length": 256}
            losses[name] = quark.evaluate(args.model, file, **data).comparison.kl
            sys.stdout.write(f"{name:8} the matrix: KL divergence {losses[name]:.4f} nats\n")
    return float(losses["with"] / losses["without"])


if __name__ == "__main__":
    main()
