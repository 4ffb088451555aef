"""The page's answers of a float and a quantized language model to the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quark.base.log import logger
from quark.base.progress import progress
from quark.errors import QuarkError, one_line
from quark.report.page import PageTable
from quark.torch.llm.documents import Document
from quark.torch.model.batches import evaluating, input_device

if TYPE_CHECKING:
    from quark.jobs.folders.model_inputs import ModelInputs

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "List three things to check before a long drive.",
    "A train leaves at 14:40 and arrives at 17:05. How long does it take?",
    "Write a Python function that returns the largest of three numbers.",
    "Translate into French: The library opens at nine, but not on Sundays.",
)
"""Facts, a list, a calculation, code and another language."""
LONGEST = 48
"""Tokens of an answer: enough to see a model that repeats itself or breaks off."""
MOST_SECONDS = 120.0
"""A model that would write for longer, by its latency, is not asked."""


class Reply(NamedTuple):
    """A prompt, and what both models answer."""

    prompt: str
    float: str
    quantized: str


def replies_of(before: Any, after: Any, inputs: ModelInputs, seconds: float) -> list[Reply]:
    """The answers of both models to PROMPTS, each the likeliest next token at every step.

    Args:
        before, after: The float and the quantized model, in memory.
        inputs: What they take; its tokenizer writes the prompts with its chat template, where it has one.
        seconds: Latency of a forward.

    Returns:
        One for each prompt; none of a model that writes no text, would write for too long, or whose tokenizer or
        generation refuses: why is logged, since a page is complete without.
    """
    if not inputs.continues_text:
        return []
    if seconds * LONGEST > MOST_SECONDS:
        logger.info("The page has no answers of both models: %d tokens take longer than %.0f s.", LONGEST, MOST_SECONDS)
        return []
    try:
        tokenizer = inputs.tokenizer
        asked = [Document(prompt, "the prompts of the page", question=True).prompt_ids(tokenizer) for prompt in PROMPTS]
        rows = [_written(model, asked) for model in progress((before, after), "models that answer prompts", 2)]
        written = [[tokenizer.decode(row, skip_special_tokens=True).strip() for row in each] for each in rows]
    except (QuarkError, ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        # Of a tokenizer or a generate() that others wrote.
        logger.info("The page has no answers of both models: %s", one_line(error))
        return []
    return [Reply(*row) for row in zip(PROMPTS, *written, strict=True)]


def replies_table(replies: Sequence[Reply]) -> PageTable:
    """A row of each prompt, and how many answers are the same."""
    same = sum(reply.float == reply.quantized for reply in replies)
    title = f"The likeliest answers, {LONGEST} tokens of each at most; {same} of {len(replies)} are the same"
    return PageTable(("prompt", "float", "quantized"), [tuple(reply) for reply in replies], title)


def _written(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that a model adds to each prompt; all in one batch, padded at the left."""
    width, device = max(map(len, prompts)), input_device(model)
    ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    with evaluating(model), torch.no_grad():
        whole = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, temperature=None, top_k=None, top_p=None,
            max_new_tokens=LONGEST, pad_token_id=0, return_dict_in_generate=False,
        )  # fmt: skip
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    return [[*takewhile(lambda token: token not in ends, row)] for row in whole[:, width:].tolist()]
