"""Masked positions count nowhere: whatever looks at data finds the same in padded batches as in the bare texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer, QConfig
from quark.torch.algorithms import ALGORITHMS
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.config.algo_configs import AlgoConfig, GPTQConfig
from quark.torch.config.tensor.observer_classes import OBSERVER_CLASSES
from quark.torch.writers.gguf.imatrix import collect_imatrix
from tests.contracts.test_torch_algorithms import row_of
from tests.models.families import family
from tests.models.model_folders import KINDS, model_folder
from tests.models.padded import FORMS, bare, loud_padding, padded, texts
from tests.models.torch_zoo import tiny_llama

TEXTS = texts()
Result = dict[str, torch.Tensor]


def model(kind: str = "llama") -> Any:
    return loud_padding(tiny_llama(num_hidden_layers=1) if kind == "llama" else family(kind))


def assert_same(found: Result, expected: Result) -> None:
    """To the bit: it is the same computation."""
    assert found.keys() == expected.keys()
    other = [name for name, x in expected.items() if not torch.equal(found[name], x)]
    assert not other, f"padding counts in {other}"


def quantized(config: QConfig, data: Any, kind: str = "llama") -> Result:
    done = ModelQuantizer(config).quantize_model(model(kind), data)
    state: Result = done.state_dict()
    errors = {f"error {e.block} {e.algorithm}": torch.tensor([e.before, e.after]) for e in done.quant_errors}
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)} | errors


def of_algorithm(kind: type[AlgoConfig], data: Any) -> Result:
    row = row_of(kind)
    config = row.config if isinstance(row.config, AlgoConfig) else row.config()
    made = replace(LLMTemplate.get("llama").get_config(row.scheme), algo_config=[config])
    return quantized(made, data)


CASES = [
    pytest.param(kind, form, marks=() if (kind, form) == (GPTQConfig, "left") else pytest.mark.slow)
    for kind in ALGORITHMS
    for form in (FORMS if kind is GPTQConfig else FORMS[:2])
]


@pytest.mark.parametrize(("kind", "form"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_in_an_algorithm(kind: type[AlgoConfig], form: str) -> None:
    assert_same(of_algorithm(kind, padded(TEXTS, form)), of_algorithm(kind, bare(TEXTS)))


def of_observer(name: str, data: Any) -> Result:
    """With inputs in int8, of one scale that this observer finds."""
    base = LLMTemplate.get("llama").get_config("int8")
    entry = next(entry for entry in OBSERVER_CLASSES.values() if entry.observer == name)
    inputs = replace(base.global_quant_config.input_tensors, observer_cls=entry)
    return quantized(replace(base, global_quant_config=replace(base.global_quant_config, input_tensors=inputs)), data)


IN_ONE_SCALE = sorted(
    {entry.observer for entry in OBSERVER_CLASSES.values() if entry.__name__.startswith("PerTensor")} - {"placeholder"}
)


@pytest.mark.parametrize(
    "name", [name if name == "percentile" else pytest.param(name, marks=pytest.mark.slow) for name in IN_ONE_SCALE]
)
def test_in_an_observer(name: str) -> None:
    expected = of_observer(name, bare(TEXTS))
    for form in FORMS[:2]:
        assert_same(of_observer(name, padded(TEXTS, form)), expected)


def in_cache_and_attention(data: Any) -> Result:
    config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
    return quantized(replace(config, kv_cache_post_rope=True), data)


def in_experts(data: Any) -> Result:
    return quantized(LLMTemplate.get("auto").get_config("int8", algorithm="gptq"), data, "mixtral")


def in_a_budget(data: Any) -> Result:
    table = measure_sensitivity(model(), data, ["int4_wo_32", "int8_wo"])
    return {",".join(row.layers): torch.tensor([*row.losses.values()]) for row in table.groups}


def in_an_imatrix(data: Any) -> Result:
    return {name: torch.from_numpy(moments) for name, (moments, _) in collect_imatrix(model(), data).items()}


ELSEWHERE = (in_cache_and_attention, in_experts, in_a_budget, in_an_imatrix)


@pytest.mark.parametrize("collect", ELSEWHERE, ids=lambda collect: collect.__name__)
def test_elsewhere(collect: Callable[[Any], Result]) -> None:
    expected = collect(bare(TEXTS))
    for form in FORMS[:2]:
        assert_same(collect(padded(TEXTS, form)), expected)


def along(xs: Sequence[torch.Tensor], value: float) -> torch.Tensor:
    """Tensors padded at the right to the longest, as rows."""
    return nn.utils.rnn.pad_sequence(list(xs), batch_first=True, padding_value=value)


def pairs() -> tuple[Any, Any]:
    """Texts and labels of other lengths, whose last ones are -100 where they are padded."""
    labels = texts((5, 8, 3, 8, 6, 4), seed=1)
    one_by_one = [{**text, "labels": label[None]} for text, label in zip(bare(TEXTS), labels, strict=True)]
    return [{**padded(TEXTS, rows=6)[0], "labels": along(labels, -100)}], one_by_one


def waves() -> tuple[Any, Any]:
    """Recordings, of which the model makes fewer frames."""
    found = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (4000, 2500, 6000)]
    mask = along([torch.ones(len(wave), dtype=torch.long) for wave in found], 0)
    return [{"input_values": along(found, 0.0), "attention_mask": mask}], [{"input_values": x[None]} for x in found]


def texts_with_images() -> tuple[Any, Any]:
    """Texts of which one has no image and one has two; sixteen tokens stand for an image."""
    counts, images = (1, 2, 0), torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = [torch.cat([torch.full((16 * count,), 2047), text]) for count, text in zip(counts, TEXTS[:3], strict=True)]
    alone = [
        {**text, **({"pixel_values": part} if len(part) else {})}
        for text, part in zip(bare(found), images.split(counts), strict=True)
    ]
    return [{**padded(found, length=50)[0], "pixel_values": images}], alone


FAMILIES = {"t5": pairs, "bart": pairs, "wav2vec2": waves, "llava": texts_with_images}


@pytest.mark.parametrize("name", ["t5", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "t5")])
def test_in_families_with_other_inputs(name: str, tmp_path: Path) -> None:
    model_folder(name, tmp_path)
    kind = getattr(transformers, KINDS[name][0])

    def solved(data: Any) -> Result:
        config = LLMTemplate.get("auto").get_config("int8", algorithm="gptq")
        state: Result = ModelQuantizer(config).quantize_model(kind.from_pretrained(tmp_path), data).state_dict()
        return state

    together, alone = FAMILIES[name]()
    assert_same(solved(together), solved(alone))
