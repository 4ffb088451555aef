"""Blocks that an algorithm makes worse are left as they were, bit by bit; the figures are of the real outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

from quark.jobs.words import torch_algorithms
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import ALGORITHMS, Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.keep_better import SAMPLES, BlockErrorCheck, validation_batches
from quark.torch.algorithms.layer_weights import freeze_weight, weight_spec
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    SmoothQuantConfig,
)
from quark.torch.config.named_algorithms import algo_config_from_dict
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import find_blocks, record_calls
from tests.models.families import family
from tests.models.torch_zoo import tiny_llama, token_batches

DATA = token_batches(3)


@dataclass
class DoublingConfig(AlgoConfig):
    """Doubles every weight."""

    name: str = "doubling"


@dataclass
class DoublingAndRoundingConfig(DoublingConfig):
    """The same, and rounds."""


class Doubling(Algorithm):
    def on_inputs(self, group: InputGroup, block: Block) -> None:
        group.rescale(torch.full((group.inputs[0].shape[-1],), 0.5))
        for layer in group.layers.values():
            layer.weight.data.mul_(2)


class DoublingAndRounding(Algorithm):
    rounds: ClassVar[bool] = True

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        for layer in cast(Any, group.layers).values():
            freeze_weight(
                layer, torch.ones_like(layer.weight), tensor_qparams(layer.weight.detach(), weight_spec(layer))
            )


def quantized(scheme: str, *algorithms: str | AlgoConfig, model: nn.Module | None = None) -> Any:
    made = LLMTemplate.get("llama").get_config(scheme, list(algorithms))
    return ModelQuantizer(made).quantize_model(model or tiny_llama(), DATA)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
def test_what_a_bad_algorithm_did_is_undone_bit_by_bit(monkeypatch: pytest.MonkeyPatch, rounds: bool) -> None:
    config, algorithm = (DoublingAndRoundingConfig, DoublingAndRounding) if rounds else (DoublingConfig, Doubling)
    monkeypatch.setitem(ALGORITHMS, config, algorithm)
    plain = quantized("int8").state_dict()
    model = quantized("int8", config(keep_better=True))
    assert [(row.block, row.kept) for row in model.quant_errors] == [(f"model.layers.{i}", False) for i in range(2)]
    assert all(row.after > row.before for row in model.quant_errors)
    state = model.state_dict()
    assert state.keys() == plain.keys()
    for name, tensor in plain.items():
        if rounds and "input_quantizer" in name:
            # Behind a solver, layers read what rounded weights give.
            assert torch.allclose(state[name], tensor, rtol=0.1), name
        else:
            assert torch.equal(state[name], tensor), name
    model = quantized("int8", config())
    assert [row.kept for row in model.quant_errors] == [True, True]
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, plain["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GPTQConfig(), GPTAQConfig(), AWQConfig()], ids=lambda config: config.name)
def test_figures_are_the_errors_of_the_real_outputs(algorithm: AlgoConfig, caplog: pytest.LogCaptureFixture) -> None:
    reference = tiny_llama()
    name = find_blocks(reference)[0]
    calls = record_calls(reference, [name], DATA)[name]

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            expected = torch.cat([call.run(reference.get_submodule(name)) for call in calls])
            found = torch.cat([call.run(model.get_submodule(name)) for call in calls])
        return float((found - expected).norm() / expected.norm())

    # Live scales, so that what is measured is what a forward does.
    model = quantized("ptpc_fp8" if algorithm.name == "awq" else "int4_wa_64", algorithm)
    plain = quantized("ptpc_fp8" if algorithm.name == "awq" else "int4_wa_64")
    row = model.quant_errors[0]
    assert (row.before, row.after) == pytest.approx((error(plain), error(model)), rel=1e-4)
    assert str(row) == (
        f"{name}: output error {row.before:.4g} to nearest, {row.after:.4g} with {algorithm.name}: kept."
    )


@pytest.mark.slow
def test_an_algorithm_is_judged_by_what_those_before_it_gave() -> None:
    first, second = quantized("int4_wo_32", "awq", "gptq").quant_errors[::2]
    assert (second.earlier, second.before) == ((("awq",), first.after) if first.kept else ((), first.before))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4", "qwen3"])
def test_one_alpha_that_ruins_a_model_is_left_out(model_type: str) -> None:
    reference = family(model_type)(DATA[0]).logits.detach()

    def error(*algorithms: AlgoConfig) -> float:
        with torch.no_grad():
            return float((quantized("int8", *algorithms, model=family(model_type))(DATA[0]).logits - reference).norm())

    ruined = SmoothQuantConfig(alpha=1)
    assert error(replace(ruined, keep_better=True)) <= error() < error(ruined)


def test_a_large_batch_is_judged_by_some_of_its_rows() -> None:
    model = tiny_llama()
    name = find_blocks(model)[0]
    calls = record_calls(model, [name], [token_batches(1)[0].repeat(32, 1)])[name]
    block = Block(name, model.get_submodule(name), calls, calls)
    assert [call.hidden.shape[0] for call in BlockErrorCheck(block, quantized_layers(block.module)).calls] == [SAMPLES]


class Watching(Algorithm):
    validated_apart: ClassVar[bool] = True
    seen: ClassVar[list[int]] = []

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        self.seen.extend(x.shape[1] for x in group.inputs)


@dataclass
class WatchingConfig(AlgoConfig):
    """Changes nothing."""

    name: str = "watching"


def test_some_batches_judge_and_no_algorithm_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert validation_batches(3) is None
    assert [validation_batches(count) for count in (4, 8, 32)] == [[2], [2, 6], [4, 12, 20, 28]]
    data = [batch[:, : 9 + index] for index, batch in enumerate(token_batches(8))]
    made = LLMTemplate.get("llama").get_config("int8")
    plain = ModelQuantizer(made).quantize_model(tiny_llama(), data).state_dict()
    monkeypatch.setitem(ALGORITHMS, WatchingConfig, Watching)
    monkeypatch.setattr(Watching, "seen", [])
    made = LLMTemplate.get("llama").get_config("int8", [WatchingConfig(keep_better=True)])
    state = ModelQuantizer(made).quantize_model(tiny_llama(), data).state_dict()
    assert set(Watching.seen) == {9, 10, 12, 13, 14, 16}
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())  # ranges are those of all batches


def test_what_static_ranges_cut_off_counts() -> None:
    model = tiny_llama()
    name = find_blocks(model)[0]
    calls = record_calls(model, [name], DATA)[name]
    nothing = [call.with_hidden(call.hidden * 0) for call in calls]
    seen: list[float] = []

    class Measuring(Watching):
        def enter(self, block: Block) -> None:
            for read in (block.calls, nothing):
                judge, of_read = replace(block, calls=calls), replace(block, calls=read)
                seen.append(BlockErrorCheck(judge, quantized_layers(block.module), of_read).error)

    made = LLMTemplate.get("llama").get_config("int8", [WatchingConfig()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, WatchingConfig, Measuring)
        ModelQuantizer(made).quantize_model(model, DATA)
    assert seen[1] > 2 * seen[0]


def test_names_keep_the_better_and_what_is_written_out_runs_as_written() -> None:
    made = LLMTemplate.get("llama").get_config("int4_wo_32", ["awq", GPTQConfig(), "smooth"]).algo_config
    assert [config.keep_better for config in made or []] == [True, False, True]
    assert torch_algorithms(["gptq:damp_percent=0.1"])[0].keep_better
    assert not torch_algorithms(["gptq:keep_better=false"])[0].keep_better
    written = GPTQConfig(keep_better=True).to_dict()
    assert "keep_better" not in written  # other programs read the record
    assert not algo_config_from_dict(written).keep_better
