"""Calibration data that the float model writes itself: text drawn from its own distribution.

    x_1 .. x_k    tokens of a sample of the user's data: its first one where that opens a text, the others from anywhere
    x_t           drawn from p(. | x_1 .. x_t-1), the whole vocabulary at temperature 1, no end of text

An algorithm that chooses a great many codes fits the few samples that it sees; what the model writes costs nobody any
data and is what it knows best. LLM-QAT (Liu et al. 2023, arXiv:2305.17888, section 3.1) trains on it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.base.progress import progress
from quark.errors import CalibrationError, NotSupportedError
from quark.torch.model.batches import evaluating, input_device, most_tokens, text_config
from quark.torch.model.calibration_data import ModelArguments, unpadded

PROMPT = 4
"""Tokens of the user's data that a text begins with: enough to be about something, too few to say what."""
ROWS = 64
"""Texts that are written at once."""


def synthetic_batches(model: nn.Module, data: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
    """Texts that a language model writes, each as long as the longest sample of the data.

    Args:
        model: Float causal model of transformers; it is not changed.
        data: Batches of token ids, alone or as `input_ids`, whose rows give the first tokens.
        count: How many texts.
        seed: Of the draws, for a machine, its threads and the versions of its packages.

    Returns:
        `count` tensors of token ids, (1, tokens); in dicts with the same keys where the first batch is one.

    Raises:
        NotSupportedError: The model writes no text from a text alone.
        CalibrationError: The data hold no token ids, or no sample of more than `PROMPT` tokens.
    """
    config = getattr(model, "config", None)
    if not writes_text(model):
        raise NotSupportedError(
            f"{type(model).__name__} does not go on writing a text, as a causal language model of transformers does. "
            "Possible: calibration data without synthetic texts."
        )
    arguments = ModelArguments.of(model)
    rows = [
        row
        for batch in data
        for part in unpadded(batch, arguments)
        for row in _samples_as_ids(part)
        if len(row) > PROMPT
    ]
    if not rows:
        raise CalibrationError(
            f"Synthetic texts begin with tokens of the data, and no sample has more than {PROMPT} tokens."
        )
    device, length = input_device(model), most_tokens(text_config(config), max(map(len, rows)))
    order = torch.Generator().manual_seed(seed)
    opening = getattr(config, "bos_token_id", None)
    prompts = []
    for index in range(count):  # the first tokens of a text
        row = rows[index % len(rows)]
        opens = isinstance(opening, int) and int(row[0]) == opening
        start = int(torch.randint(int(opens), len(row) - PROMPT + opens + 1, (), generator=order))
        prompts.append(torch.cat([row[:opens], row[start : start + PROMPT - opens]]))
    written: list[Any] = []
    devices = [device] if device.type == "cuda" else []
    # Seeded, and what the user draws afterwards stays as it was.
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for start in progress(range(0, count, ROWS), "synthetic data", -(-count // ROWS)):
            ids = torch.stack(prompts[start : start + ROWS]).to(device)
            ids = model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, num_beams=1, temperature=1.0,
                top_k=0, top_p=1.0, repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=length,
                max_length=length, max_new_tokens=None, pad_token_id=0, return_dict_in_generate=False,
            )  # fmt: skip
            written += [_like(data[0], row[None]) for row in ids.cpu()]
    return written


def writes_text(model: nn.Module) -> bool:
    """Return True where a model goes on writing a text from a text alone, as a causal model of transformers does."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(getattr(model, "can_generate", bool)()) and not encodes


def _like(batch: Any, ids: torch.Tensor) -> Any:
    """Token ids in the form of a batch."""
    if not hasattr(batch, "keys"):
        return ids
    mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in batch else {}
    return {"input_ids": ids, **mask}


def _samples_as_ids(batch: Any) -> list[torch.Tensor]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) or hasattr(batch, "get") else batch
    if isinstance(ids, (tuple, list)) and ids:
        return _samples_as_ids(ids[0])
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.ndim != 2:
        raise CalibrationError(
            "Synthetic data begin with tokens of the data: each batch a tensor (samples, tokens), or with `input_ids`."
        )
    return [*ids]
