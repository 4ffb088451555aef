"""`python -m benchmarks.architectures`: a table of families and algorithms, of which each cell was run.

works      quantize_model, freeze and one forward gave finite numbers
refused    a QuarkError, whose text is listed below the table
fails      any other exception, or numbers that are not finite
"""

from __future__ import annotations

import argparse
import json
import logging
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures.tiny import batches, tiny_config, tiny_model
from quark.core.metrics import sqnr
from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.algo_configs import AutoRoundConfig
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
    "autoround": ("uint4_wo_32", AutoRoundConfig(iters=2)),
}
"""Column -> scheme and algorithm."""


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
    model: Any = tiny_model(kind, tiny_config(kind.config_class, **sizes))
    return model, batches(model)


def result(model: Any, batch: Any) -> torch.Tensor:
    """The largest tensor that a model returns, the first of those: logits, or hidden states."""
    with torch.no_grad():
        return max((x for _, x in named_outputs(model(**batch))), key=torch.Tensor.numel)


def run(name: str, class_name: Any, column: str) -> Outcome:
    """Quantize a fresh model of the family, freeze it, and run it."""
    scheme, algorithm = RUNS[column]
    model, data = build(name, class_name)
    before = result(model, data[0])
    try:
        config = LLMTemplate.get(model.config.model_type).get_config(scheme, algorithm)
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model, data))
        after = result(model, data[0])
    except QuarkError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a fault, which the table is made to show
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "quark" in frame.filename] or frames
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return Outcome("fails", f"{place}: {type(error).__name__}: {error}")
    if not after.isfinite().all():
        return Outcome("fails", "the output is not finite")
    return Outcome("works", f"{float(sqnr(before, after)):.1f}")


def main() -> None:
    """Run what is asked, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="all causal and seq2seq families")
    parser.add_argument("--family", action="append", help="only these")
    parser.add_argument("--run", action="append", choices=list(RUNS), help="only these columns")
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = families(options.every or bool(options.family))
    if options.family:
        chosen = {name: chosen[name] for name in options.family}
    results: dict[str, dict[str, list[str]]] = {}
    counts: Counter[str] = Counter()
    for name, class_name in chosen.items():
        try:
            model, data = build(name, class_name)
            result(model, data[0])
        except Exception as error:  # noqa: BLE001 - sizes that this family does not take
            reason = str(error).splitlines()[0] if str(error) else ""
            print(f"{name:24} not built: {type(error).__name__}: {reason}"[:200], flush=True)
            continue
        outcomes = {column: run(name, class_name, column) for column in options.run or RUNS}
        results[name] = {column: [o.verdict, o.detail] for column, o in outcomes.items()}
        counts.update(outcome.verdict for outcome in outcomes.values())
        cells = (f"{c}={o.detail if o.verdict == 'works' else o.verdict.upper()}" for c, o in outcomes.items())
        print(f"{name:24} {'  '.join(cells)}", flush=True)
        for detail in dict.fromkeys(o.detail for o in outcomes.values() if o.verdict != "works"):
            print(f"    {detail[:260]}", flush=True)
    print(dict(counts))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
