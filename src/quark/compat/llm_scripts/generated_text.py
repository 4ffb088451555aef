"""Evaluation of what models write: summaries against references, and answers of another model as a text.

ROUGE and METEOR are computed by the package evaluate, which needs rouge_score and nltk beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from quark.base.progress import progress
from quark.errors import CalibrationError, ConfigError, NotSupportedError, did_you_mean
from quark.torch.llm.chat_templates import render_chat
from quark.torch.llm.named_datasets import NamedDataset, rows_of
from quark.torch.llm.other_packages import other_package
from quark.torch.model.batches import evaluating, input_device

__all__ = [
    "meteor_eval",
    "mlperf_rouge_eval",
    "ppl_eval_with_synthetic_dataset",
    "rouge_eval",
    "rouge_meteor_generations",
]

PROMPT = "Summarize the following text.\n\n{text}\n\nSummary:"
"""The prompt of a model without a chat template; one with a template gets the first part as the user's message."""


@dataclass(frozen=True)
class _Summaries:
    """A dataset of texts and the summaries that people wrote of them."""

    source: NamedDataset
    text: str
    summary: str


SUMMARIES = {
    "xsum": _Summaries(NamedDataset("knkarthick/xsum", "test"), "dialogue", "summary"),
    "cnn_dm": _Summaries(
        NamedDataset("abisee/cnn_dailymail", "test", options={"name": "3.0.0"}), "article", "highlights"
    ),
    "samsum": _Summaries(NamedDataset("knkarthick/samsum", "test"), "dialogue", "summary"),
}
"""The documented names."""
ANSWERS = {name: NamedDataset(f"amd/{name}", "test") for name in ("wikitext_gpt_oss_20b", "wikitext_gpt_oss_120b")}
"""The documented names of sequences that another model continued."""


def rouge_meteor_generations(
    dataset: str,
    model: nn.Module,
    tokenizer: Any,
    num_eval_data: int,
    import_file_format: str,
    import_model_dir: str | os.PathLike[str] | None,
    model_args: Mapping[str, Any] | None,
    batch_size: int,
    device: torch.device | str,
    max_new_toks: int,
    seq_len: int,
) -> list[dict[str, Any]]:
    """The rows of a dataset of summaries with the one that the model writes, greedily, as `predicted`.

    Args:
        dataset: "xsum", "cnn_dm" or "samsum".
        model: Quantized or not; it stays where it is.
        tokenizer: From `get_tokenizer`: it pads on the left.
        num_eval_data: Rows, from the first; -1: all.
        import_file_format: "hf_format"; ONNX models are not run here.
        import_model_dir, model_args: Not needed: the model in memory is evaluated. None, "" and {} are taken.
        batch_size: Texts that are continued together.
        device: Where the model is to be; refused if it is elsewhere.
        max_new_toks: Most tokens of a summary.
        seq_len: Most tokens of a prompt; a longer text loses its end, not its question.

    Raises:
        ConfigError: The name is unknown, or a number is wrong.
        MissingDependencyError: The package datasets is not installed.
    """
    known = _summaries(dataset)
    if import_file_format not in ("hf_format", "safetensors", "quark_format"):
        raise NotSupportedError(f"import_file_format={import_file_format!r}: possible: 'hf_format', a model in memory.")
    if import_model_dir or model_args:
        raise NotSupportedError("import_model_dir and model_args: load the model with get_model, and pass it.")
    for name, value in (("batch_size", batch_size), ("max_new_toks", max_new_toks), ("seq_len", seq_len)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it counts from 1.")
    where = input_device(model)
    if torch.device(device).type != where.type:
        raise ConfigError(f"The model is on {where}, and device is {device}.")
    rows = list(rows_of(known.source, None if num_eval_data < 0 else num_eval_data))
    prompts = [_prompt(row[known.text], tokenizer, seq_len) for row in rows]
    predicted: list[str] = []
    with evaluating(model), torch.no_grad():
        starts = range(0, len(prompts), batch_size)
        for start in progress(starts, "summaries", total=len(starts)):
            batch = tokenizer.pad({"input_ids": prompts[start : start + batch_size]}, return_tensors="pt").to(where)
            written: Any = model.generate(  # type: ignore[operator]
                **batch, max_new_tokens=max_new_toks, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            predicted += tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [{**row, "predicted": text} for row, text in zip(rows, predicted, strict=True)]


def rouge_eval(dataset: str, generations: Any) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum of generated summaries, as the package evaluate computes them.

    Args:
        dataset: "xsum", "cnn_dm" or "samsum".
        generations: From `rouge_meteor_generations`: rows with `predicted` and the reference.

    Raises:
        MissingDependencyError: evaluate or rouge_score is not installed.
    """
    other_package("rouge_score", "ROUGE")
    return _scores("rouge", dataset, generations)


def meteor_eval(dataset: str, generations: Any) -> dict[str, float]:
    """METEOR of generated summaries; see `rouge_eval`.

    Raises:
        MissingDependencyError: evaluate or nltk is not installed.
    """
    other_package("nltk", "METEOR")
    return _scores("meteor", dataset, generations)


def mlperf_rouge_eval(*args: Any, **options: Any) -> NoReturn:
    """Refused: the data of MLPerf are Python pickles, and reading one runs what is in it.

    Raises:
        NotSupportedError: Always.
    """
    raise NotSupportedError(
        "mlperf_rouge_eval (--use_mlperf_rouge): its data are Python pickles, which run code when they are read. "
        "Possible: MLPerf's own script on an exported model; rouge_meteor_generations with rouge_eval; --tasks."
    )


def ppl_eval_with_synthetic_dataset(
    tokenizer: Any,
    model: nn.Module,
    main_device: torch.device | str | None,
    dataset: str,
    is_onnx_model: bool = False,
) -> torch.Tensor:
    """The perplexity of the answers of another model, each token given all before it in its sequence.

        exp(sum of the negative log likelihoods of all answers' tokens / their number)

    Args:
        tokenizer: From `get_tokenizer`.
        model: A language model in memory.
        main_device: Where the result lies; None: the CPU.
        dataset: "wikitext_gpt_oss_20b" or "wikitext_gpt_oss_120b": sequences, and how many tokens at the end of each
            are the answer.
        is_onnx_model: Refused: `quark evaluate` takes ONNX.

    Raises:
        CalibrationError: A row says that more tokens were generated than it has after its first.
        MissingDependencyError: The package datasets is not installed.
    """
    if is_onnx_model:
        raise NotSupportedError("ppl_eval_with_synthetic_dataset(is_onnx_model=True): a torch model is evaluated here.")
    if dataset not in ANSWERS:
        raise ConfigError(f"The dataset {dataset!r} is unknown. {did_you_mean(dataset, ANSWERS)}")
    total, count = 0.0, 0
    with evaluating(model), torch.no_grad():
        for index, row in enumerate(rows_of(ANSWERS[dataset])):
            ids = tokenizer(row["full_sequence"], return_tensors="pt", verbose=False)["input_ids"]
            answer = int(row["num_generated_tokens"])
            if not 1 <= answer < ids.shape[1]:
                raise CalibrationError(
                    f"Row {index} of {dataset} has {ids.shape[1]} tokens, {answer} of them generated."
                )
            logits = model(ids.to(input_device(model))).logits[0, -answer - 1 : -1].float()
            total += float(nn.functional.cross_entropy(logits, ids[0, -answer:].to(logits.device), reduction="sum"))
            count += answer
    if count == 0:
        raise CalibrationError(f"The dataset {dataset} is empty.")
    return torch.tensor(total / count, device=main_device or "cpu").exp()


def _summaries(dataset: str) -> _Summaries:
    if dataset not in SUMMARIES:
        raise ConfigError(f"The dataset of summaries {dataset!r} is unknown. {did_you_mean(dataset, SUMMARIES)}")
    return SUMMARIES[dataset]


def _prompt(text: str, tokenizer: Any, length: int) -> list[int]:
    """Ids of the question about a text, at most `length`; of a text that is too long the end is left out."""
    begin, end = PROMPT.split("{text}")
    if getattr(tokenizer, "chat_template", None):
        mark = "\0"
        chat = [{"role": "user", "content": begin + mark}]
        begin, end = render_chat(tokenizer, chat, add_generation_prompt=True).split(mark)
    first = tokenizer(begin, add_special_tokens=not getattr(tokenizer, "chat_template", None))["input_ids"]
    last = tokenizer(end, add_special_tokens=False)["input_ids"]
    room = length - len(first) - len(last)
    if room < 1:
        raise ConfigError(f"seq_len is {length}; the question alone has {len(first) + len(last)} tokens.")
    inside = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [*first, *inside[:room], *last]


def _scores(metric: str, dataset: str, generations: Any) -> dict[str, float]:
    reference = _summaries(dataset).summary
    evaluate = other_package("evaluate", f"The metric {metric}")
    rows = list(generations)
    if not rows or not {"predicted", reference} <= rows[0].keys():
        raise ConfigError(f"Generations are rows with 'predicted' and {reference!r}, from rouge_meteor_generations.")
    found = evaluate.load(metric).compute(
        predictions=[row["predicted"] for row in rows], references=[row[reference] for row in rows]
    )
    return {name: float(value) for name, value in found.items()}
