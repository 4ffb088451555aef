"""Labels drawn from the distribution that a model gives: the mean of what their likelihoods do is its Fisher matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.calibration.divergence import log_probabilities


def drawn_likelihood(model: nn.Module, result: Any, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """The log likelihood of labels drawn at each position, and the number of positions, which all are real.

    Args:
        model: Named where it gives no logits.
        result: What it returned, with logits of shape (batch, positions, vocabulary).
        generator: Draws, on the CPU.

    Raises:
        NotSupportedError: The model gives no logits.
    """
    shown = log_probabilities(result, type(model).__name__)
    rows = shown.flatten(0, -2)
    # What `torch.multinomial` draws on a CPU, where the model is: its probabilities are not waited for.
    noise = torch.empty(rows.shape).exponential_(1, generator=generator).to(rows.device, non_blocking=True)
    labels = (rows.detach().exp() / noise).argmax(-1, keepdim=True)
    return rows.gather(1, labels).sum(), len(rows)
