"""Weights that are learned in one matrix become what each becomes alone, in steps that are few kernels on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.layer_weights import weight_quantizer
from quark.torch.algorithms.rounding import learned_rounding
from quark.torch.algorithms.rounding.autoround import BlockLoss
from quark.torch.algorithms.rounding.learned_rounding import LearnedRounding, Readers, in_matrices, readers_of, row_of
from quark.torch.config.named_algorithms import algo_config_by_name
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers, replace_layer
from quark.torch.model.blocks import Call, Unchanged, find_blocks, record_calls
from tests.models.torch_zoo import tiny_llama
from tests.pretended_gpu import PretendedGpu

UINT4 = spec("uint4", PerGroup(-1, 32), symmetric=False)
GROUPS = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
          ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]  # fmt: skip
MOST_LAUNCHES = 120
"""Of a step: about 75 are the block's own, forward and back."""


def llama_block(dtype: torch.dtype, device: str = "cpu") -> tuple[Block, dict[str, QuantLayer]]:
    """The first block of a small model, its layers quantized, on four samples of 32 tokens."""
    model = tiny_llama(dtype=dtype).to(device)
    names = find_blocks(model)
    data = [torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    calls = record_calls(model, names, data)[names[0]]
    block = Block("", model.get_submodule(names[0]), calls, calls, groups=[*GROUPS])
    for leaf in (leaf for group in GROUPS for leaf in group):
        replace_layer(block.module, leaf, LayerSpec(weight=UINT4))
    return block, quantized_layers(block.module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_a_block_is_few_launches_and_waits_for_nothing(dtype: torch.dtype) -> None:
    with PretendedGpu(where=False) as gpu, torch.no_grad():
        block, layers = llama_block(dtype, "cuda")
        with quantizers_off(layers.values()):
            targets = [call.run(block.module) * 1.1 for call in block.calls]
            loss = BlockLoss(block.module, block.calls, targets, torch.eye(128, device="cuda") + 0.1)
            weights = in_matrices(readers_of(block, layers))
            learned = [some.weight for weight in weights for some in weight.readers]
            assert [len(some.layers) for weight in weights for some in weight.readers] == [3, 1, 2, 1]
            for weight in weights:
                weight.attach()
            for _ in range(2):  # what is the same in all steps is found in the first
                gpu.meter.reset()
                loss.learn([0, 2], learned)
                for weight in weights:
                    weight.step(0.01, 0.01)
            for weight in weights:
                weight.detach()
    assert 60 < gpu.meter.launches.total() <= MOST_LAUNCHES
    assert not gpu.meter.waits and not gpu.meter.uploads


@pytest.mark.slow
@pytest.mark.parametrize("name, passes", [("autoround", 2), ("distillation", 1), ("rotation", 2), ("quarot", 2)])
def test_a_learner_reads_the_device_a_few_times_a_block(name: str, passes: int) -> None:
    """Passes over the blocks: scores and learning; learning; the rotation and the judgement of it."""
    data = [torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    with PretendedGpu() as gpu:
        model = tiny_llama().to("cuda")
        config = LLMTemplate.get("llama").get_config("uint4_wo_32", [algo_config_by_name(name)])
        gpu.meter.reset()
        ModelQuantizer(config).quantize_model(model, [x.to("cuda") for x in data])
    # The model itself reads its masks, once a batch.
    waits = [count for at, count in gpu.meter.waited_at.items() if not at.startswith("torch/model/batches.py")]
    blocks = len(model.model.layers) + 1  # and what is around them
    looks = 2 * passes  # at whether blocks hand on their hidden state alone
    assert sum(waits) <= 4 * blocks * passes + looks, gpu.meter.waited_at


@pytest.mark.parametrize("form", [
    UINT4, spec("int4", PerGroup(-1, 32)), spec("int8", PerChannel(0)), spec("int4", PerGroup(-1, -1)),
    spec("uint4", PerChannel(1), symmetric=False), spec("int8", PerTensor()), spec("int4", PerBlock((16, 32))),
    cast(TensorSpec, SCHEMES["mxfp4"].weight), cast(TensorSpec, SCHEMES["mx6"].weight),
], ids=str)  # fmt: skip
def test_weights_in_one_matrix_become_what_each_becomes_alone(form: TensorSpec) -> None:
    generator = torch.Generator().manual_seed(0)

    def made() -> dict[str, QuantLayer]:
        model = nn.ModuleDict()
        for index, (outputs, inputs) in enumerate([(32, 64), (16, 64), (48, 64), (16, 96)]):
            torch.manual_seed(index)
            model[f"l{index}"] = nn.Linear(inputs, outputs)
            replace_layer(model, f"l{index}", LayerSpec(weight=form))
        return quantized_layers(model)

    together, alone = made(), made()
    names = [*together]
    first = [names[:2]] if row_of(cast(torch.Tensor, together["l0"].weight), form) else [names[:1], names[1:2]]
    bundles = in_matrices([Readers({n: together[n] for n in some}) for some in (*first, names[2:3], names[3:])])
    singles = [LearnedRounding([Readers({n: alone[n]})]) for n in names]
    assert (len(bundles) < len(singles)) == (len(first) == 1)
    for weight in (*bundles, *singles):
        weight.attach()
    for _ in range(3):
        pulls = [torch.randn(single.shape, generator=generator) for single in singles]
        for single, pull in zip(singles, pulls, strict=True):
            single.readers[0].weight.grad = pull.clone()
        of_layer = dict(zip(names, pulls, strict=True))
        for bundle in bundles:
            for some in bundle.readers:
                some.weight.grad = torch.cat([of_layer[name] for name in some.names])
            bundle.step(0.1, 0.05)
        for single in singles:
            single.step(0.1, 0.05)
    for weight in (*bundles, *singles):
        weight.detach()
        weight.freeze()
    for name in names:
        assert torch.equal(cast(torch.Tensor, together[name].weight), cast(torch.Tensor, alone[name].weight))
        found, expected = (weight_quantizer(layer[name]).params for layer in (together, alone))
        assert found is not None and expected is not None
        assert torch.equal(found.scale, expected.scale) and found.scale.shape == expected.scale.shape
        if expected.zero_point is not None:
            assert torch.equal(cast(torch.Tensor, found.zero_point), expected.zero_point)


def test_layers_that_read_one_tensor_give_and_learn_what_they_do_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (learned_rounding.TOGETHER, 1):
        monkeypatch.setattr(learned_rounding, "TOGETHER", most)
        block, layers = llama_block(torch.float32)
        with torch.no_grad(), quantizers_off(layers.values()):
            weights = in_matrices(readers_of(block, layers))
            for weight in weights:
                weight.attach()
            with torch.enable_grad():
                given = block.calls[0].run(block.module)
                given.square().sum().backward()
            pulls = [some.weight.grad for weight in weights for some in weight.readers]
            for weight in weights:
                weight.detach()
        assert all(
            "forward" not in layer.__dict__ and isinstance(layer.weight, nn.Parameter) for layer in layers.values()
        )
        flat = torch.cat([cast(torch.Tensor, pull).flatten() for pull in pulls])
        found.append((len(pulls), given.detach(), flat))
    assert (found[0][0], found[1][0]) == (4, 7)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class InPlace(nn.Module):
    """Writes on what one of its layers gives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        q *= 2
        return q + self.k(x)


def test_a_block_that_writes_on_a_part_has_products_apart() -> None:
    module = InPlace()
    call = Call((torch.randn(2, 5, 32),), {})
    block = Block("", module, [call], [call], groups=[("q", "k")])
    for leaf in ("q", "k"):
        replace_layer(module, leaf, LayerSpec(weight=UINT4))
    layers = quantized_layers(module)
    with quantizers_off(layers.values()):
        assert [some.names for some in readers_of(block, layers)] == [["q"], ["k"]]
        assert [some.names for some in readers_of(replace(block, groups=[("k",)]), layers)] == [["k"]]


class Normed(nn.Module):
    """A norm, and a layer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(x + self.layer(self.norm(x)))
        return y


def test_what_a_block_makes_of_its_input_alone_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, ran = Normed(), []
    calls = [Call((torch.randn(1, 3, 8),), {}) for _ in range(3)]
    unchanged = Unchanged(module, calls, [module.layer])
    assert [*unchanged.given] == [module.norm]
    module.norm.register_forward_hook(lambda norm, args, output: ran.append(output))
    joined = torch.cat([calls[2].hidden, calls[0].hidden])
    expected = module(joined)
    with unchanged.of(joined, [2, 0]):
        assert torch.equal(module(joined), expected)
        assert torch.equal(module(joined * 2), module(joined.clone() * 2))
    assert ran[1] is not ran[0] and not ran[1].requires_grad
    assert torch.equal(module(joined), expected) and "forward" not in module.norm.__dict__
    monkeypatch.setattr("quark.torch.model.blocks.unchanged.MOST_BYTES", calls[0].hidden.nbytes)
    assert not Unchanged(module, calls, [module.layer]).given
