"""Questions of JSON lines or a dataset, answered by both models: by the likelihood of choices, or by what they write.

accuracy        share of questions whose right choice has the largest log likelihood, summed over its tokens
accuracy_norm   the same, with each log likelihood divided by the bytes of the choice
exact_match     share of questions whose answer is written by greedy decoding; of an answer of one line, the first
                line that is not empty counts; spaces around it do not
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from quark.base.progress import progress
from quark.errors import CalibrationError, ConfigError
from quark.jobs.folders.compared.measure import ALL
from quark.jobs.folders.compared.task_scores import CHOICE, EXACT_MATCH, LOSS, Pair, Task, TaskScores, outputs_of_both
from quark.jobs.folders.model_inputs import ModelInputs
from quark.torch.llm.answers import require_answer
from quark.torch.llm.documents import Document, documents
from quark.torch.llm.text import negative_log_likelihood
from quark.torch.model.batches import evaluating, forward_batch, input_device, named_outputs

MORE_TOKENS = 8
"""Tokens that a model may write beyond those of an answer: another tokenization of it, or its end."""


def questions_of(metric: str | None, inputs: ModelInputs, data: Path, limit: int) -> Task | None:
    """The task that the questions of JSON lines or a dataset make; None where figures of the outputs are all.

    Args:
        metric: One of questions; None: by choices where there are some, else none.
        inputs: What the models take.
        data: Place of the questions.
        limit: Most of them.

    Raises:
        ConfigError: The data have no such questions.
        CalibrationError: They cannot be read.
    """
    read = list(islice(documents(data), None if limit == ALL else limit))
    first = read[0] if read else Document("", str(data))
    if metric is None:
        metric = CHOICE if first.choices else LOSS
    if metric == LOSS:
        return None
    lacks = "choices" if metric == CHOICE and not first.choices else "answers" if first.answer is None else ""
    if lacks:
        raise ConfigError(f"--metric {metric}: {data} has no {lacks}.")
    for document in read:
        require_answer(document, first)
    return partial(_by_choice if metric == CHOICE else _by_match, inputs, read)


def _by_choice(inputs: ModelInputs, read: Sequence[Document], models: Pair, batches: Sequence[Any]) -> TaskScores:
    """Score the likeliest choice that both models find for each question."""
    texts = [(document.with_answer(choice), choice) for document in read for choice in document.choices]
    sums = _likelihoods(models, *_choice_ids(inputs, texts))
    lengths = torch.tensor([len(choice.encode()) for _, choice in texts])
    counts = [len(document.choices) for document in read]
    right = torch.tensor([document.choices.index(document.answer) for document in read])
    scores, chosen = dict[str, tuple[float, float]](), list[torch.Tensor]()
    for name, values in (("accuracy", sums), ("accuracy_norm", sums / lengths)):
        found = [torch.stack([part.argmax() for part in row.split(counts)]) for row in values]
        before, after = (float((each == right).double().mean()) for each in found)
        scores[name] = before, after
        chosen = chosen or found
    return TaskScores(_questions(read), scores, float((chosen[0] == chosen[1]).double().mean()))


def _choice_ids(
    inputs: ModelInputs, texts: Sequence[tuple[Document, str]]
) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    """The ids of questions with a choice as answer, and where that begins. Raises CalibrationError for too many ids."""
    tokenizer, found, starts = inputs.tokenizer, list[torch.Tensor](), list[int]()
    for text, choice in texts:
        ids, start = text.token_ids(tokenizer), text.answer_start(tokenizer)
        if not 0 < start < len(ids):
            raise CalibrationError(f"{text.place} the choice {choice!r:.60} has no token, or none before it.")
        if (most := inputs.longest(len(ids))) < len(ids):
            raise CalibrationError(
                f"{text.place} has {len(ids)} tokens with the choice {choice!r:.60}; the model has {most} positions."
            )
        found.append(torch.tensor([ids]))
        starts.append(start)
    return found, starts


def _likelihoods(models: Pair, ids: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor:
    """The log likelihood of the tokens of each text from a start on, (2, texts) in float64."""
    sums = torch.zeros(2, len(ids), dtype=torch.float64)
    for index, outputs in outputs_of_both(models, ids, "choices"):
        begin = starts[index] - 1
        for row, output in enumerate(outputs):
            logits = output["logits"]
            sums[row, index] -= negative_log_likelihood(logits[:, begin:], ids[index].to(logits.device)[:, begin:])
    return sums


def _by_match(inputs: ModelInputs, read: Sequence[Document], models: Pair, batches: Sequence[Any]) -> TaskScores:
    """Score the text that both models write for each question."""
    tokenizer, written = inputs.tokenizer, list[list[str]]()
    prompts = [document.prompt_ids(tokenizer) for document in read]
    answers = [_text_of(document) for document in read]
    counts = [len(tokenizer(answer, add_special_tokens=False)["input_ids"]) + MORE_TOKENS for answer in answers]
    for document, prompt, count in zip(read, prompts, counts, strict=True):
        if not prompt or inputs.longest(len(prompt) + count) < len(prompt) + count:
            room = f"{len(prompt)} tokens and up to {count} of an answer"
            raise CalibrationError(
                f"{document.place} has {room}: none to go on from, or more than the model's positions."
            )
    for each in models:
        model = each.model
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        with evaluating(model), torch.no_grad():
            asked = progress(zip(prompts, counts, answers, strict=True), "questions", total=len(read))
            written.append(
                [_compared(tokenizer, _greedy(model, ids, count, ends), answer) for ids, count, answer in asked]
            )
    before, after = (
        sum(found == answer.strip() for found, answer in zip(each, answers, strict=True)) / len(read)
        for each in written
    )
    same = sum(one == other for one, other in zip(*written, strict=True)) / len(read)
    return TaskScores(_questions(read), {EXACT_MATCH: (before, after)}, same)


def _greedy(model: Any, ids: Sequence[int], count: int, ends: set[int | None]) -> list[int]:
    """The likeliest next tokens, one after another, up to an end of text."""
    device, found = input_device(model), list[int]()
    while len(found) < count:
        outputs = dict(named_outputs(forward_batch(model, torch.tensor([[*ids, *found]]), device)))
        token = int(outputs["logits"][0, -1].argmax())
        if token in ends:
            break
        found.append(token)
    return found


def _compared(tokenizer: Any, ids: Sequence[int], answer: str) -> str:
    """The text of tokens as it is compared with an answer."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
    return text if "\n" in answer.strip() else text.partition("\n")[0].strip()


def _text_of(document: Document) -> str:
    """The answer as a text. Raises CalibrationError for messages that are not one text."""
    answer: Any = document.answer
    if isinstance(answer, list):
        answer = answer[0].get("content") if len(answer) == 1 else None
    if not isinstance(answer, str) or not answer.strip():
        raise CalibrationError(f"{document.place} has an answer that is not one text, which exact_match compares.")
    return answer


def _questions(read: Sequence[Document]) -> str:
    return f"{len(read)} question{'s' if len(read) != 1 else ''}"
