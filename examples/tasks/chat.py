"""A chat model for vLLM: quantized to 4 bits by Qronos, and asked for an answer before and after.

python examples/tasks/chat.py [--model FOLDER] [--prompt TEXT] [-o chat-vllm]

Without --model it is the example language model, which knows the documentation of Python and no chat. For a model of
yours: --model FOLDER --text FILE --samples 128, with texts or chats (.jsonl) like those that it will see. A folder with
a chat template gets the prompt through it. Then serve the folder: docs/howto/vllm.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import quark

MODELS = Path(__file__).parents[1] / "models"


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", default=str(MODELS / "language_model"), help="folder of a language model")
    arguments.add_argument("--prompt", default="The function returns")
    arguments.add_argument("--text", default=str(MODELS / "text" / "calibration.txt"), help="text to calibrate with")
    arguments.add_argument("--samples", type=int, default=16, help="windows of 256 tokens; 128 for a real model")
    arguments.add_argument("-o", "--output", default="chat-vllm")
    args = arguments.parse_args(words)

    made = quark.quantize(
        args.model, goal="vllm", data=args.text, samples=args.samples, length=256, verdict=False, output=args.output,
        overwrite=True,
    )  # fmt: skip
    measured = quark.evaluate(args.model, made, data=MODELS / "text" / "heldout.txt", windows=8, length=256)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    models = {"float": measured.before, "quantized": measured.after}
    for (name, model), perplexity in zip(models.items(), measured.comparison.perplexity, strict=True):
        sys.stdout.write(f"{name:9} perplexity {perplexity:.2f}: {answer(model, tokenizer, args.prompt)!r}\n")
    sys.stdout.write(f"run it: vllm serve {made}\n")
    return float(measured.comparison.perplexity[1] / measured.comparison.perplexity[0])


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """At most 24 tokens, the likeliest each."""
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
