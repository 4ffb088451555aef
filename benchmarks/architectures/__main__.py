"""`python -m benchmarks.architectures`: a table of families and algorithms, of which each cell was run.

works      quantize_model, freeze and one forward gave finite numbers
refused    a QuarkError, whose text is listed below the table
fails      any other exception, or numbers that are not finite

Of denoisers a run is judged on batches that it was not calibrated with, and two more verdicts are possible:

worse      more than LOSS dB below rounding to nearest in the same scheme, of an algorithm that is to make errors small
touches    a parameter of a layer that was not asked for is another one, and the algorithm is none that rescales
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures.denoisers import denoisers, tiny_denoiser
from benchmarks.architectures.isolated import DiedError, isolated
from benchmarks.architectures.tiny import batches, tiny_model, variants
from quark.core.metrics import sqnr
from quark.errors import QuarkError
from quark.jobs.words import torch_algorithms
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import named_outputs

FAMILIES = (
    "qwen3", "gpt_oss", "falcon", "phi", "bert", "bart", "whisper", "clip", "modernbert", "gemma3_text", "glm4",
    "olmo2", "t5", "bloom", "deberta-v2", "mamba", "deepseek_v3", "llama4_text",
)  # fmt: skip
"""Those that are always in the table: one of each kind of structure."""

RUNS: dict[str, tuple[str, Any]] = {
    "int4": ("uint4_wo_32", None),
    "int8": ("int8", None),
    "gptq": ("uint4_wo_32", "gptq"),
    "awq": ("uint4_wo_32", "awq"),
    "smooth": ("int8", "smooth"),
    "rotation": ("uint4_wo_32", "rotation"),
    "qronos": ("uint4_wo_32", "qronos"),
    "autoround": ("uint4_wo_32", "autoround"),
}
"""Column -> scheme and algorithm."""
DENOISER_RUNS: dict[str, tuple[str, Any]] = {
    "int8": ("int8", None),
    "int4": ("int4_wo_per_channel", None),
    "gptq": ("int4_wo_per_channel", "gptq"),
    "gptaq": ("int4_wo_per_channel", "gptaq"),
    "qronos": ("int4_wo_per_channel", "qronos"),
    "awq": ("int4_wo_per_channel", "awq"),
    "smooth": ("int8", "smooth"),
    "autoround": ("int4_wo_per_channel", "autoround:iters=2"),
    "svdquant": ("int4_wo_per_channel", "svdquant:svd_rank=4,min_layer_size=16"),
    "rotation": ("int4_wo_per_channel", "rotation"),
}
"""The same of a denoiser: widths of its layers are divided by nothing."""
VERDICTS = ("works", "refused", "worse", "touches", "fails")
RESCALES = ("awq", "smooth", "rotation")
"""Columns whose algorithm moves scales or rotations into the layers around: other parameters are others then."""
BATCHES, HELD_OUT = 8, 16
"""With which a denoiser is calibrated, and by which it is judged: of one, the SQNR varies by about 1 dB by chance."""
LOSS = 0.5
"""dB that an algorithm may be below rounding to nearest, on other batches than it was made with."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    verdict: str
    detail: str = ""


def families(every: bool) -> dict[str, Any]:
    """model_type -> class of the model, the widest head that generates text."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    heads = (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    )
    names = list(FAMILIES)
    if every:
        names += [name for head in heads[:3] for name in head if name not in names]
    encoders = ("bert", "modernbert", "deberta-v2")
    order = {name: (heads[3:] if name in encoders else heads) for name in names}
    return {
        name: next(head[name] for head in order[name] if name in head) for name in names if name in CONFIG_MAPPING_NAMES
    }


def build(name: str, class_name: Any) -> tuple[Any, list[Any]]:
    """A tiny model of a family, and its batches."""
    import transformers

    kind = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    sizes = {"decoder_start_token_id": 1} if name == "t5" else {}
    first: Exception | None = None
    for config in variants(kind.config_class, **sizes):
        try:
            model: Any = tiny_model(kind, config)
            data = batches(model)
            if not result(model, data[0]).isfinite().all():
                raise ValueError("the output of the float model is not finite")
        except Exception as error:  # noqa: BLE001 - sizes that this family does not take
            first = first or error
        else:
            return model, data
    raise first or ValueError("no sizes were tried")


def result(model: Any, *batches: Any) -> torch.Tensor:
    """The largest tensor that a model returns, the first of those: logits, or hidden states; those of several batches
    one after the other.
    """
    with torch.no_grad():
        each = [max((x for _, x in named_outputs(model(**batch))), key=torch.Tensor.numel) for batch in batches]
    return each[0] if len(each) == 1 else torch.cat([x.flatten() for x in each])


@dataclass(frozen=True)
class Subjects:
    """What the rows of a table are.

    Attributes:
        classes: By name.
        build: Name and class -> a tiny model and its batches.
        runs: Column -> scheme and algorithm.
        held_out: How many of the last batches are there to judge by; 0: the first one is, which is read, too.
    """

    classes: Mapping[str, Any]
    build: Callable[[str, Any], tuple[Any, list[Any]]]
    runs: Mapping[str, tuple[str, Any]]
    held_out: int = 0


def build_denoiser(_: str, kind: Any) -> tuple[Any, list[Any]]:
    """A tiny denoiser, and its batches; what its class takes is looked for once."""
    model, make = _found(kind)
    torch.manual_seed(0)
    return copy.deepcopy(model), [make() for _ in range(BATCHES + HELD_OUT)]


_found = lru_cache(maxsize=1)(tiny_denoiser)


def run(subjects: Subjects, name: str, column: str) -> Outcome:
    """Quantize a fresh model of the family, freeze it, and run it; judged on its last batches if they are held out."""
    scheme, algorithm = subjects.runs[column]
    model, data = subjects.build(name, subjects.classes[name])
    data, held_out = (data[: -subjects.held_out], data[-subjects.held_out :]) if subjects.held_out else (data, data[:1])
    before = result(model, *held_out)
    parameters = dict(copy.deepcopy(model).named_parameters())
    kind = getattr(model.config, "model_type", "auto")
    try:
        config = LLMTemplate.get(kind).get_config(scheme, torch_algorithms([algorithm] if algorithm else None) or None)
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model, data))
        after = result(model, *held_out)
    except QuarkError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a fault, which the table is made to show
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "quark" in frame.filename] or frames
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return Outcome("fails", f"{place}: {type(error).__name__}: {error}")
    if not after.isfinite().all():
        return Outcome("fails", "the output is not finite")
    if subjects.held_out and column not in RESCALES and (touched := _touched(model, parameters)):
        return Outcome("touches", ", ".join(touched))
    return Outcome("works", f"{float(sqnr(before, after)):.1f}")


def _touched(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters of layers that are still those of the float model, which have other values."""
    quantized = tuple(f"{name}." for name in quantized_layers(model))
    return [
        name
        for name, x in model.named_parameters()
        if not name.startswith(quantized) and not (name in before and torch.equal(x, before[name]))
    ]


def judged(outcomes: dict[str, Outcome], runs: Mapping[str, tuple[str, Any]]) -> dict[str, Outcome]:
    """The same, where an algorithm that loses more than rounding to nearest in its scheme does not work."""
    nearest = {scheme: outcomes[column] for column, (scheme, algorithm) in runs.items() if not algorithm}
    for column, outcome in outcomes.items():
        scheme, algorithm = runs[column]
        plain = nearest[scheme]
        ran = algorithm and (outcome.verdict, plain.verdict) == ("works", "works")
        if ran and float(outcome.detail) < float(plain.detail) - LOSS:
            outcomes[column] = Outcome("worse", f"{outcome.detail} dB, and to nearest {plain.detail}")
    return outcomes


def cells(subjects: Subjects, name: str, columns: list[str]) -> dict[str, Outcome]:
    """The outcomes of one family; raises where its model cannot be made or run in float."""
    subjects.build(name, subjects.classes[name])
    outcomes = {column: run(subjects, name, column) for column in columns}
    return judged(outcomes, subjects.runs) if subjects.held_out else outcomes


def shown(name: str, outcomes: dict[str, Outcome]) -> str:
    """One family: its row, and below it what did not work."""
    row = (f"{c}={o.detail if o.verdict == 'works' else o.verdict.upper()}" for c, o in outcomes.items())
    others = dict.fromkeys(o.detail for o in outcomes.values() if o.verdict != "works")
    return "\n".join([f"{name:24} {'  '.join(row)}", *(f"    {detail[:260]}" for detail in others)])


def summary(results: dict[str, dict[str, Outcome]], columns: list[str]) -> str:
    """Of each column: how many of the families that could be built work, are refused and fail."""
    lines = [f"{len(results)} families"]
    for column in columns:
        counts = Counter(outcomes[column].verdict for outcomes in results.values())
        share = counts["works"] / max(1, len(results))
        verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        lines.append(f"{column:10} {verdicts} ({share:.0%})")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="all causal and seq2seq families")
    parser.add_argument("--denoisers", action="store_true", help="the denoisers of diffusers, in place of transformers")
    parser.add_argument("--family", action="append", help="only these")
    parser.add_argument("--run", action="append", choices=[*{**RUNS, **DENOISER_RUNS}], help="only these columns")
    parser.add_argument("--part", default="1/1", help="2/5: the second of five parts of the families")
    parser.add_argument("--seconds", type=int, default=300, help="limit for one family")
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401 - once, and not in each process

    subjects = (
        Subjects(denoisers(), build_denoiser, DENOISER_RUNS, HELD_OUT)
        if options.denoisers
        else Subjects(families(options.every or bool(options.family)), build, RUNS)
    )
    chosen = options.family or list(subjects.classes)
    index, count = map(int, options.part.split("/"))
    columns = options.run or list(subjects.runs)
    results: dict[str, dict[str, Outcome]] = {}
    not_built: dict[str, str] = {}
    for name in chosen[index - 1 :: count]:
        try:
            results[name] = isolated(partial(cells, subjects, name, columns), options.seconds)
        except DiedError as error:
            not_built[name] = str(error)
            print(f"{name:24} not built: {error}"[:200], flush=True)
        else:
            print(shown(name, results[name]), flush=True)
    print(summary(results, columns))
    print(f"not built: {len(not_built)}")
    if options.json:
        rows = {name: {c: [o.verdict, o.detail] for c, o in outcomes.items()} for name, outcomes in results.items()}
        options.json.write_text(json.dumps({"families": rows, "not built": not_built}, indent=1))


if __name__ == "__main__":
    main()
