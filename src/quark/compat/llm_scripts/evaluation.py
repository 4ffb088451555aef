"""Evaluation of language-model scripts: perplexity here, tasks by the package lm_eval (the evaluation harness).

    perplexity = exp(mean negative log likelihood of each next token, in windows of 2048 tokens)

A model whose positions end earlier has windows of that length: beyond them, it would be asked what it never learned.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.compat.llm_scripts.generated_text import ANSWERS, mlperf_rouge_eval, ppl_eval_with_synthetic_dataset
from quark.compat.llm_scripts.model_loading import get_tokenizer
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.torch.layers.attention.cache_view import cache_argument
from quark.torch.llm.named_datasets import NamedDataset, dataset_text
from quark.torch.llm.other_packages import other_package
from quark.torch.llm.text import perplexity, read_text
from quark.torch.model.batches import evaluating, input_device, most_tokens

__all__ = ["eval_model", "lm_eval_entrypoint", "ppl_eval", "ppl_eval_for_kv_cache", "task_eval"]

WINDOW = 2048
WIKITEXT = NamedDataset("Salesforce/wikitext", "test", options={"name": "wikitext-2-raw-v1"})


def ppl_eval(
    model: nn.Module, testenc: Any, dev: torch.device | str | None, file_format: str = "hf_format"
) -> torch.Tensor:
    """The perplexity of a model on a text.

    Args:
        model: A language model of transformers; ids go to its device.
        testenc: What a tokenizer made of the text (`input_ids`), or the ids themselves, (1, tokens).
        dev: Where the result lies; None: the CPU.
        file_format: "hf_format": the model is a torch model, which is all that can be measured here.

    Returns:
        A scalar, float32.

    Raises:
        CalibrationError: The text is shorter than one window.
    """
    if file_format not in ("hf_format", "safetensors", "quark_format"):
        raise NotSupportedError(
            f"ppl_eval(file_format={file_format!r}): possible: 'hf_format'. `quark evaluate` takes ONNX."
        )
    ids = _ids(testenc)
    length = most_tokens(getattr(model, "config", None), WINDOW)
    count = ids.shape[1] // length
    if count == 0:
        raise CalibrationError(f"The text has {ids.shape[1]} tokens; at least one window of {length} is needed.")
    with evaluating(model):
        value = perplexity(model, list(ids[0, : count * length].reshape(count, 1, length)))
    return torch.tensor(value, device=dev or "cpu")


def ppl_eval_for_kv_cache(
    model: nn.Module,
    testenc: Any,
    context_size: int,
    sample_size: int,
    patch_size: int | None,
    dev: torch.device | str | None,
) -> torch.Tensor:
    """The perplexity of tokens that are read one by one, after a context: each reads the cache of those before.

    Patch i has its context at [i * sample_size, i * sample_size + context_size) of the text, and its scored tokens
    right after: every token after the first context is scored once, each with at least `context_size` before it.

    Args:
        model: A language model with a cache of keys and values.
        testenc: See `ppl_eval`.
        context_size: Tokens before, read at once.
        sample_size: Tokens that are scored, in each patch.
        patch_size: Patches, from the beginning of the text; None: as many as it has.
        dev: Where the result lies.

    Returns:
        A scalar, float32; it is also printed.
    """
    ids = _ids(testenc)
    if min(context_size, sample_size, 1 if patch_size is None else patch_size) < 1:
        raise ConfigError(f"Sizes count from 1, got {context_size=}, {sample_size=}, {patch_size=}.")
    there = max(0, ids.shape[1] - context_size) // sample_size
    count = there if patch_size is None else patch_size
    if not 1 <= count <= there:
        needed = context_size + max(count, 1) * sample_size
        raise CalibrationError(f"The text has {ids.shape[1]} tokens; {needed} are needed for {max(count, 1)} patches.")
    total = 0.0
    with evaluating(model), torch.no_grad():
        for patch in ids[0].unfold(0, context_size + sample_size, sample_size)[:count]:
            total += _read_one_by_one(model, patch[None].to(input_device(model)), context_size)
    value = torch.tensor(math.exp(total / (count * sample_size)), device=dev or "cpu")
    _say(f"Perplexity with a cache: {value.item()}")
    return value


def _read_one_by_one(model: nn.Module, ids: torch.Tensor, context: int) -> float:
    """The negative log likelihood of the tokens after the context, in nats; ids: (1, tokens)."""
    total = 0.0
    done = model(ids[:, :context], use_cache=True)
    cache = cache_argument(model) or "past_key_values"
    for index in range(context, ids.shape[1]):
        token = ids[:, index : index + 1]
        total += float(nn.functional.cross_entropy(done.logits[:, -1].float(), token[0]))
        done = model(token, use_cache=True, **{cache: getattr(done, cache)})
    return total


def task_eval(
    model: nn.Module,
    tokenizer: Any,
    max_batch_size: int | None = None,
    batch_size: int | str = 1,
    tasks: Sequence[str] | str | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    multimodal: bool = False,
    output_path: str | os.PathLike[str] | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | str = "",
    fewshot_as_multiturn: bool = False,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Score a model in memory on tasks of the evaluation harness, print its table, and return its results.

    Args:
        model, tokenizer: From `get_model`, quantized or not, and `get_tokenizer`.
        max_batch_size: The largest batch that is tried, for batch_size="auto".
        batch_size: A number, "auto" or "auto:N".
        tasks: Names, or one string with commas.
        num_fewshot: Examples in the context; None: the task's own.
        apply_chat_template, fewshot_as_multiturn: Ask as in a conversation.
        multimodal: Refused: only text is scored here.
        output_path: A JSON file of the results.
        gen_kwargs: How text is generated.
        model_args: More for the harness's own model class: a mapping, or "name=value,name=value".
        log_samples: Keep each answer in the results.

    Raises:
        MissingDependencyError: lm_eval is not installed.
    """
    if multimodal:
        raise NotSupportedError("task_eval(multimodal=True): only text is scored here.")
    names = [name for name in (tasks.split(",") if isinstance(tasks, str) else tasks or []) if name]
    if not names:
        raise ConfigError("task_eval needs the names of tasks: tasks=['piqa', 'arc_easy'].")
    harness = other_package("lm_eval", "Scoring tasks", "Perplexity needs no package: ppl_eval.")
    classes = other_package("lm_eval.models.huggingface", "Scoring tasks")
    options = (
        dict(model_args)
        if isinstance(model_args, Mapping)
        else dict(pair.split("=", 1) for pair in model_args.split(",") if pair)
    )
    wrapped = classes.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=max_batch_size, **options
    )
    results: dict[str, Any] = harness.simple_evaluate(
        model=wrapped, tasks=names, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=fewshot_as_multiturn, gen_kwargs=dict(gen_kwargs) if gen_kwargs else None,
        log_samples=log_samples,
    )  # fmt: skip
    _show(results, output_path)
    return results


def lm_eval_entrypoint(
    model: str,
    model_args: Mapping[str, Any] | str,
    tasks: Sequence[str] | str | None,
    output_path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The harness's `simple_evaluate`, whose `model_args` may hold a model in memory as `pretrained`.

    Args:
        model: The harness's kind of model: "hf".
        model_args: For it; as a mapping, `pretrained` may be a module.
        tasks: Names, or one string with commas.
        output_path: A JSON file of the results.
        options: For `simple_evaluate`, which names those that it does not know.
    """
    harness = other_package("lm_eval", "Scoring tasks", "Perplexity needs no package: ppl_eval.")
    names = tasks.split(",") if isinstance(tasks, str) else list(tasks or [])
    arguments = dict(model_args) if isinstance(model_args, Mapping) else model_args
    results: dict[str, Any] = harness.simple_evaluate(model=model, model_args=arguments, tasks=names, **options)
    _show(results, output_path)
    return results


SCRIPT_ARGUMENTS: dict[str, Any] = {
    "use_mlperf_rouge": False, "seq_len": WINDOW, "trust_remote_code": False, "evaluation_dataset": "wikitext",
    "num_eval_data": -1, "use_ppl_eval_model": False, "use_ppl_eval_for_kv_cache": False,
    "ppl_eval_for_kv_cache_context_size": None, "ppl_eval_for_kv_cache_sample_size": None,
    "ppl_eval_for_kv_cache_patch_size": None, "tasks": None, "max_eval_batch_size": None, "eval_batch_size": 1,
    "num_fewshot": None, "apply_chat_template": False,
}  # fmt: skip
"""The arguments that a script may have for its evaluation, each with its default."""


def eval_model(
    args: Any,
    model: nn.Module,
    main_device: torch.device | str,
    save_metrics_to_csv: bool = False,
    output_dir: str | os.PathLike[str] = "metrics_output_dir",
    multimodal: bool = False,
) -> dict[str, float]:
    """Print and return the measures that a script's arguments ask for: perplexity, perplexity with a cache, tasks.

    Args:
        args: The namespace of the script; see the guide for the names that are read. What is absent is off.
        model: Quantized or not.
        main_device: Where results lie.
        save_metrics_to_csv: Write `metrics.csv` into `output_dir`: a row of names and one of values.
        output_dir: Made if it is not there.
        multimodal: Refused with tasks: only text is scored here.

    Returns:
        Name of a metric -> its value.
    """
    asked = SimpleNamespace(**{name: getattr(args, name, default) for name, default in SCRIPT_ARGUMENTS.items()})
    if asked.use_mlperf_rouge:
        mlperf_rouge_eval()
    tokenizer = get_tokenizer(args.model_dir, asked.seq_len, trust_remote_code=asked.trust_remote_code)
    metrics = _perplexities(asked, model, tokenizer, main_device)
    if asked.tasks:
        results = task_eval(
            model, tokenizer, asked.max_eval_batch_size, asked.eval_batch_size, asked.tasks, asked.num_fewshot,
            asked.apply_chat_template, multimodal,
        )["results"]  # fmt: skip
        for task, values in results.items():
            metrics.update({f"{task}.{name}": v for name, v in values.items() if isinstance(v, (int, float))})
    if save_metrics_to_csv:
        place = Path(output_dir) / "metrics.csv"
        with atomic_file(place) as file, file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([metrics, metrics.values()])
        logger.info("Saved the metrics to %s.", place)
    return metrics


def _perplexities(
    asked: SimpleNamespace, model: nn.Module, tokenizer: Any, main_device: torch.device | str
) -> dict[str, float]:
    """The perplexities that are asked for, alone and with a cache, by their names."""
    metrics: dict[str, float] = {}
    dataset = asked.evaluation_dataset
    synthetic = dataset in ANSWERS and not asked.use_ppl_eval_for_kv_cache
    if synthetic and asked.num_eval_data != -1:
        raise ConfigError(f"num_eval_data counts the texts of wikitext; {dataset} is evaluated whole.")
    if not synthetic and (asked.use_ppl_eval_model or asked.use_ppl_eval_for_kv_cache):
        encoded = tokenizer(_text(dataset, asked.num_eval_data), return_tensors="pt", verbose=False)
    if asked.use_ppl_eval_model:
        metrics["perplexity"] = (
            ppl_eval_with_synthetic_dataset(tokenizer, model, main_device, dataset)
            if synthetic
            else ppl_eval(model, encoded, main_device)
        ).item()
        _say(f"Perplexity: {metrics['perplexity']}")
    if asked.use_ppl_eval_for_kv_cache:
        sizes = asked.ppl_eval_for_kv_cache_context_size or 1024, asked.ppl_eval_for_kv_cache_sample_size or 512
        value = ppl_eval_for_kv_cache(model, encoded, *sizes, asked.ppl_eval_for_kv_cache_patch_size, main_device)
        metrics["perplexity_kv_cache"] = value.item()
    return metrics


def _text(dataset: str, limit: int) -> str:
    if Path(dataset).is_file():
        if limit != -1:
            raise ConfigError("num_eval_data counts the texts of a dataset; a text file is evaluated whole.")
        return read_text(Path(dataset))
    if dataset != "wikitext":
        raise NotSupportedError(f"The evaluation dataset {dataset!r}: possible: 'wikitext', or a text file.")
    return dataset_text(WIKITEXT, None if limit == -1 else limit)


def _ids(encoded: Any) -> torch.Tensor:
    ids = encoded if isinstance(encoded, torch.Tensor) else getattr(encoded, "input_ids", None)
    if ids is None and isinstance(encoded, Mapping):
        ids = encoded.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1:
        raise ConfigError("A text is what a tokenizer made of it with return_tensors='pt': input_ids of (1, tokens).")
    return ids


def _show(results: Mapping[str, Any], output_path: str | os.PathLike[str] | None) -> None:
    tables = other_package("lm_eval.utils", "Scoring tasks")
    _say(tables.make_table(results))
    if output_path is not None:
        with atomic_file(output_path) as file:
            file.write_text(json.dumps(results, indent=2, default=str), encoding="utf-8")


def _say(line: str) -> None:
    """A result of a script: on stdout, where its other results are."""
    print(f"[INFO] {line}")  # noqa: T201
