"""How far one model's predictions are from another's.

D = mean over positions of  sum over tokens  p log(p / q)      p of the float model, q of the other, in nats
"""

from __future__ import annotations

from typing import Any

import torch

from quark.errors import NotSupportedError
from quark.torch.model.batches import named_outputs


def log_probabilities(result: Any, model: str) -> torch.Tensor:
    """Return the log of the probabilities that a model gives at each position, float32, in the shape of its logits.

    Args:
        result: What it returned.
        model: What it is called where it gives no logits.

    Raises:
        NotSupportedError: It gives no logits.
    """
    logits = next((x for name, x in named_outputs(result) if name == "logits"), None)
    if logits is None:
        raise NotSupportedError(
            f"{model} gives no logits, by whose distribution a loss is measured. Possible: a model with a head "
            "(AutoModelForCausalLM, ...)."
        )
    return torch.log_softmax(logits.float(), -1)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """D of two models' log probabilities on one batch, of which every position is real."""
    return (expected.exp() * (expected - found)).sum(-1).mean()
