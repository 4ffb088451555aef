"""`python -m benchmarks.real_language_models.kv_caches --place FOLDER`: what quantized caches lose at long contexts.

KL divergence from the float model in millinats, over all positions, the first and the last NEAR; two windows of LENGTH
tokens give the scales, two of other prose judge. What a program rounds itself, with scales of each new token and none
in a file, is rounded as that program does: q8_0 and q4_0 by the gguf package (`llama-server --cache-type-k`), and the
4-bit types of `vllm serve --kv-cache-dtype` by their description, int4_per_token_head with a zero point after a
Hadamard rotation, nvfp4 in groups of 16 with scales in E4M3 below one of all keys or values of a layer.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.real_language_models.models import float_folder
from benchmarks.real_language_models.texts import texts
from quark.core.granularity import PerGroup
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.solvers.hadamard import hadamard
from quark.core.spec import spec
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.llm.text import token_windows

LENGTH, WINDOWS, NEAR = 4096, 2, 512
CACHES = ("fp8", "int8", "fp8_per_head", "int8_per_head")
CASES: dict[str, dict[str, str]] = {
    **{f"cache {kind}": {"kv_cache_scheme": kind} for kind in CACHES},
    "attention fp8": {"attention_scheme": "fp8"},
}
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""Keys or values, (batch, heads, tokens, size), and what a cache gives back of them."""


def gguf_rounded(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Round in blocks of 32 values of a head, as llama.cpp does."""
    which = GGMLQuantizationType[kind.upper()]
    return torch.from_numpy(quants.dequantize(quants.quantize(x.numpy(), which), which)).view_as(x)


def per_token_head(x: torch.Tensor) -> torch.Tensor:
    """Round to uint4 with a scale and a zero point for each head of each token, after a Hadamard rotation."""
    size = x.shape[-1]
    rotation = torch.from_numpy(hadamard(size)).float() / math.sqrt(size)
    rotated, kind = x @ rotation, spec("uint4", PerGroup(-1, size), symmetric=False)
    return fake_quantize(rotated, compute_qparams(rotated, kind), kind) @ rotation.T


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Round to NVFP4."""
    kind = SCHEMES["nvfp4"].input
    assert kind is not None
    return fake_quantize(x, compute_qparams(x, kind), kind)


class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """A cache that gives back what a function makes of keys and values."""

    def __init__(self, rounded: Rounded) -> None:
        super().__init__()
        self.rounded = rounded

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.rounded(key_states), self.rounded(value_states)
        return super().update(keys, values, layer_idx, *args, **kwargs)


BY_PROGRAMS: dict[str, Rounded] = {
    "llama.cpp q8_0": partial(gguf_rounded, "q8_0"),
    "llama.cpp q4_0": partial(gguf_rounded, "q4_0"),
    "vllm int4_per_token_head": per_token_head,
    "vllm nvfp4": nvfp4,
}
"""What programs round themselves, for which nothing is in a file."""


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join((*CASES, *BY_PROGRAMS))}")
    parser.add_argument("--place", type=Path, required=True, help="where the model and the texts are kept")
    given = parser.parse_args()
    folder, of = float_folder("smollm2", given.place), texts(given.place)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calibration, held_out = (token_windows(tokenizer, of[name], LENGTH, WINDOWS) for name in ("calibration", "prose"))
    expected = [_scores(_load(folder), window) for window in held_out]
    print(f"float: perplexity {_perplexity(expected, held_out):.3f}", flush=True)
    template = LLMTemplate.get("llama")
    for case in given.cases or (*CASES, *BY_PROGRAMS):
        model, rounded = _load(folder), BY_PROGRAMS.get(case)
        if rounded is None:
            config: Any = template.get_config("bfloat16", **CASES[case])  # type: ignore[arg-type]
            model = ModelQuantizer(config).quantize_model(model, calibration)
        found = [_scores(model, window, rounded) for window in held_out]
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
def _scores(model: Any, window: torch.Tensor, rounded: Rounded | None = None) -> torch.Tensor:
    """Log probabilities, (tokens, vocabulary); in half precision, as there are many."""
    cache = {} if rounded is None else {"past_key_values": RoundingCache(rounded)}
    return torch.log_softmax(model(window, **cache).logits[0].float(), -1).half()


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
