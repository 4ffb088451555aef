"""`python -m benchmarks.gguf_rows PYTHON`: files of each architecture and block type, computed by llama.cpp.

PYTHON is an interpreter with the package cyllama. In float32, the KL divergence of llama.cpp's logits from those of the
model in transformers has to be rounding: then what the file is like is stored for the tests. With --types each
architecture is written in each mix, too: the divergence is that from our model of the same blocks, and what is left is
that llama.cpp rounds the inputs of layers to 8 bits.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from quark.gguf.mixes import MIXES
from quark.torch import ModelQuantizer, gguf_config
from tests.models.gguf_rows import CONFIGS, FACTS, VARIANTS, facts_of, filled, known_facts, write_gguf
from tests.models.torch_zoo import LANGUAGE_MODEL

IDS = np.random.RandomState(0).randint(3, 2048, 40)
READER = Path(__file__).with_name("llama_cpp.py")
ROUNDING = 1e-6
"""Nats. Float32 differs by 1e-13; llama.cpp's table of GELU, float16, by up to 5e-7."""


def log_probabilities(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(tokens, vocabulary), in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def divergence(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """Mean KL divergence in nats."""
    ours, theirs = log_probabilities(expected), log_probabilities(found)
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


def compute(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(torch.from_numpy(IDS)[None]).logits[0].float().numpy()
    return found


def models(names: Sequence[str], mixes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What the table calls each, and the model."""
    for name in names:
        if not mixes:
            yield name, filled(name)
        for mix in mixes:
            model = filled(name)
            quantizer = ModelQuantizer(gguf_config(model, mix))
            yield f"{name} {mix}", quantizer.freeze(quantizer.quantize_model(model))


def by_llama_cpp(python: str, file: Path) -> np.ndarray[Any, Any] | str:
    """The logits, or what it said."""
    ids = file.with_suffix(".ids.npy")
    np.save(ids, IDS)
    done = subprocess.run([python, READER, ids, file.parent, file], capture_output=True, text=True)
    found, said = (Path(f"{file}{suffix}") for suffix in (".npy", ".txt"))
    if found.exists():
        return np.asarray(np.load(found))
    return said.read_text() if said.exists() else next((x for x in done.stderr.splitlines() if "ASSERT" in x), "died")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("names", nargs="*", help="of CONFIGS or VARIANTS; all if none is given")
    parser.add_argument("--types", nargs="*", help="mixes of block types; all if none is given")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    mixes = () if arguments.types is None else arguments.types or list(MIXES)
    facts = known_facts()
    for name, model in models(arguments.names or [*CONFIGS, *VARIANTS], mixes):
        with TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            expected = compute(model)
            write_gguf(model, file, LANGUAGE_MODEL)
            found = by_llama_cpp(arguments.python, file)
            value = found if isinstance(found, str) else divergence(expected, found[:, : expected.shape[1]])
            if not mixes and isinstance(value, float) and value < ROUNDING:
                facts[name] = facts_of(file)
                rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(facts[key])}" for key in sorted(facts))
                FACTS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
            print(f"| {name} | {value if isinstance(value, str) else f'{value:.1e}'} |", flush=True)


if __name__ == "__main__":
    main()
