"""Labels drawn from the distribution that a model gives: the mean of what their likelihoods do is its Fisher matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.model.batches import named_outputs


def drawn_likelihood(model: nn.Module, result: Any, batch: Any, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """The log likelihood of labels drawn at each position, and the number of positions; padding predicts nothing.

    Args:
        model: Named where it gives no logits.
        result: What it returned, with logits of shape (batch, positions, vocabulary).
        batch: What it was given.
        generator: Draws, on the CPU.

    Raises:
        NotSupportedError: The model gives no logits.
    """
    logits = next((x for name, x in named_outputs(result) if name == "logits"), None)
    if logits is None:
        raise NotSupportedError(
            f"{type(model).__name__} gives no logits, by whose distribution a loss is measured. Possible: a "
            "model with a head (AutoModelForCausalLM, ...)."
        )
    rows = torch.log_softmax(logits.float(), -1).flatten(0, -2)
    labels = torch.multinomial(rows.detach().exp().cpu(), 1, generator=generator).to(rows.device)
    drawn = rows.gather(1, labels)[:, 0]
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if isinstance(mask, torch.Tensor) and mask.shape == logits.shape[:-1]:
        drawn = drawn[mask.flatten().bool().to(drawn.device)]
    return drawn.sum(), len(drawn)
