"""A chat model: quantized to 4 bits by Qronos, and asked for an answer before and after.

python examples/tasks/chat.py [--model FOLDER] [--prompt TEXT] [-o chat-uint4]

Without --model it is the example language model, which knows the documentation of Python and no chat.
A folder with a chat template gets the prompt through it. Then serve the folder: docs/howto/vllm.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.llm.text import perplexity, token_windows

MODELS = Path(__file__).parents[1] / "models"


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", default=str(MODELS / "language_model"), help="folder of a language model")
    arguments.add_argument("--prompt", default="The function returns")
    arguments.add_argument("--text", default=str(MODELS / "text" / "calibration.txt"), help="text to calibrate with")
    arguments.add_argument("--samples", type=int, default=16, help="windows of 256 tokens; 128 for a real model")
    arguments.add_argument("-o", "--output", default="chat-uint4")
    args = arguments.parse_args(words)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    heldout = token_windows(tokenizer, MODELS / "text" / "heldout.txt", 256, 8)
    before = perplexity(model, heldout)
    sys.stdout.write(f"float:     perplexity {before:.2f}: {answer(model, tokenizer, args.prompt)!r}\n")

    config = LLMTemplate.get(model.config.model_type).get_config("uint4_wo_64", "qronos")
    quantizer = ModelQuantizer(config)
    data = token_windows(tokenizer, Path(args.text), 256, args.samples)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model, data)), args.output, overwrite=True)

    loaded = AutoModelForCausalLM.from_pretrained(args.output).eval()
    after = perplexity(loaded, heldout)
    sys.stdout.write(f"quantized: perplexity {after:.2f}: {answer(loaded, tokenizer, args.prompt)!r}\n")
    return after / before


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
