"""`python -m benchmarks.real_language_models.kv_caches --place FOLDER`: what caches of 8 bits lose at long contexts.

KL divergence from the float model in millinats, over all positions, the first and the last NEAR; two windows of LENGTH
tokens give the scales, two of other prose judge.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_language_models.models import float_folder
from benchmarks.real_language_models.texts import texts
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.llm.text import token_windows

LENGTH, WINDOWS, NEAR = 4096, 2, 512
CACHES = ("fp8", "int8", "fp8_per_head", "int8_per_head")
CASES: dict[str, dict[str, str]] = {
    **{f"cache {kind}": {"kv_cache_scheme": kind} for kind in CACHES},
    "attention fp8": {"attention_scheme": "fp8"},
}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--place", type=Path, required=True, help="where the model and the texts are kept")
    given = parser.parse_args()
    folder, of = float_folder("smollm2", given.place), texts(given.place)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calibration, held_out = (token_windows(tokenizer, of[name], LENGTH, WINDOWS) for name in ("calibration", "prose"))
    expected = [_scores(_load(folder), window) for window in held_out]
    print(f"float: perplexity {_perplexity(expected, held_out):.3f}", flush=True)
    template = LLMTemplate.get("llama")
    for case in given.cases or CASES:
        config: Any = template.get_config("bfloat16", **CASES[case])  # type: ignore[arg-type]
        model = ModelQuantizer(config).quantize_model(_load(folder), calibration)
        found = [_scores(model, window) for window in held_out]
        lost = 1e3 * torch.stack([_divergence(*pair) for pair in zip(expected, found, strict=True)]).mean(0)
        same = torch.stack(
            [(a.argmax(-1) == b.argmax(-1)).float().mean() for a, b in zip(expected, found, strict=True)]
        )
        print(
            f"{case}: perplexity {_perplexity(found, held_out):.3f}, KL {lost.mean():.2f}, first {NEAR} tokens "
            f"{lost[:NEAR].mean():.2f}, last {lost[-NEAR:].mean():.2f}, same first choice {100 * same.mean():.2f} %",
            flush=True,
        )


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _scores(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Log probabilities, (tokens, vocabulary); in half precision, as there are many."""
    return torch.log_softmax(model(window).logits[0].float(), -1).half()


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Of each token, in nats."""
    log_p = expected.float()
    return (log_p.exp() * (log_p - found.float())).sum(-1)


def _perplexity(scores: list[torch.Tensor], windows: list[torch.Tensor]) -> float:
    lost = [
        -log_p[:-1].float().gather(1, window[0, 1:, None]).mean().item()
        for log_p, window in zip(scores, windows, strict=True)
    ]
    return math.exp(sum(lost) / len(lost))


if __name__ == "__main__":
    main()
