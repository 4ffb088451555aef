"""Experts that no calibration token reaches stop no algorithm, in no family, and change none of those with enough.

A router never chooses one expert. What the others become is compared with a run in which they read no others. Experts
are fused, as transformers has them, or modules of their own, as code of checkpoints has them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quark.base.log import logger
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import ALGORITHMS
from quark.torch.algorithms.scaling.base import Folding
from quark.torch.calibration import expert_tokens
from quark.torch.calibration.experts import expert_of
from quark.torch.config.algo_configs import AlgoConfig, AutoRoundConfig, DistillationConfig, GPTQConfig, SVDQuantConfig
from quark.torch.layers.fake_quant import Mode
from quark.torch.layers.replace import quantized_layers
from tests.contracts.test_torch_algorithms import row_of
from tests.models.families import MOE, family, with_expert_modules

DATA = [torch.randint(3, 64, (8, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
IDLE = 2
OTHERWISE: dict[type[AlgoConfig], AlgoConfig] = {
    AutoRoundConfig: AutoRoundConfig(iters=2),
    DistillationConfig: DistillationConfig(epochs=1),
    SVDQuantConfig: SVDQuantConfig(svd_rank=4, min_layer_size=32, refine_passes=0),
}
"""Settings under which an algorithm has something to do on models this small, and does it soon."""


def settings(kind: type[AlgoConfig]) -> AlgoConfig:
    row = row_of(kind).config
    return OTHERWISE.get(kind) or (row if isinstance(row, AlgoConfig) else row())


def starved(name: str, form: str) -> Any:
    """A model of which no router chooses the expert IDLE."""
    model = family(name) if form == "fused" else with_expert_modules(family(name))

    def without(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.where(x == IDLE, (IDLE + 1) % 4, x)
        if x.shape[-1] == 4:  # scores of all experts, none below 0, or logits
            x = x.index_fill(-1, torch.tensor([IDLE]), 0.0 if bool((x >= 0).all()) else -1e9)
        return x

    def after(router: nn.Module, args: Any, output: Any) -> Any:
        return without(output) if isinstance(output, torch.Tensor) else tuple(map(without, output))

    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(after)
    return model


def quantized(name: str, form: str, config: AlgoConfig, **options: Any) -> tuple[dict[str, Any], str]:
    """The layers of the model, and what the log says of experts."""
    scheme = row_of(type(config)).scheme
    base = LLMTemplate.get("any").get_config(scheme if scheme == "int8" else "int4_wo_32")
    config_of_model = replace(base, algo_config=[config], **options)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        model = ModelQuantizer(config_of_model).quantize_model(starved(name, form), DATA)
    finally:
        logger.removeHandler(handler)
    assert all(bool(torch.isfinite(model(batch).logits).all()) for batch in DATA)
    return dict(quantized_layers(model)), " ".join(line for line in said if "xperts" in line)


READING = [kind for kind, algorithm in ALGORITHMS.items() if algorithm.reads_inputs or algorithm.learns]
FORMS = ("fused", "modules")
CASES = [
    pytest.param(name, form, kind, marks=() if (name, kind) == ("qwen3_moe", GPTQConfig) else pytest.mark.slow)
    for name in MOE
    for form in FORMS
    if (name, form) != ("llama4_text", "modules")  # whose experts get sorted rows
    for kind in READING
]


@pytest.mark.parametrize(("name", "form", "kind"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_an_expert_without_tokens_stops_nothing_and_leaves_the_others_alone(
    name: str, form: str, kind: type[AlgoConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = quantized(name, form, settings(kind))
    experts = [layer for layer in found if expert_of(layer) is not None]
    assert experts and (said or not ALGORITHMS[kind].reads_inputs)
    assert kind is not AutoRoundConfig or "that no token reached are rounded to nearest" in said
    assert kind is not GPTQConfig or all(found[layer].weight_quantizer.mode is Mode.frozen for layer in experts)
    monkeypatch.setattr(expert_tokens, "EXTRA", 0)
    alone, _ = quantized(name, form, settings(kind))
    if not issubclass(ALGORITHMS[kind], Folding):  # a fold behind a norm is chosen by all that read it
        for layer in experts:
            if f"experts.{IDLE}." not in layer:
                close = torch.isclose(found[layer].weight, alone[layer].weight, rtol=1e-4, atol=1e-6)
                assert float(close.float().mean()) > 0.99, layer


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPTQConfig, AutoRoundConfig])
def test_no_score_is_known_of_an_expert_without_tokens(kind: type[AlgoConfig]) -> None:
    _, said = quantized("qwen3_moe", "fused", replace(settings(kind), fisher=True))
    assert said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "kind"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_all_tokens_to_all_experts_leaves_none_without(name: str, form: str, kind: type[AlgoConfig]) -> None:
    _, said = quantized(name, form, settings(kind), calibrate_all_experts=True)
    assert not said or kind is AutoRoundConfig  # which learns from what blocks return
