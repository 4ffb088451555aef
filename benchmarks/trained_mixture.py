"""`python -m benchmarks.trained_mixture`: what GPTQ leaves of the loss of rounding to nearest, in a trained mixture.

A Qwen3 mixture of 3 M parameters (32 experts in each of 3 blocks, 4 for a token) learns the prose of Python's library,
some minutes on one core, and is kept in build/trained_mixture. Its linear layers are then int4 by channel. Routers
never choose three experts of each block while it is calibrated.

    KL              divergence from the float model on held-out text, over that of rounding to nearest
    idle, others    || W X - Q X ||^2 of an expert on held-out tokens, weighted as its router does, over that of
                    rounding to nearest: the mean over the experts without calibration tokens, and over all others
    worst           the largest of these; above 1, an expert is worse than if nothing had been done
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.tables import console
from quark.torch import LLMTemplate, ModelQuantizer
from tests.models.families import with_expert_modules

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "trained_mixture"
TEXTS = ROOT / "examples" / "models"
CONTEXT, BATCH, STEPS = 128, 16, 400
HELD_OUT = 96
"""Windows of held-out text."""
IDLE = (3, 11, 27)
"""Experts of each block that no calibration token reaches."""
FEWEST = 8
"""An expert with fewer held-out tokens is left out."""
ROWS = (
    ("gptq", 64, "fused", False),
    ("gptq", 64, "modules", False),
    ("gptq", 64, "fused", True),
    ("gptq", 8, "fused", False),
    ("gptq", 8, "modules", False),
    ("gptq", 8, "fused", True),
)
"""Algorithm, calibration windows, how the experts are held, and whether all tokens go to all experts."""


def trained(steps: int) -> Any:
    """The mixture; trained where it is not kept, with as many steps."""
    from transformers import AutoModelForCausalLM

    if not (KEPT / "config.json").exists():
        _train(steps).save_pretrained(KEPT)
        (KEPT / "steps.json").write_text(json.dumps(steps))
    elif (before := json.loads((KEPT / "steps.json").read_text())) != steps:
        raise SystemExit(f"{KEPT} holds one of {before} steps. Possible: --steps {before}, or to delete the folder.")
    return AutoModelForCausalLM.from_pretrained(KEPT).eval().float()


def _train(steps: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from examples.models.train_language_model import collect_documents, split_documents, tokenize

    tokenizer = _tokenizer()
    tokens = tokenize(tokenizer, split_documents(collect_documents())["train"])
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=32,
        num_experts_per_tok=4, norm_topk_prob=True, mlp_only_layers=[], max_position_embeddings=512,
        output_router_logits=True, router_aux_loss_coef=0.01, pad_token_id=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = OneCycleLR(optimizer, 3e-3, steps, pct_start=0.05, cycle_momentum=False)
    start = time.monotonic()
    for step in range(1, steps + 1):
        window = tokens[torch.randint(len(tokens) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)]
        loss = model(window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            console().print(f"step {step}, loss {loss.item():.3f}, {time.monotonic() - start:.0f} s")
    return model


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TEXTS / "language_model")


def windows(name: str, count: int) -> torch.Tensor:
    """The first windows of a text of the repository, (count, CONTEXT)."""
    text = (TEXTS / "text" / f"{name}.txt").read_text(encoding="utf-8")
    tokens = _tokenizer()(text, return_tensors="pt", verbose=False).input_ids[0]
    return tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:count]


@contextmanager
def without_idle(model: Any) -> Iterator[None]:
    """Within: routers choose none of the experts of IDLE."""

    def chosen(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits = output[0].index_fill(-1, torch.tensor(IDLE), -1e9)
        weights, experts = logits.softmax(-1, dtype=torch.float32).topk(router.top_k, -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts

    handles = [layer.mlp.gate.register_forward_hook(chosen) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Reference:
    """The float model on held-out text.

    Attributes:
        model: It.
        data: Batches.
        logs: Log probabilities, (windows, CONTEXT, words).
        inputs: Of each block: what its experts read (tokens, channels), which (tokens, k), and their shares.
    """

    model: Any
    data: list[torch.Tensor]
    logs: torch.Tensor
    inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any) -> Reference:
        """Run it."""
        data = list(windows("heldout", HELD_OUT).split(8))
        seen: list[list[Any]] = [[] for _ in model.model.layers]
        handles = [
            layer.mlp.experts.register_forward_pre_hook(lambda _, args, own=own: own.append(args[:3]))
            for layer, own in zip(model.model.layers, seen, strict=True)
        ]
        logs = torch.cat([model(window).logits for window in data]).log_softmax(-1)
        for handle in handles:
            handle.remove()
        return cls(model, data, logs, [tuple(map(torch.cat, zip(*own, strict=True))) for own in seen])  # type: ignore[misc]

    @torch.no_grad()
    def divergence(self, model: Any) -> float:
        """Mean KL of a quantized model."""
        logs = torch.cat([model(window).logits for window in self.data]).log_softmax(-1)
        return float((self.logs.exp() * (self.logs - logs)).sum(-1).mean())

    @torch.no_grad()
    def errors(self, model: Any) -> dict[tuple[int, int], float]:
        """(Block, expert) -> share of its output that is lost."""
        found = {}
        for block, (x, chosen, shares) in enumerate(self.inputs):
            own, other = (each.model.layers[block].mlp.experts for each in (self.model, model))
            for expert in range(len(own.down_proj)):
                token, slot = torch.where(chosen == expert)
                if len(token) < FEWEST:
                    continue
                gate, up = functional.linear(x[token], own.gate_up_proj[expert]).chunk(2, -1)
                exact = functional.linear(own.act_fn(gate) * up, own.down_proj[expert])
                layers = other.get_submodule(str(expert))
                given = layers.down_proj(own.act_fn(layers.gate_proj(x[token])) * layers.up_proj(x[token]))
                share = shares[token, slot, None]
                lost, whole = ((exact - given) * share).square().sum(), (exact * share).square().sum()
                found[block, expert] = float(lost / whole)
        return found


def quantized(model: Any, algorithm: str | None, count: int, form: str, all_experts: bool) -> Any:
    """A copy in int4 by channel."""
    made = copy.deepcopy(model)
    if form == "modules":
        made = with_expert_modules(made)
    config = LLMTemplate.get("qwen3_moe").get_config("int4_wo_per_channel", algorithm=algorithm)
    quantizer = ModelQuantizer(replace(config, calibrate_all_experts=all_experts))
    with without_idle(made):
        return quantizer.freeze(quantizer.quantize_model(made, list(windows("calibration", count).split(4))))


def main() -> None:
    """Train or load the mixture, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, where no model is kept ({STEPS})")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    reference = Reference.of(trained(options.steps))
    nearest = quantized(reference.model, None, 1, "fused", False)
    divergence, errors = reference.divergence(nearest), reference.errors(nearest)
    table = Table("algorithm", "tokens", "experts", "KL", "idle", "others", "worst", "CPU s")
    for algorithm, count, form, all_experts in ROWS:
        start = time.process_time()
        made = quantized(reference.model, algorithm, count, form, all_experts)
        seconds = time.process_time() - start
        left = {key: error / errors[key] for key, error in reference.errors(made).items()}
        idle = [ratio for (_, expert), ratio in left.items() if expert in IDLE]
        others = [ratio for (_, expert), ratio in left.items() if expert not in IDLE]
        kl = reference.divergence(made) / divergence
        cells = (kl, sum(idle) / len(idle), sum(others) / len(others), max(left.values()))
        held = f"{form}, all tokens to all" if all_experts else form
        table.add_row(algorithm, str(count * CONTEXT), held, *(f"{cell:.2f}" for cell in cells), f"{seconds:.0f}")
    console().print(f"KL of rounding to nearest: {divergence:.4f}")
    console().print(table)


if __name__ == "__main__":
    main()
