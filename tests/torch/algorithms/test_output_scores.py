"""Solvers that count errors of outputs by what they do to the model's distribution: the scores, and what they gain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quark.core.solvers.coupled import shrunk
from quark.errors import ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.algorithms.rounding.output_scores import OutputScores, scores_bytes
from quark.torch.algorithms.score_passes import SEED
from quark.torch.config.algo_configs import AlgoConfig, AutoRoundConfig, GPTQConfig, QronosConfig
from quark.torch.model.blocks import find_blocks, record_calls
from tests.models.families import family
from tests.models.torch_zoo import language_model, text_windows, tiny_llama, token_batches


def test_scores_are_those_of_one_backward_pass_through_the_whole_model() -> None:
    model, data = language_model(), text_windows("calibration", 16, 3)
    blocks = find_blocks(model)
    scores = OutputScores(model, blocks, data, BlockWeights(), PassStore(None, {}))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    calls, leaf = record_calls(model, blocks, data), "mlp.down_proj"
    name, gradients = f"{blocks[1]}.{leaf}", []
    block = Block(blocks[1], model.get_submodule(blocks[1]), calls[blocks[1]], groups=[(leaf,)])
    hidden = {index: _inputs_of(model, blocks[1], batch) for index, batch in enumerate(data)}
    block.calls = [call.with_hidden(hidden[index]) for index, call in enumerate(calls[blocks[0]])]
    for index, batch in enumerate(data):
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(lambda m, a, y, seen=seen: seen.append(y))
        probabilities = model(batch).logits[0].softmax(-1)
        handle.remove()
        labels = torch.multinomial(probabilities.detach(), 1, generator=torch.Generator().manual_seed(SEED + index))
        (gradient,) = torch.autograd.grad(probabilities.gather(1, labels).log().sum(), seen)
        gradients.append(gradient[0])
    found = scores.of_layers(block)
    assert list(found) == [name]
    rows = torch.cat(gradients)
    expected = shrunk(rows.T @ rows, float(rows.square().sum(1).square().sum()), len(rows))
    torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-6)
    # What the down projection gives is added to the stream, and that is what the block gives.
    torch.testing.assert_close(scores.of_block(block), expected, rtol=1e-3, atol=1e-6)


def _inputs_of(model: Any, name: str, batch: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return seen[0]


def test_a_model_without_blocks_is_refused() -> None:
    data = text_windows("calibration", 16, 1)
    inner = language_model().model
    with pytest.raises(NotSupportedError, match="no list of blocks"):
        OutputScores(inner, [""], data, BlockWeights(), PassStore(None, {}))


@pytest.mark.slow
def test_where_it_is_chosen_and_there_is_no_room_it_is_as_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(fisher: Any, head: bool = True) -> dict[str, torch.Tensor]:
        model, config = language_model(), LLMTemplate.get("llama").get_config("int3_wo_128")
        config = replace(config, algo_config=[QronosConfig(["self_attn.k_proj"], fisher=fisher)])
        made = ModelQuantizer(config).quantize_model(model if head else model.model, data)
        return {name.removeprefix("model."): x for name, x in made.state_dict().items() if "lm_head" not in name}

    def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], x) for name, x in other.items())

    data = text_windows("calibration", 32, 4)
    plain, by_scores = weights(False), weights(True)
    assert not equal(plain, by_scores)
    with caplog.at_level("DEBUG", logger="quark"):
        assert equal(weights("auto"), by_scores)
        assert "qronos by Fisher information" in caplog.text and "without Fisher" not in caplog.text
        assert equal(weights("auto", head=False), plain)
        assert "without Fisher information of outputs: LlamaModel gives no logits" in caplog.text
        needed = scores_bytes(language_model(), [f"model.layers.{index}" for index in range(5)], data)
        # Of six states of 128 positions in 256 channels, and of moments of 640 outputs with what is made of them.
        assert needed == 6 * 128 * 256 * 4 + 3 * 640**2 * 4
        monkeypatch.setattr("quark.torch.algorithms.rounding.output_scores.available_memory", lambda: 2 * needed - 1)
        assert equal(weights("auto"), plain)
        assert "0.01 GB are free" in caplog.text
        monkeypatch.setattr("quark.torch.algorithms.rounding.output_scores.available_memory", lambda: None)
        monkeypatch.setattr("quark.torch.algorithms.rounding.output_scores.compiles", lambda spec: False)
        assert equal(weights("auto"), plain)
        assert "no compiler, or none of the element types is compiled" in caplog.text


def test_needs_refinement() -> None:
    with pytest.raises(ConfigError, match="refine_passes must be 1 or more"):
        QronosConfig(fisher=True, refine_passes=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "scheme", "most"),
    [
        (QronosConfig(), "int3_wo_128", 0.85),
        (QronosConfig(), "int2_wo_64", 1.0),
        (QronosConfig(), "mxfp4_wo", 0.85),
        (AutoRoundConfig(iters=120, lr=1 / 120, minmax_lr=1 / 120, batch_size=2), "int3_wo_128", 0.98),
    ],
    ids=["qronos int3", "qronos int2", "qronos mxfp4", "autoround int3"],
)
def test_held_out_divergence_falls(algorithm: Any, scheme: str, most: float) -> None:
    # Tseng et al. 2025 (arXiv:2505.22988) report a third less divergence than rounding by inputs alone.
    data, heldout = text_windows("calibration", 256, 16), torch.cat(text_windows("heldout", 256, 8))

    def log_probabilities(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(heldout).logits.float(), -1)

    def divergence(algorithm: AlgoConfig) -> float:
        config = LLMTemplate.get("llama").get_config("mxfp4" if scheme == "mxfp4_wo" else scheme)
        layer = replace(config.global_quant_config, input_tensors=None)
        config = replace(config, global_quant_config=layer, algo_config=[algorithm], log_severity_level=3)
        found = log_probabilities(ModelQuantizer(config).quantize_model(language_model(), data))
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    expected = log_probabilities(language_model())
    one, other = replace(algorithm, fisher=False), replace(algorithm, fisher=True)
    assert divergence(other) < most * divergence(one)


@pytest.mark.parametrize("name", ["gptq", "gptaq", "qronos", "autoround"])
def test_codes_that_are_quantized_once_more_are_refused_before_any_work(name: str) -> None:
    """No element of such a weight has a grid of its own."""
    model = tiny_llama()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    config = LLMTemplate.get("llama").get_config("int4_fp8", [name])
    with pytest.raises(ConfigError, match=r"layers\.0.*quantized once more.*Possible: importance") as caught:
        ModelQuantizer(config).quantize_model(model, token_batches())
    assert "may have changed" not in str(caught.value)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_mixture_that_returns_what_its_routers_say_is_solved_as_one_that_does_not(name: str) -> None:
    base = LLMTemplate.get("any").get_config("int4_wo_32")
    config = replace(base, algo_config=[GPTQConfig(fisher=True)])
    data = [torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(3))]
    asking, plain = (family(name, output_router_logits=asked) for asked in (True, False))
    plain.load_state_dict(asking.state_dict())
    solved, expected = (ModelQuantizer(config).quantize_model(model, data) for model in (asking, plain))
    assert solved.config.output_router_logits is True
    for key, value in expected.state_dict().items():
        assert torch.equal(solved.state_dict()[key], value), key
