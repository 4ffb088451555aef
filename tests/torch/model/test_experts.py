"""Mixture-of-experts models and GPT-2: taken apart, quantized, written and read back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from quark.base.libraries.transformers import rows_alternate
from quark.compat.llm_scripts.model_loading import preprocess_for_quantization
from quark.core.schemes import SCHEMES
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_inputs import input_groups, lockstep
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import find_blocks, record_calls
from quark.torch.model.passes import UnfusedExperts
from tests.models.families import family

IDS = torch.arange(48).reshape(3, 16)


def quantize(model: nn.Module, scheme: str, **options: Any) -> nn.Module:
    config = LLMTemplate.get("any").get_config(scheme, **options)
    return ModelQuantizer(config).quantize_as_planned(model, [IDS])


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [["*experts*"], []])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text"])
def test_experts_taken_apart_before_are_quantized_and_written_the_same(
    name: str, exclude: list[str], tmp_path: Path
) -> None:
    for folder, prepare in (("fused", False), ("apart", True)):
        model = family(name)
        fused = {key: value.clone() for key, value in model.state_dict().items()}
        if prepare:
            preprocess_for_quantization(model)
            assert not fused.keys() & {key for key in model.state_dict() if "experts" in key}
        quantized = quantize(model, "uint4_wo_32", exclude_layers=["@output_head", "@router", *exclude])
        left = {key: value for key, value in quantized.state_dict().items() if "experts" in key and key in fused}
        assert bool(left) == bool(exclude) and all(torch.equal(value, fused[key]) for key, value in left.items())
        export_safetensors(quantized, tmp_path / folder)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "apart" / file).read_bytes() == (tmp_path / "fused" / file).read_bytes()


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return set(handle.keys())


PUBLISHED = {
    "gpt2": "transformer.h.1.mlp.c_fc.weight_scale",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight_scale",
    "gpt_oss": "model.layers.1.mlp.experts.3.gate_up_proj.weight_scale",
    "llama4_text": "model.layers.1.feed_forward.experts.3.gate_proj.weight_scale",
}


def test_rows_that_alternate_are_one_layer_with_the_values_of_the_model(tmp_path: Path) -> None:
    """The form of vLLM 0.33.0 (gpt_oss.py, "For quark format"): (2I, H), and the bias, row by row as in the model."""
    model = family("gpt_oss")
    block = model.model.layers[1].mlp.experts
    weight, bias = block.gate_up_proj.detach()[3].t().clone(), block.gate_up_proj_bias.detach()[3].clone()
    export_safetensors(quantize(model, "mxfp4"), tmp_path / "out", weight_format="fake_quantized")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as handle:
        leaves = {name.split("experts.3.")[1] for name in handle.keys() if "1.mlp.experts.3." in name}  # noqa: SIM118
        stored = handle.get_tensor("model.layers.1.mlp.experts.3.gate_up_proj.weight")
        assert torch.equal(handle.get_tensor("model.layers.1.mlp.experts.3.gate_up_proj.bias"), bias)
    assert {leaf.partition(".")[0] for leaf in leaves} == {"gate_up_proj", "down_proj"}
    assert stored.shape == weight.shape and float((stored - weight).norm() / weight.norm()) < 0.15


@pytest.mark.parametrize(("name", "alternate"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_rows_that_alternate_are_known_from_the_gate_where_nothing_says_it(name: str, alternate: bool) -> None:
    experts = next(module for module in family(name).modules() if hasattr(module, "gate_up_proj"))
    assert rows_alternate(experts) is alternate
    vars(experts).pop("is_concatenated", None)  # which transformers before 5.7 does not set
    assert rows_alternate(experts) is alternate


EVERY = ["uint4_wo_32", "uint4_wo_per_channel", "fp8", "int8", "mxfp4", "nvfp4"]
PAIRS = [
    (name, scheme)
    for name in PUBLISHED
    for scheme in (EVERY if name == "mixtral" else ["uint4_wo_32", "int8", "mxfp4"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), PAIRS)
def test_a_checkpoint_loads_through_transformers_and_the_importer(name: str, scheme: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = quantize(family(name), scheme)
    expected = model(IDS).logits
    export_safetensors(model, tmp_path / "out")
    assert PUBLISHED[name] in names_in(tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded(IDS).logits, expected)
    assert torch.equal(import_model_from_safetensors(family(name, seed=1), tmp_path / "out")(IDS).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3_moe"])
def test_excluded_parts_stay_as_they_are_and_reload(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    patterns = ["*.mlp.*", "@output_head"] if name == "gpt2" else ["*experts*", "@output_head"]
    model = family(name)
    before = {n: type(m) for n, m in model.named_modules() if ".mlp" in n}
    model = quantize(model, "int8", exclude_layers=patterns)
    assert {n: type(m) for n, m in model.named_modules() if ".mlp" in n} == before
    assert quantized_layers(model)
    export_safetensors(model, tmp_path / "out")
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        import_model_from_safetensors(family(name, seed=1), tmp_path / "out"),
    ):
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.slow
def test_some_experts_in_float(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("qwen3_moe", "mixtral"):
        model = quantize(family(name), "mxfp4", exclude_layers=["*experts.0.*", "@output_head"])
        assert (
            type(model.get_submodule(f"model.layers.0.mlp.experts.0.{'w1' if name == 'mixtral' else 'up_proj'}"))
            is nn.Linear
        )
        export_safetensors(model, tmp_path / name)
        loaded = import_model_from_safetensors(family(name, seed=1), tmp_path / name)
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3_moe")
    assert torch.equal(
        loaded(IDS).logits,
        quantize(family("qwen3_moe"), "mxfp4", exclude_layers=["*experts.0.*", "@output_head"])(IDS).logits,
    )
    with pytest.raises(NotSupportedError, match="differ in shape or type.*import_model_from_safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")


def starve(model: Any, expert: int) -> Any:
    """The model with a router that never chooses an expert."""
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight[expert] = 0
            layer.mlp.gate.weight.abs_()
        layer.post_attention_layernorm.register_forward_hook(lambda m, a, y: y.abs() + 1)
    return model


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_an_expert_without_tokens_has_the_ranges_that_cover_those_of_the_others(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = quantize(starve(family("mixtral"), 2), scheme)
    for leaf in ("w1", "w2", "w3"):
        experts = [model.get_submodule(f"model.layers.0.mlp.experts.{i}.{leaf}.input_quantizer") for i in range(4)]
        scales = [float(quantizer.scale) for quantizer in experts]
        assert len(set(scales)) > 1 and scales[2] == max(scales)
    (line,) = [record.getMessage() for record in caplog.records if "Experts:" in record.getMessage()]
    assert "have the static ranges of the others" in line and "calibrate_all_experts" in line


def test_a_mixture_of_which_no_expert_has_tokens_is_an_error_that_names_it() -> None:
    model = family("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, a, out: (*out[:2], torch.full_like(out[2], 4)))  # none of 4
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.experts\.0.*calibrate_all_experts"):
        quantize(model, "int8")
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("scheme", ["int8", "nvfp4"])
def test_experts_share_the_largest_input(scheme: str) -> None:
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if args[0].numel():
                largest[name] = max(largest.get(name, 0.0), float(args[0].detach().abs().max()))

        return hook

    config = LLMTemplate.get("any").get_config(scheme)
    config = QConfig(**{**config.__dict__, "sync_moe_expert_input_amax": True})
    plain = starve(family("mixtral"), 2)
    prepared = ModelQuantizer(LLMTemplate.get("any").get_config("uint4_wo_32")).quantize_model(copy.deepcopy(plain))
    for name, layer in quantized_layers(prepared).items():
        layer.weight_quantizer = None
        layer.register_forward_pre_hook(watch(name))
    prepared(IDS)
    model: Any = ModelQuantizer(config).quantize_model(plain, [IDS])
    for block in range(2):
        for leaf in ("w1", "w2"):
            scales = []
            for index in range(4):
                quantizer = model.get_submodule(f"model.layers.{block}.mlp.experts.{index}.{leaf}.input_quantizer")
                scales.append(float(quantizer.scale if scheme == "int8" else quantizer.scale_2))
            top = max(v for k, v in largest.items() if f"layers.{block}.mlp.experts" in k and k.endswith(leaf))
            step = top / 127.5 if scheme == "int8" else top / (6 * 448)
            assert len(set(scales)) == 1 and scales[0] == pytest.approx(step, rel=1e-2)


def test_gate_and_up_of_an_expert_share_the_global_scale_of_nvfp4() -> None:
    model: Any = quantize(family("mixtral"), "nvfp4")
    experts = [e for m in model.modules() if isinstance(m, UnfusedExperts) for e in m.children()]
    assert len(experts) == 8
    assert all(float(e.w1.weight_quantizer.scale_2) == float(e.w3.weight_quantizer.scale_2) for e in experts)


def test_hooks_see_every_expert_in_a_fixed_order() -> None:
    model = quantize(starve(family("mixtral"), 2), "uint4_wo_32", exclude_layers=["*self_attn*", "@output_head"])
    seen: list[tuple[str, int]] = []
    for name, layer in quantized_layers(model).items():
        if name.startswith("model.layers.0."):
            layer.register_forward_pre_hook(lambda m, args, name=name: seen.append((name[-4:], len(args[0]))))
    model(IDS)
    up = [f"{index}.{leaf}" for index in range(4) for leaf in ("w1", "w3")]
    assert [name for name, _ in seen] == [*up, *(f"{index}.w2" for index in range(4))]
    assert dict(seen)["2.w1"] == 0 and sum(dict(seen)[f"{i}.w1"] for i in range(4)) == IDS.numel() * 2


class Doubling(nn.Module):
    """A block that looks like fused experts and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(2, 8, 8))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Stacked(nn.Module):
    """Experts in a form that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(2, 8, 8))


@pytest.mark.parametrize(("kind", "why"), [(Doubling, "separate experts differ"), (Stacked, r"\(2, 8, 8\)")])
def test_an_unknown_form_is_refused_unless_excluded(kind: type[nn.Module], why: str) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"up": nn.Linear(8, 8), "experts": kind()})

    config = QConfig(config_of_layer(SCHEMES["int4_wo_per_channel"]))
    with pytest.raises(NotSupportedError, match=rf"experts.*{kind.__name__}.*{why}.*exclude"):
        ModelQuantizer(config).quantize_model(make())
    model = ModelQuantizer(QConfig(config.global_quant_config, exclude=["*experts*"])).quantize_model(make())
    assert set(quantized_layers(model)) == {"up"}


def test_patterns_may_name_experts_that_stay_fused() -> None:
    model = quantize(family("mixtral"), "int8", exclude_layers=["*.experts.*", "@output_head"])
    assert not any(isinstance(module, UnfusedExperts) for module in model.modules())
    with pytest.raises(ConfigError, match="matches no layer"):
        quantize(family("mixtral"), "int8", exclude_layers=["*.experts.7.*"])


def test_an_error_later_puts_everything_back() -> None:
    model = family("mixtral")
    modules, expected = dict(model.named_modules()), model(IDS).logits
    with pytest.raises(CalibrationError):
        ModelQuantizer(LLMTemplate.get("any").get_config("int8")).quantize_model(model, [])
    assert dict(model.named_modules()) == modules and torch.equal(model(IDS).logits, expected)


def test_the_written_exclude_list_names_layers_in_both_forms(tmp_path: Path) -> None:
    model = quantize(family("mixtral"), "int8", exclude_layers=["*experts*", "@output_head"])
    export_safetensors(model, tmp_path / "out")
    excluded = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["exclude"]
    blocks = {f"model.layers.{index}.{block}" for index in (0, 1) for block in ("mlp", "block_sparse_moe")}
    parts = {f"{block}.{part}" for block in blocks for part in ("gate", "experts", "experts.*")}
    assert set(excluded) == parts | {"lm_head"}


@pytest.mark.parametrize("scheme", ["uint4_wo_32", "mxfp4", "fp8"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_frozen_views_compute_the_same(name: str, scheme: str) -> None:
    """Their weights are strided views: a transposed matrix, or every other row of one."""
    model = quantize(family(name), scheme)
    expected = model(IDS).logits
    frozen = ModelQuantizer.freeze(model)
    torch.testing.assert_close(frozen(IDS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3", "llama4_text"])
def test_weights_are_solved_in_what_was_taken_apart(name: str) -> None:
    """Experts, each with the tokens of its own; a layer that reads an input after others have run (DeepSeek)."""
    expected = family(name)(IDS).logits
    errors = []
    for algorithm in (None, "gptq"):
        model = quantize(family(name), "int4_wo_32", algorithm=algorithm)
        errors.append(float((model(IDS).logits - expected).norm().detach()))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.slow
def test_experts_share_the_range_that_a_sweep_observes() -> None:
    config = LLMTemplate.get("mixtral").get_config("int8", algorithm="gptq")
    config = QConfig(**{**config.__dict__, "sync_moe_expert_input_amax": True})
    model: Any = ModelQuantizer(config).quantize_model(family("mixtral"), [IDS])
    for layer in model.model.layers:
        for leaf in ("w1", "w2"):
            quantizers = [layer.mlp.experts.get_submodule(f"{i}.{leaf}.input_quantizer") for i in range(4)]
            assert len({float(quantizer.scale) for quantizer in quantizers}) == 1


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_float_experts_read_the_tokens_of_the_quantized_router_and_return_their_own(name: str) -> None:
    model = quantize(family(name), "uint4_wo_32")
    data = [torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    blocks = find_blocks(model)
    calls = record_calls(model, blocks, data)[blocks[-1]]
    block = model.get_submodule(blocks[-1])
    layers = [leaf for leaf, module in block.named_modules() if isinstance(module, QuantLayer)]
    groups, original = input_groups(block, layers, calls[0]), copy.deepcopy(block)
    with torch.no_grad(), quantizers_off([block.get_submodule(leaf) for leaf in layers]):  # type: ignore[misc]
        for router in (m for m in block.modules() if type(m).__name__.endswith("Router")):
            router.weight.copy_(-router.weight)  # type: ignore[operator, union-attr]
        with quantizers_off([original.get_submodule(leaf) for leaf in layers]):  # type: ignore[misc]
            seen: list[InputGroup] = []
            real, beside = lockstep("", block, calls, groups, seen.append, original, calls)
            expected = [call.run(original) for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(beside, expected, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(real, beside, strict=True))
    experts = [group for group in seen if ".experts." in str(group)]
    assert len(experts) == 8
    for group in experts:
        assert all(torch.equal(a, b) for a, b in zip(group.inputs, group.float_inputs, strict=True)), str(group)
    assert not any(m._forward_hooks or m._forward_pre_hooks for b in (block, original) for m in b.modules())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gptaq", "qronos"])
def test_solvers_that_compare_with_the_float_model_take_mixtures(algorithm: str) -> None:
    data = [torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    reference = family("qwen3_moe")
    errors = []
    for names in (None, algorithm):
        config = LLMTemplate.get("qwen3_moe").get_config("int2_wo_64", algorithm=names)
        model = ModelQuantizer(config).quantize_model(family("qwen3_moe"), data)
        with torch.no_grad():
            errors.append(float(sum((model(x).logits - reference(x).logits).square().mean() for x in data)))
    assert errors[1] < 0.9 * errors[0]
