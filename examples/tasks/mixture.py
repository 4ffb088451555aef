"""A mixture of experts, quantized from file to file: no model is loaded, about two tensors at a time are in memory.

python examples/tasks/mixture.py [--model FOLDER] [--scheme int4_wo_32] [-o mixture-int4]

Without --model it is a random Qwen3-MoE. With --model FOLDER the script stays as it is: schemes that need no data go
from file to file (`quark schemes` lists them), and what both models give is compared block by block where memory is too
small for them. With data, one block is in memory at a time: docs/guide/large_models.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import tiny_models

import quark

MODELS = Path(__file__).parents[1] / "models"


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", help="folder of a mixture")
    arguments.add_argument("--scheme", default="int4_wo_32")
    arguments.add_argument("-o", "--output", default="mixture-int4")
    args = arguments.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        model = args.model or tiny_models.mixture(Path(place) / "mixture")

        made = quark.quantize(model, args.scheme, verdict=False, output=args.output, overwrite=True)

        measured = quark.evaluate(model, made, data=MODELS / "text" / "heldout.txt", windows=2, length=128)
    sys.stdout.write(f"{measured}\n")
    return float(measured.sizes[1] / measured.sizes[0])


if __name__ == "__main__":
    main()
