"""Accuracy algorithms on whole models: the sweep, inputs of layers, every solver under every kind of weight."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.solvers import gptq
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError, QuarkError, StructureError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import Algorithm, Block
from quark.torch.algorithms.block_sweep import sweep
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_inputs import input_groups, lockstep
from quark.torch.algorithms.rounding import fix_scales
from quark.torch.algorithms.rounding.imatrix import ImportanceScale
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoRoundConfig,
    GPTAQConfig,
    GPTQConfig,
    ImportanceScaleConfig,
    QronosConfig,
)
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.flows.replaced import replaced
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import evaluating
from quark.torch.model.blocks import find_blocks, record_calls
from quark.torch.plan import make_plan
from tests.models.families import family
from tests.models.torch_zoo import mlp, tiny_llama, token_batches

INT3 = spec("int3", PerGroup(-1, 32), symmetric=False)
QRONOS = QronosConfig(inside_layer_modules=[], model_decoder_layers="")
WEIGHT_SOLVERS: dict[str, AlgoConfig] = {
    "gptq": GPTQConfig(),
    "gptq in order": GPTQConfig(desc_act=False, refine_passes=0),
    "gptq groups on the way": GPTQConfig(desc_act=False, static_groups=False, group_aware_order=True),
    "gptaq": GPTAQConfig(),
    "qronos": QRONOS,
    "importance": ImportanceScaleConfig(),
    "autoround": AutoRoundConfig(iters=12, lr=0.04, minmax_lr=0.02, batch_size=2),
}
WEIGHTS: dict[str, TensorSpec] = {
    "int2": spec("int2", PerGroup(-1, 32), symmetric=False),
    "uint4": spec("uint4", PerGroup(-1, 32), symmetric=False),
    "int8": spec("int8", PerChannel(0)),
    "fp8": spec("fp8_e4m3"),
}


def config(weight: TensorSpec, *algorithms: AlgoConfig, **options: Any) -> QConfig:
    layer = config_of_layer(LayerSpec(weight=weight, **options))
    return QConfig(global_quant_config=layer, exclude=["@output_head"], algo_config=list(algorithms) or None)


def correlated_llama() -> Any:
    """A model whose activations have channels of very different sizes."""
    model = tiny_llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.2 + 3 * torch.rand(len(parameter), generator=torch.Generator().manual_seed(5)) ** 3)
    return model


def damage(model: nn.Module, quantized: nn.Module, data: list[torch.Tensor]) -> float:
    """Mean square error of the logits."""
    with torch.no_grad():
        return float(sum((model(x).logits - quantized(x).logits).square().mean() for x in data))


@pytest.mark.slow
def test_blocks_are_the_largest_list_of_modules() -> None:
    assert find_blocks(tiny_llama()) == ["model.layers.0", "model.layers.1"]
    assert find_blocks(family("gpt2"))[0] == "transformer.h.0" or find_blocks(family("gpt2")) == [""]
    assert find_blocks(mlp()) == [""]
    assert find_blocks(tiny_llama(), "model.layers") == ["model.layers.0", "model.layers.1"]
    with pytest.raises(StructureError, match=r"model_decoder_layers='model\.layer' is no list.*model\.layers"):
        find_blocks(tiny_llama(), "model.layer")


def test_blocks_run_alone_compute_what_the_model_does() -> None:
    model, data = tiny_llama(), token_batches(2)
    with torch.no_grad(), evaluating(model):
        names = find_blocks(model)
        calls = record_calls(model, names, data)
        hidden = [call.hidden for call in calls[names[0]]]
        for name in names:
            block = model.get_submodule(name)
            hidden = [call.with_hidden(h).run(block) for call, h in zip(calls[name], hidden, strict=True)]
        expected = [model(x).logits for x in data]
        found = [model.lm_head(model.model.norm(h)) for h in hidden]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert model.config.use_cache is True
    assert "forward" not in model.model.layers[0].__dict__


def test_a_stop_has_the_inputs_of_all_batches_and_later_stops_see_the_changes() -> None:
    model, data = tiny_llama(), token_batches(3)
    names = find_blocks(model)
    with torch.no_grad():
        calls = record_calls(model, names[:1] + names[1:], data)[names[0]]
        block = model.get_submodule(names[0])
        linear = [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]
        groups = input_groups(block, linear, calls[0])
        leaves = [[n.rpartition(".")[2] for n in group] for group in groups]
        assert leaves == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
        seen: list[torch.Tensor] = []

        def visit(group: InputGroup) -> None:
            assert len(group.inputs) == 3
            x = torch.cat([i.reshape(-1, i.shape[-1]) for i in group.inputs])
            assert torch.allclose(group.gram, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
            assert torch.equal(group.max_abs, x.abs().amax(0))
            assert torch.allclose(group.mean_abs, x.abs().mean(0))
            seen.append(x)
            for layer in group.layers.values():
                layer.weight.mul_(1.5)

        changed, _ = lockstep(names[0], block, calls, groups, visit)
        reference = [call.run(block) for call in calls]
    assert len(seen) == 4
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(changed, reference, strict=True))


def test_a_rescaled_input_reaches_the_layers() -> None:
    model, data = tiny_llama(), token_batches(2)
    names = find_blocks(model)
    with torch.no_grad():
        calls = record_calls(model, names, data)[names[0]]
        block = model.get_submodule(names[0])
        before = [call.run(block) for call in calls]
        groups = input_groups(block, ["mlp.gate_proj", "mlp.up_proj"], calls[0])
        scale = torch.linspace(0.5, 2, 128)

        def visit(group: InputGroup) -> None:
            moments = group.gram
            group.rescale(scale)
            assert torch.allclose(group.gram, moments / scale / scale[:, None], rtol=1e-4, atol=1e-6)
            for layer in group.layers.values():
                layer.weight.mul_(scale)

        after, _ = lockstep(names[0], block, calls, groups, visit)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, before, strict=True))


def test_float_batches_run_on_and_their_layers_are_freed_behind_them() -> None:
    model, data = tiny_llama(), token_batches(2)
    names = find_blocks(model)
    with torch.no_grad():
        calls = record_calls(model, names, data)[names[0]]
        block = model.get_submodule(names[0])
        expected = [call.run(block) for call in calls]
        leaves = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        groups = input_groups(block, leaves, calls[0])
        beside, left = copy.deepcopy(block), []

        def visit(group: InputGroup) -> None:
            assert [x.shape for x in group.float_inputs] == [x.shape for x in group.inputs]
            assert all(torch.equal(x, y) for x, y in zip(group.inputs, group.float_inputs, strict=True))
            group.forget_float()
            assert not group.float_inputs
            left.append([name for name in leaves if beside.get_submodule(name).weight is not None])

        outputs = lockstep(names[0], block, calls, groups, visit, beside, calls, float_once=True)
    for found in outputs:
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    # When a group is solved, the float block holds what runs behind it.
    assert left == [[name for group in groups[index + 1 :] for name in group] for index in range(len(groups))]


def test_layers_that_run_twice_are_refused_and_an_error_ends_all_walks() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(self.two(self.one(x)))

    data = [torch.randn(2, 128) for _ in range(2)]
    with pytest.raises(StructureError, match="more than once"):
        ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(Twice().eval(), data)
    with pytest.raises(CalibrationError, match="empty"):
        ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(tiny_llama(), [])
    with pytest.raises(ConfigError, match="GPTQ needs calibration data"):
        ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(tiny_llama())


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHT_SOLVERS)
def test_each_solver_loses_less_than_rounding(name: str) -> None:
    data = token_batches(6)
    reference = correlated_llama()
    plain = ModelQuantizer(config(INT3)).quantize_model(correlated_llama())
    quantizer = ModelQuantizer(config(INT3, WEIGHT_SOLVERS[name]))
    solved = quantizer.freeze(quantizer.quantize_model(correlated_llama(), data))
    assert damage(reference, solved, data) < 0.85 * damage(reference, plain, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", WEIGHT_SOLVERS)
def test_solved_weights_lie_on_the_grid(name: str, kind: str) -> None:
    quantizer = ModelQuantizer(config(WEIGHTS[kind], WEIGHT_SOLVERS[name]))
    model = quantizer.freeze(quantizer.quantize_model(tiny_llama(dtype=torch.bfloat16), token_batches(2)))
    layers = quantized_layers(model)
    assert len(layers) == 14
    for layer in layers.values():
        weight_quantizer = layer.quantizer("weight")
        assert isinstance(weight_quantizer, FakeQuantize)
        assert weight_quantizer.mode is Mode.frozen
        weight: torch.Tensor = layer.weight.detach()  # type: ignore[operator]
        again = fake_quantize(weight, weight_quantizer.params, weight_quantizer.spec)
        assert torch.equal(weight, again)


def test_gptq_on_one_linear_layer_is_the_solver_on_its_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8, bias=False))
    # So many tokens for a channel that nothing is added to the damping.
    data = [torch.randn(600, 32) * torch.linspace(0.1, 3, 32) for _ in range(3)]
    rule = spec("int4", PerChannel(0))
    weight = model[0].weight.detach().clone()
    quantized = ModelQuantizer(config(rule, GPTQConfig(desc_act=False, refine_passes=0))).quantize_model(model, data)
    x = torch.cat(data)
    params = quantized[0].weight_quantizer.params  # type: ignore[index]
    feedback = gptq.factor(x.T @ x / len(x), 0.01)[0].float()

    def rounder(i: int, work: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(work[i] / params.scale), -8, 7) * params.scale

    expected = gptq.solve(weight.T.contiguous(), feedback, rounder).T
    assert torch.allclose(quantized[0].weight, expected, atol=1e-6)  # type: ignore[index]


@pytest.mark.slow
def test_static_inputs_are_calibrated_in_the_same_sweep() -> None:
    static = spec("int8")
    both = ModelQuantizer(config(INT3, GPTQConfig(), input=static)).quantize_model(tiny_llama(), token_batches(3))
    own = copy.deepcopy(both)
    layers = quantized_layers(own)
    assert all(layer.quantizer("input").scale is not None for layer in layers.values())  # type: ignore[union-attr]
    # What the layers really get when the weights before them are quantized: measured again.
    seen: dict[str, float] = {}
    for name, layer in layers.items():
        layer.input_quantizer.mode = Mode.off
        layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: max(seen.get(name, 0.0), float(args[0].abs().max()))})
        )
    with torch.no_grad():
        for x in token_batches(3):
            own(x)
    for name, layer in layers.items():
        assert float(layer.input_quantizer.scale) == pytest.approx(seen[name] / 127.5, rel=1e-4)


@pytest.mark.slow
def test_two_solvers_for_one_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_proj.*solved by an algorithm before"):
        ModelQuantizer(config(INT3, GPTQConfig(), GPTAQConfig())).quantize_model(tiny_llama(), token_batches(2))
    with pytest.raises(ConfigError, match="desc_act"):
        GPTQConfig(desc_act=True, static_groups=False)
    with pytest.raises(ConfigError, match="group_aware_order"):
        GPTQConfig(group_aware_order=True)


def test_autoround_leaves_no_gradient_and_takes_batches_that_miss_an_expert() -> None:
    class Mixture(nn.Module):
        """Experts that are called only with tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.experts = nn.LayerNorm(32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, expert in enumerate(self.experts):
                if len(rows := torch.where((x[:, 0] > 0) == bool(index))[0]):
                    x = x.index_add(0, rows, expert(self.norm(x[rows])))
            return x

    torch.manual_seed(0)
    model = Mixture().eval()
    data = [torch.randn(8, 32), torch.rand(3, 32), torch.rand(3, 32)]
    before = [expert.weight.detach().clone() for expert in model.experts]  # type: ignore[union-attr, operator]
    ModelQuantizer(config(INT3, AutoRoundConfig(iters=6, batch_size=1))).quantize_model(model, data)
    assert not any(torch.equal(b, e.weight) for b, e in zip(before, model.experts, strict=True))  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())


class Routed(nn.Module):
    """Experts that are called only with tokens; those whose first value is positive go to the second one."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        for index, expert in enumerate(self.experts):
            if len(rows := torch.where((y[:, 0] > 0) == bool(index))[0]):
                y = y.index_add(0, rows, expert(self.factor * x[rows]))
        return y


def frozen(model: nn.Module) -> dict[str, bool]:
    return {name: layer.weight_quantizer.mode is Mode.frozen for name, layer in quantized_layers(model).items()}


def test_experts_that_the_first_batches_miss_are_solved_and_those_that_all_miss_read_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Routed().eval()
    both = torch.randn(40, 32)
    first, second = (both[(model.inner(both)[:, 0] > 0) == positive] for positive in (True, False))
    missed = ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(copy.deepcopy(model), [first])
    assert all(frozen(missed).values())
    assert re.search(r"Experts: of 2, .* 1 with none, which also read tokens of others", caplog.text)
    for data in ([first, both], [first, second]):
        solved = ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(copy.deepcopy(model), data)
        assert all(frozen(solved).values())
    model.register_module("other", nn.Linear(32, 32))
    with pytest.raises(CalibrationError, match=r"^other: no calibration token"):
        ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(model, [first])


def test_float_experts_follow_the_tokens_of_the_others_and_a_mixture_that_changes_them_is_named() -> None:
    class Scaled(Routed):
        factor = 2.0

    torch.manual_seed(0)
    coarse, data = config(spec("int2", PerGroup(-1, 32)), QRONOS), [torch.randn(64, 32)]
    # The coarse layer before the router changes its choice.
    behind = [nn.Sequential(nn.Linear(32, 32), mixture).eval() for mixture in (Routed(), Scaled())]
    assert all(frozen(ModelQuantizer(coarse).quantize_model(behind[0], data)).values())
    with pytest.raises(StructureError, match=r"experts\.\d.*another choice of experts.*GPTQ"):
        ModelQuantizer(coarse).quantize_model(behind[1], data)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_iterator_serves_all_that_reads_the_data_in_any_mode_of_gradients(mode: Any) -> None:
    # GPTQ, the head's range, and the cache's each read the data.
    made = LLMTemplate.get("llama").get_config("int8", algorithm="gptq", kv_cache_scheme="fp8", exclude_layers=[])
    expected = ModelQuantizer(made).quantize_model(tiny_llama(), token_batches(2))
    with mode():
        model = ModelQuantizer(made).quantize_model(tiny_llama(), iter(token_batches(2)))
        assert torch.equal(model(token_batches(1)[0]).logits, expected(token_batches(1)[0]).logits)


def test_autoround_needs_one_tensor() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.inner(x)}

    with pytest.raises(StructureError, match="returns a dict; AutoRound"):
        ModelQuantizer(config(INT3, AutoRoundConfig(iters=2))).quantize_model(Named(), [torch.randn(4, 32)])


@pytest.mark.parametrize("algorithm", [GPTQConfig(), QRONOS])
@pytest.mark.parametrize("tokens", [4, 16, 64, 256])
def test_what_is_solved_on_few_tokens_holds_on_others(algorithm: Any, tokens: int) -> None:
    torch.manual_seed(0)
    mix = torch.randn(64, 64) * torch.logspace(0, -1, 64)[:, None]
    layer, others = nn.Linear(64, 64, bias=False), torch.randn(4096, 64) @ mix
    expected = others @ layer.weight.detach().T

    def error(solver: Any, count: int) -> float:
        data = [torch.randn(count, 64, generator=torch.Generator().manual_seed(1)) @ mix]
        made = config(spec("int4", PerChannel(0)), *solver)
        rounded = ModelQuantizer.freeze(ModelQuantizer(made).quantize_model(nn.Sequential(copy.deepcopy(layer)), data))
        with torch.no_grad():
            return float((rounded(others) - expected).norm() / expected.norm())

    assert error([algorithm], tokens) < error([], tokens)


@pytest.mark.slow
def test_non_finite_inputs_are_named() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("inf")
    with pytest.raises(QuarkError, match=r"layers\.1\.self_attn\.q_proj"):
        ModelQuantizer(config(INT3, GPTQConfig())).quantize_model(model, token_batches(2))


@pytest.mark.slow
def test_algorithms_run_in_the_order_given() -> None:
    events: list[str] = []

    class Noted(Algorithm):
        def enter(self, block: Block) -> None:
            events.append(f"{self.config}:{block.name}")

    model = tiny_llama()
    with pytest.raises(ConfigError, match="Noted needs calibration data"):
        sweep(model, {}, [Noted("a")], None)
    quantizer = ModelQuantizer(config(INT3, GPTQConfig(inside_layer_modules=["mlp.down_proj"])))
    quantized = quantizer.quantize_model(model, token_batches(2))
    modes = {name: layer.weight_quantizer.mode for name, layer in quantized_layers(quantized).items()}
    assert {name for name, mode in modes.items() if mode is Mode.frozen} == {
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }
    sweep(tiny_llama(), {}, [Noted("a"), Noted("b")], token_batches(1))
    assert events == ["a:model.layers.0", "b:model.layers.0", "a:model.layers.1", "b:model.layers.1"]


def test_importance_scales_are_those_of_the_second_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    # The squares of channels are enough: the products of all pairs take longer than the model.
    monkeypatch.setattr(InputGroup, "_moments", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8, bias=False))
    data = [torch.randn(64, 32) * torch.linspace(0.01, 3, 32)]
    weight = model[0].weight.detach().clone()
    quantized = ModelQuantizer(config(INT3, ImportanceScaleConfig())).quantize_model(model, data)
    moments = data[0].square().mean(0)
    params = quantized[0].weight_quantizer.params  # type: ignore[index]

    def loss(found: Any) -> float:
        return float(((fake_quantize(weight, found, INT3) - weight) ** 2 * moments).sum())

    assert loss(params) < 0.9 * loss(compute_qparams(weight, INT3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mean_squares_are_the_diagonal_of_second_moments(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batches = [(200 * torch.randn(2, 700, 24)).to(dtype), torch.randn(1, 3, 24).to(dtype)]
    group = InputGroup({"layer": nn.Linear(24, 8)}, batches, [])
    tokens = torch.cat([x.reshape(-1, 24) for x in batches]).double()
    rounding = len(tokens) * 2.0**-24  # at most, of a float32 sum of that many positive numbers
    assert torch.allclose(group.mean_square.double(), tokens.square().mean(0), rtol=rounding, atol=0)
    assert torch.allclose(group.mean_square, group.gram.diagonal(), rtol=2 * rounding, atol=0)
    batches[1][0, 1, 5] = torch.inf
    with pytest.raises(NonFiniteError, match="layer: an input holds NaN or Inf"):
        _ = InputGroup({"layer": nn.Linear(24, 8)}, batches, []).mean_square


def test_scales_that_are_found_before_leave_the_float_model_to_what_follows() -> None:
    class Reading(Algorithm):
        needs_float = True

        def on_inputs(self, group: InputGroup, block: Block) -> None:
            self.config += [*group.inputs, *group.float_inputs]

    def inputs(*before: Algorithm) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        model = tiny_llama()
        with replaced(model, make_plan(config(INT3), model)) as layers:
            sweep(model, layers, [*before, Reading(seen)], token_batches(2))
        return seen

    alone, behind = inputs(), inputs(ImportanceScale(ImportanceScaleConfig()))
    assert len(alone) == len(behind) == 2 * 2 * 8
    assert all(torch.equal(a, b) for a, b in zip(alone, behind, strict=True))


@pytest.mark.parametrize("name", ["uint4_wo_128", "int4_wo_per_channel", "mxfp4", "nvfp4"])
def test_scales_searched_by_rows_are_those_of_the_whole_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fix_scales, "PIECE", 3 * 256 + 5)
    monkeypatch.setattr(fix_scales, "_SIDE_BY_SIDE", 1)  # a weight of this size would be searched beside others
    generator, of = torch.Generator().manual_seed(0), SCHEMES[name].weight
    assert of is not None
    weight, importance = torch.randn(10, 256, generator=generator), torch.rand(256, generator=generator)
    rows = []
    search = fix_scales.weighted_qparams
    monkeypatch.setattr(fix_scales, "weighted_qparams", lambda x, *rest: (rows.append(len(x)), search(x, *rest))[1])
    (found,) = fix_scales._least_loss([weight], [importance], of)
    whole = weighted_qparams(weight, importance, of)
    assert rows == ([10] if of.scale_spec else [3, 3, 3, 1])
    assert torch.equal(found.scale, whole.scale)
    assert (found.zero_point is None) == (whole.zero_point is None)
    assert whole.zero_point is None or torch.equal(found.zero_point, whole.zero_point)
