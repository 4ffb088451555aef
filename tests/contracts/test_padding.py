"""Masked positions count nowhere: whatever looks at data finds the same in padded batches as in the bare texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer, QConfig
from quark.torch.algorithms import ALGORITHMS
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.config.algo_configs import AlgoConfig, GPTQConfig
from quark.torch.config.tensor.observer_classes import OBSERVER_CLASSES
from quark.torch.writers.gguf.imatrix import collect_imatrix
from tests.contracts.test_torch_algorithms import row_of
from tests.models.families import family
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
