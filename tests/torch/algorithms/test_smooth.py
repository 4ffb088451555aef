"""SmoothQuant, AutoSmoothQuant and AWQ on whole models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    EqualizeConfig,
    GPTQConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import find_blocks, record_calls, short_call
from quark.torch.quantizer import ModelQuantizer
from tests.models.architectures import build, token_ids
from tests.models.families import family

FOLDING = [SmoothQuantConfig(alpha=0.5), AutoSmoothQuantConfig(), EqualizeConfig(), AWQConfig()]
DATA = [token_ids(24, seed) for seed in range(4)]


def config(scheme: str, *algorithms: AlgoConfig, exclude: tuple[str, ...] = ()) -> QConfig:
    made = LLMTemplate.get("llama").get_config(scheme, exclude_layers=["@output_head", *exclude])
    return dataclasses.replace(made, algo_config=list(algorithms) or None)


def with_outliers(model: Any) -> Any:
    """Gains of some channels of the norms times 40, the columns behind divided: the same function."""
    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[[3, 17]] *= 40
                for reader in readers:
                    reader.weight[:, [3, 17]] /= 40
    return model


def error(model: Any, reference: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(DATA[0]).logits - reference).norm() / reference.norm())


FAMILIES = ["llama", "gemma", "phi", "gpt_neox", "opt", "bert", "gpt2", "qwen3_moe", "falcon", "falcon_new"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", FOLDING, ids=lambda c: c.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_float_model_computes_what_it_did(name: str, algorithm: AlgoConfig) -> None:
    model = build(name)
    with torch.no_grad():
        before = model(DATA[0]).logits
    exclude = ("cls.*",) if name == "bert" else ()
    ModelQuantizer(config("int8", algorithm, exclude=exclude)).quantize_model(model, DATA)
    with quantizers_off(quantized_layers(model).values()):
        assert error(model, before) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", FOLDING, ids=lambda c: c.name)
def test_outliers_of_activations_no_longer_hurt(algorithm: AlgoConfig) -> None:
    scheme = "int8" if not isinstance(algorithm, AWQConfig) else "int4_wo_32"
    with torch.no_grad():
        reference = build("llama")(DATA[0]).logits
    errors = {}
    for label, chosen in {"plain": (), "folded": (algorithm,)}.items():
        model = with_outliers(build("llama"))
        ModelQuantizer(config(scheme, *chosen)).quantize_model(model, DATA)
        errors[label] = error(model, reference)
    assert errors["folded"] < 0.6 * errors["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4", "qwen3"])
def test_smoothing_by_name_does_not_hurt_a_model_that_one_alpha_ruins(model_type: str) -> None:
    errors = {}
    for label, chosen in {"plain": None, "alpha 1": SmoothQuantConfig(alpha=1), "by name": "smooth"}.items():
        model = family(model_type)
        reference = model(DATA[0]).logits.detach()
        made = LLMTemplate.get(model_type).get_config("int8", chosen)
        errors[label] = error(ModelQuantizer(made).quantize_model(model, DATA), reference)
    assert errors["by name"] < 1.05 * errors["plain"]
    assert errors["by name"] <= errors["alpha 1"]


@pytest.mark.slow
def test_static_ranges_are_those_of_the_scaled_inputs() -> None:
    model = with_outliers(build("llama"))
    ModelQuantizer(config("int8", SmoothQuantConfig())).quantize_model(model, DATA)
    layers, largest = quantized_layers(model), {}

    def watch(name: str) -> Any:
        return lambda module, args: largest.update({name: max(largest.get(name, 0.0), float(args[0].abs().max()))})

    for name, layer in layers.items():
        layer.register_forward_pre_hook(watch(name))
    with torch.no_grad(), quantizers_off(layers.values()):
        for batch in DATA:
            model(batch)
    for name, layer in layers.items():
        assert float(layer.input_quantizer.scale) == pytest.approx(largest[name] / 127.5, rel=1e-3), name


def test_layers_that_stay_float_behind_the_same_norm_are_scaled_along() -> None:
    model = with_outliers(build("llama"))
    with torch.no_grad():
        before = model(DATA[0]).logits
    gain = model.model.layers[0].input_layernorm.weight.detach().clone()
    ModelQuantizer(config("int8", SmoothQuantConfig(), exclude=("*k_proj",))).quantize_model(model, DATA)
    assert isinstance(model.model.layers[0].self_attn.k_proj, nn.Linear)
    assert not torch.equal(gain, model.model.layers[0].input_layernorm.weight)
    with quantizers_off(quantized_layers(model).values()):
        assert error(model, before) < 1e-4


@pytest.mark.slow
def test_awq_chooses_steps_that_lower_the_error_and_gptq_takes_them() -> None:
    with torch.no_grad():
        reference = build("llama")(DATA[0]).logits
    errors, steps = {}, {}
    for label, chosen in {
        "plain": (),
        "awq": (AWQConfig(),),
        "both": (AWQConfig(), GPTQConfig(refine_passes=0)),
    }.items():
        model = build("llama")
        ModelQuantizer(config("int4_wo_32", *chosen)).quantize_model(model, DATA)
        errors[label] = error(model, reference)
        quantizer = model.model.layers[0].mlp.down_proj.weight_quantizer
        assert isinstance(quantizer, FakeQuantize)
        assert quantizer.mode is (Mode.frozen if label == "both" else Mode.quantize)
        steps[label] = quantizer.scale
    assert errors["both"] < errors["awq"] < 0.9 * errors["plain"]
    assert torch.equal(steps["both"], steps["awq"]) and not torch.equal(steps["awq"], steps["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8", "int4_wo_per_channel", "int4_fp8", "uint4_wo_32", "bfp16"])
def test_awq_takes_every_kind_of_weight(scheme: str) -> None:
    model = with_outliers(build("llama"))
    with torch.no_grad():
        reference = model(DATA[0]).logits
    ModelQuantizer(config(scheme, AWQConfig())).quantize_model(model, DATA)
    assert error(model, reference) < 1


@pytest.mark.slow
def test_scaling_layers_of_a_config_decide() -> None:
    item = {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"}
    model = build("llama")
    norm, up = (model.model.layers[0].get_parameter(f"{n}.weight").clone() for n in ("input_layernorm", "mlp.up_proj"))
    ModelQuantizer(config("int8", SmoothQuantConfig(scaling_layers=[item]))).quantize_model(model, DATA)
    assert torch.equal(model.model.layers[0].input_layernorm.weight, norm)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, up)
    wrong = SmoothQuantConfig(scaling_layers=[item | {"prev_op": "mlp.gate_proj"}])
    with pytest.raises(ConfigError, match=r"gate_proj.*does not scale"):
        ModelQuantizer(config("int8", wrong)).quantize_model(build("llama"), DATA)


def test_a_weight_that_is_shared_is_left_alone() -> None:
    model = build("llama")
    first, second = model.model.layers
    second.post_attention_layernorm.weight = first.post_attention_layernorm.weight
    with torch.no_grad():
        before = model(DATA[0]).logits
    ModelQuantizer(config("int8", SmoothQuantConfig(alpha=0.5))).quantize_model(model, DATA)
    with quantizers_off(quantized_layers(model).values()):
        assert error(model, before) < 1e-4


def test_unknown_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="compute_scale_loss: 'L7' is unknown. Possible: MSE, RMSE, MAE"):
        ModelQuantizer(config("int8", AutoSmoothQuantConfig(compute_scale_loss="L7"))).quantize_model(
            build("llama"), DATA
        )


@pytest.mark.parametrize("name", ["llama", "falcon", "gpt_neox", "opt", "bert"])
def test_a_proof_needs_few_tokens(name: str) -> None:
    model = build(name)
    (block, *_) = find_blocks(model)
    ids = torch.cat([token_ids(40), token_ids(40, 1)])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (call,) = record_calls(model, [block], [batch])[block]
    small = short_call(model.get_submodule(block), call)
    assert small.hidden.shape[:2] == (1, 16)
    with torch.no_grad():
        output = small.run(model.get_submodule(block))
    assert output.shape == (1, 16, 32)


@pytest.mark.slow
def test_awq_leaves_producers_alone_whose_rows_share_one_scale() -> None:
    with torch.no_grad():
        reference = build("opt")(DATA[0]).logits
    errors = []
    for algorithms in ((), (AWQConfig(),)):
        model = build("opt")
        ModelQuantizer(config("int8", *algorithms)).quantize_model(model, DATA)
        errors.append(error(model, reference))
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("algorithm", FOLDING, ids=lambda c: c.name)
@pytest.mark.parametrize("affine", [True, False])
def test_what_folds_nothing_says_so(affine: bool, algorithm: AlgoConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """A norm without weights has nothing that a scale could be folded into, as in diffusion transformers."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(32, elementwise_affine=affine), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        for _ in range(2)
    ]
    made = QConfig(global_quant_config=LLMTemplate.scheme("int4_wo_32"), algo_config=[algorithm])
    data = [torch.randn(1, 8, 32) * torch.logspace(-1, 1, 32) for _ in range(2)]
    ModelQuantizer(made).quantize_model(nn.Sequential(*blocks), data)
    said = f"{algorithm.name} folded nothing: no input of a quantized layer comes from a norm with weights"
    assert (said in capsys.readouterr().err) != affine


def test_scales_are_folded_before_a_rotation_that_follows() -> None:
    """After it, the channels of a norm are no longer those that the layers read, and nothing could be folded."""
    rotation = RotationConfig(r1=True, online_r1_rotation=True, rotation_size=32)
    model = with_outliers(build("llama"))
    with torch.no_grad():
        before = model(DATA[0]).logits
    ModelQuantizer(config("mxfp4", EqualizeConfig(), rotation)).quantize_model(model, DATA)
    gains = model.model.layers[0].input_layernorm.weight.detach()
    assert float(gains[[3, 17]].mean() / gains.median()) < 10  # they were 40
    with quantizers_off(quantized_layers(model).values()):
        assert error(model, before) < 1e-4
