"""The model of solvers.py through packages with interfaces of their own, each in its own environment.

    python foreign_solvers.py llm-compressor gptq | auto-round tuned     and the options of solvers.py

The line that is printed is that of solvers.py. `python -m benchmarks.solver_peers` makes the environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solvers import SHAPES, TOKENS, arguments, measured

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "language_model"
"""A folder with a tokenizer and a config, which these packages ask for; neither is used."""


def llm_compressor_gptq(model: Any, tokens: Any) -> Any:
    """GPTQ of asymmetric 4 bits in groups of 128."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoTokenizer

    model.config._name_or_path = str(FOLDER)  # a config is read from there
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(FOLDER),
        dataset=Dataset.from_dict(rows),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"]),
        max_seq_length=TOKENS,
        num_calibration_samples=len(tokens),
    )
    return model


def auto_round_tuned(model: Any, tokens: Any) -> Any:
    """Learned rounding with the package's default number of steps, asymmetric 4 bits in groups of 128."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    model.config._name_or_path = str(FOLDER)
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(FOLDER),
        scheme="W4A16",
        sym=False,
        dataset=[{"input_ids": row[None]} for row in tokens],
        nsamples=len(tokens),
        seqlen=TOKENS,
        batch_size=min(8, len(tokens)),
        device_map="cpu",
    )
    return rounder.quantize()[0]


WORK: dict[str, Callable[[Any, Any], Any]] = {
    "llm-compressor gptq": llm_compressor_gptq,
    "auto-round tuned": auto_round_tuned,
}


def main() -> None:
    parser = arguments()
    parser.add_argument("package")
    parser.add_argument("algorithm")
    args = parser.parse_args()
    work = WORK[f"{args.package} {args.algorithm}"]
    print(json.dumps({args.algorithm: measured(SHAPES[args.shape], args.dtype, args.batches, work)}))


if __name__ == "__main__":
    main()
