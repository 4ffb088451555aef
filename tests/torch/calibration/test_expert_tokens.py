"""Tokens of others that experts read: who reads what, and that mixtures return what they always do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from quark.compat.llm_scripts.model_loading import preprocess_for_quantization
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_inputs import SharedStatistics
from quark.torch.calibration import expert_tokens
from quark.torch.calibration.expert_tokens import ExpertCalibration, all_tokens_to_all_experts, reading_extra
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import find_blocks, record_calls
from quark.torch.model.passes import UnfusedExperts
from tests.models.families import MOE, family, with_expert_modules
from tests.torch.algorithms.test_algorithms import Routed

DATA = [torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
TOKENS = sum(batch.numel() for batch in DATA)
Within = Callable[[nn.Module], AbstractContextManager[None]]


def unfused(name: str) -> tuple[Any, str]:
    """A model whose experts are taken apart, and the name of its last mixture."""
    model = family(name)
    preprocess_for_quantization(model)
    return model, [name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)][-1]


def read_by(model: nn.Module, layers: dict[str, nn.Linear], within: Within) -> tuple[dict[str, torch.Tensor], Any]:
    """What each layer reads of the data that is not 0, and what the model returns."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def note(name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen[name].append(args[0][args[0].any(-1)])

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(note, name)))
        with within(model):
            outputs = torch.cat([model(batch).logits for batch in DATA])
    return {name: torch.cat(rows) for name, rows in seen.items()}, outputs


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "qwen3_moe" else []) for n in MOE])
def test_a_mixture_returns_what_it_always_does_whatever_its_experts_read(name: str) -> None:
    model, mixture = unfused(name)
    experts = model.get_submodule(mixture)
    layers = {str(i): experts.get_submodule(f"{i}.{experts.names[1]}") for i in range(4)}
    down = {f"{i} down": experts.get_submodule(f"{i}.{experts.names[2]}") for i in range(4)}
    own, expected = read_by(model, layers | down, lambda model: ExitStack())  # type: ignore[arg-type, return-value]
    for within, extra in (
        (partial(reading_extra, extra={mixture: {1: 0.5}}), {1: 0.5}),
        (all_tokens_to_all_experts, dict.fromkeys(range(4), 1.0)),
    ):
        seen, found = read_by(model, layers | down, within)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for index in range(4):
            before, count = len(own[str(index)]), len(seen[str(index)])
            assert count == len(seen[f"{index} down"])
            others = extra.get(index, 0) * (TOKENS - before)
            assert before + others <= count < before + others + len(DATA), index
    assert not any("extra" in vars(m) or "all_tokens" in vars(m) for m in model.modules())


def test_experts_that_are_called_with_their_tokens_alone_are_called_with_all_before() -> None:
    torch.manual_seed(0)
    model, x = Routed().eval(), torch.randn(64, 32)
    seen: list[tuple[int, int, bool]] = []
    for index, expert in enumerate(model.experts):
        expert.register_forward_pre_hook(
            lambda m, args, index=index: seen.append((index, len(args[0]), expert_tokens.is_shown(m)))
        )
    expected = model(x)
    own = {index: count for index, count, _ in seen}
    del seen[:]
    with all_tokens_to_all_experts(model):
        assert torch.equal(model(x), expected)
    assert seen == [(0, 64, False), (1, 64, False), (0, own[0], True), (1, own[1], True)]
    del seen[:]
    model(x)
    assert {index: count for index, count, _ in seen} == own and not any(shown for *_, shown in seen)


def test_experts_that_are_modules_read_their_own_tokens_and_those_that_they_are_lent_behind() -> None:
    torch.manual_seed(0)
    model, x = Routed().eval(), torch.randn(64, 32)
    seen: list[tuple[torch.Tensor, bool]] = []
    for expert in model.experts:
        expert.register_forward_pre_hook(lambda m, args: seen.append((args[0], expert_tokens.is_shown(m))))
    expected = model(x)
    (first, _), (second, _) = seen
    del seen[:]
    with reading_extra(model, {"experts": {1: 0.25}}):
        assert torch.equal(model(x), expected)
    read = [rows for rows, shown in seen if not shown]
    assert torch.equal(read[0], torch.cat([second, x[::4]])) and torch.equal(read[1], first) and len(read) == 2
    del seen[:]
    # The places of another router: of the float block beside, for example.
    places = {0: torch.tensor([3, 5]), 1: torch.tensor([0])}
    with reading_extra(model, {"experts": {0: 0.0, 1: 0.0}}, lambda name, find: places if find() and name else None):
        assert torch.equal(model(x), expected)
    read = [rows for rows, shown in seen if not shown]
    assert torch.equal(read[0], x[[3, 5]]) and torch.equal(read[1], x[[0]]) and len(read) == 2
    model(x)
    assert not any(shown for _, shown in seen[-2:])


def test_experts_are_lent_what_they_lack_and_counted() -> None:
    model, mixture = unfused("qwen3_moe")
    block = find_blocks(model)[-1]
    config = LLMTemplate.get("any").get_config("int4_wo_32")
    model = ModelQuantizer(config).quantize_model(model)
    calls, tokens = record_calls(model, [block], DATA[:1])[block], DATA[0].numel()
    module, experts = model.get_submodule(block), ExpertCalibration()
    own = dict.fromkeys(range(4), 0)
    for i in own:
        layer = model.get_submodule(f"{mixture}.{i}.up_proj")
        layer.register_forward_pre_hook(lambda m, args, i=i: own.update({i: own[i] + len(args[0])}))
    with torch.no_grad():
        for call in calls:
            call.run(module)
        extra = experts.extra_tokens(module, calls)["mlp.experts"]
        assert {i: min(1.0, 4 * (64 - n) / (tokens - n)) for i, n in own.items() if n < 64} == pytest.approx(extra)
    few = sum(0 < n < 64 for n in own.values())
    assert (experts.experts, experts.few, experts.idle) == (4, few, list(own.values()).count(0)) and extra


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8_dynamic"])
@pytest.mark.parametrize("form", [family, lambda name: with_expert_modules(family(name))], ids=["fused", "modules"])
def test_what_all_experts_read_is_multiplied_once(form: Any, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(LLMTemplate.get("any").get_config(scheme, "gptq"), calibrate_all_experts=True)
    products, find = [0], InputGroup._moments

    def counted(*args: Any) -> torch.Tensor:
        products[0] += 1
        return find(*args)

    def solved() -> tuple[dict[str, torch.Tensor], int]:
        products[0] = 0
        model = ModelQuantizer(config).quantize_model(form("qwen3_moe"), DATA)
        return {name: layer.weight for name, layer in quantized_layers(model).items()}, products[0]  # type: ignore[misc]

    monkeypatch.setattr(InputGroup, "_moments", counted)
    once, few = solved()
    monkeypatch.setattr(SharedStatistics, "of", lambda *_: None)
    each, many = solved()
    # In each of two blocks attention has two inputs, and each of four experts its own inside.
    assert (few, many) == (2 * (2 + 1 + 4), 2 * (2 + 4 + 4))
    assert all(torch.equal(once[name], each[name]) for name in each)


@pytest.mark.slow
def test_all_tokens_change_what_few_tokens_found_and_the_option_is_not_silent() -> None:
    config = LLMTemplate.get("any").get_config("int4_wo_32", "gptq")
    everywhere = replace(config, calibrate_all_experts=True)
    some, every = (ModelQuantizer(c).quantize_model(family("mixtral"), DATA) for c in (config, everywhere))
    layers = quantized_layers(every)
    same = {name for name, x in quantized_layers(some).items() if torch.equal(x.weight, layers[name].weight)}  # type: ignore[arg-type]
    assert same == {name for name in layers if ".0." in name and "experts" not in name}
    for model, scheme in ((family("mixtral"), "int4_wo_32"), (family("gpt2"), "int8")):
        idle = replace(LLMTemplate.get("any").get_config(scheme), calibrate_all_experts=True)
        with pytest.raises(ConfigError, match=r"calibrate_all_experts=True: .*Possible: leave it"):
            ModelQuantizer(idle).quantize_model(copy.deepcopy(model), DATA)
