"""Layers behind the blocks (heads, poolers) are solved by what they read there, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.granularity import PerGroup
from quark.core.spec import LayerSpec, spec
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms.rounding.gptq import GPTQ
from quark.torch.config.algo_configs import AlgoConfig, GPTAQConfig, GPTQConfig, ImportanceScaleConfig, QronosConfig
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.fake_quant import Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import find_blocks
from quark.torch.model.blocks.after_blocks import CallAfterBlocks, layers_after_blocks, without_blocks
from tests.models.architectures import build, token_ids
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.torch.flows.test_file2file import save_float
from tests.torch.flows.test_stream import streamed

INT3 = spec("int3", PerGroup(-1, 16), symmetric=False)


def quantized(model: Any, *algorithms: AlgoConfig, data: Any = None, scheme: str = "uint4_wo_32") -> Any:
    config = replace(LLMTemplate.get("auto").get_config(scheme), exclude=[], algo_config=list(algorithms) or None)
    return ModelQuantizer(config).quantize_model(model, data or token_batches(6))


def error(model: Any, reference: Any, batches: Any) -> float:
    with torch.no_grad():
        pairs = [(model(batch)[0].float(), reference(batch)[0].float()) for batch in batches]
    return sum(float((a - b).square().sum()) for a, b in pairs)


@pytest.mark.parametrize("algorithm", [GPTQConfig(), GPTAQConfig(), QronosConfig(), QronosConfig(fisher=True)])
def test_a_head_is_solved_by_what_it_reads(algorithm: AlgoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    data = token_batches(6)
    solved = quantized(tiny_llama(), algorithm)
    assert quantized_layers(solved)["lm_head"].weight_quantizer.mode is Mode.frozen
    monkeypatch.setattr(GPTQ, "solves_after_blocks", False)
    nearest = quantized(tiny_llama(), algorithm)
    assert quantized_layers(nearest)["lm_head"].weight_quantizer.mode is not Mode.frozen
    assert error(solved, tiny_llama(), data) < 0.9 * error(nearest, tiny_llama(), data)
    of_blocks = [x for name, x in solved.named_parameters() if "layers" in name]
    assert all(map(torch.equal, of_blocks, [x for name, x in nearest.named_parameters() if "layers" in name]))


def test_scales_of_a_head_are_chosen_by_importance() -> None:
    torch.manual_seed(0)
    weighed, nearest = quantized(tiny_llama(), ImportanceScaleConfig()), quantized(tiny_llama())
    scales = [quantized_layers(model)["lm_head"].weight_quantizer.params.scale for model in (weighed, nearest)]
    assert not torch.equal(*scales)


def test_layers_of_the_heads_of_encoders_are_found() -> None:
    model = build("bert")
    names, batch = find_blocks(model), token_ids()
    hidden = torch.randn(*batch.shape, model.config.hidden_size)
    call = CallAfterBlocks((hidden,), {}, None, batch)
    found = layers_after_blocks(without_blocks(model, names), call)
    assert found and not any(name.startswith(tuple(names)) or "embeddings" in name for name in found)
    # What it computes is what the model computes behind blocks that give this.
    handle = model.get_submodule(names[-1]).register_forward_hook(
        lambda module, args, output: hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])
    )
    with torch.no_grad():
        expected = max(model(batch).values(), key=torch.Tensor.numel)
        handle.remove()
        assert torch.equal(call.run(without_blocks(model, names)), expected)


def test_the_users_model_and_config_are_left_alone() -> None:
    model = tiny_llama()
    before = {name: id(module) for name, module in model.named_modules() if not isinstance(module, nn.Linear)}
    config, forwards = model.config.to_dict(), [block.forward for block in model.model.layers]
    quantized(model, QronosConfig())
    assert model.config.to_dict() == config and model.config.use_cache
    assert [block.forward for block in model.model.layers] == forwards
    now = {name: id(module) for name, module in model.named_modules()}
    assert all(now[name] == identity for name, identity in before.items())


def test_a_head_that_is_the_embedding_stays_as_it_was() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    made = quantized(model, GPTQConfig())
    assert torch.equal(made.lm_head.weight, made.model.embed_tokens.weight)
    assert torch.equal(made.lm_head.weight, tiny_llama(tie_word_embeddings=True).lm_head.weight)


def test_where_layers_are_chosen_the_others_are_rounded_to_nearest() -> None:
    made = quantized(tiny_llama(), GPTQConfig(inside_layer_modules=["self_attn.q_proj"]))
    assert quantized_layers(made)["lm_head"].weight_quantizer.mode is not Mode.frozen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


class Reads(nn.Module):
    """Reads a weight of a block itself, so that it does not run without its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layers = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.layers[0].first.bias  # type: ignore[union-attr, operator]


def test_a_model_that_does_not_run_without_its_blocks_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = QConfig(config_of_layer(LayerSpec(weight=INT3)), algo_config=[GPTQConfig()])
    with caplog.at_level("INFO", logger="quark"):
        made = ModelQuantizer(config).quantize_model(Reads().eval(), [torch.randn(40, 16)])
    assert "Layers after the blocks are rounded to nearest: the model alone fails (" in caplog.text
    modes = {name: layer.weight_quantizer.mode is Mode.frozen for name, layer in quantized_layers(made).items()}
    assert modes["layers.1.second"] and not modes["head"] and not modes["before"]


def test_block_by_block_they_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save_float(tmp_path / "float")
    config = replace(LLMTemplate.get("llama").get_config("uint4_wo_32"), exclude=[], algo_config=[GPTQConfig()])
    with caplog.at_level("INFO", logger="quark"):
        streamed(config, source, tmp_path / "out", token_batches(3))
    assert "Rounded to nearest, as they lie outside the blocks, which run alone: lm_head." in caplog.text
