"""A reranker, which scores passages for a question: a module in memory, weights in int8.

python examples/tasks/reranker.py [--model FOLDER] [-o reranker-int8]

Without --model it is a random tiny BERT, whose order means nothing. For a real one: --model FOLDER of a class with one
label (bge-reranker ...), and questions of yours. Look at the order of the passages, not at the scores alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_models
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import quark

QUESTION = "How do I make a model smaller?"
PASSAGES = (
    "Quantization shrinks a neural network.", "The cat sleeps on the sofa.", "Interest rates rose again this month.",
    "Weights of 8 bits take a quarter of the memory.", "He is a cellist.",
)  # fmt: skip


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", help="folder of a reranker")
    arguments.add_argument("-o", "--output", default="reranker-int8")
    args = arguments.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        folder = args.model or tiny_models.reranker(Path(place) / "reranker")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = scores(model, tokenizer)

    quark.quantize(model, "int8_wo", output=args.output, overwrite=True)
    tokenizer.save_pretrained(args.output)

    found = scores(AutoModelForSequenceClassification.from_pretrained(args.output).eval(), tokenizer)
    for passage in found.argsort(descending=True).tolist():
        sys.stdout.write(f"{expected[passage]:8.4f} -> {found[passage]:8.4f}  {PASSAGES[passage]}\n")
    same = expected.argsort(descending=True) == found.argsort(descending=True)
    return float(same.float().mean())


def scores(model: Any, tokenizer: Any) -> torch.Tensor:
    """A score for each passage."""
    pairs = tokenizer([QUESTION] * len(PASSAGES), list(PASSAGES), padding=True, return_tensors="pt")
    with torch.no_grad():
        logits: torch.Tensor = model(**pairs).logits
    return logits[:, 0]


if __name__ == "__main__":
    main()
