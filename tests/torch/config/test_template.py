"""LLMTemplate: schemes by name, roles instead of model types, and what goes into the config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from quark.compat.torch_names.shorthand_specs import FP8E4M3PerTensorSpec, Int8PerTensorSpec
from quark.core.schemes import SCHEMES
from quark.errors import ConfigError
from quark.torch.config.algo_configs import (
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTQConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.config.config import SELECTORS, QConfig, QLayerConfig
from quark.torch.config.llm_template import OLD_SCHEMES, LLMTemplate
from quark.torch.config.lowering import config_of_layer, lower_layer
from quark.torch.config.named_algorithms import ALGO_CONFIGS
from quark.torch.config.tensor.enums import Dtype
from quark.torch.plan import make_plan
from quark.torch.quantizer import ModelQuantizer
from tests.models.torch_zoo import tiny_llama

DOCUMENTED = [
    "int4_wo_32",
    "int4_wo_64",
    "int4_wo_128",
    "int4_wo_per_channel",
    "int4_wa_64",
    "uint4_wo_32",
    "uint4_wo_64",
    "uint4_wo_128",
    "uint4_wo_per_channel",
    "int8",
    "fp8",
    "ptpc_fp8",
    "mxfp4",
    "mxfp4_weight_only",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4_mxfp6_e2m3",
    "mxfp4_fp8",
    "amdfp4",
    "amdfp4_g32",
    "int4_fp8",
    "mx6",
    "mx9",
    "bfp16",
    "nvfp4",
    "fp4_block16_scale_e4m3",
    "amdfp4_global16",
    "amdfp4_global32",
]
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()


@pytest.fixture
def clean() -> Iterator[None]:
    """Registrations of a test end with it."""
    templates = dict(LLMTemplate._registered)
    yield
    LLMTemplate._registered.clear()
    LLMTemplate._registered.update(templates)
    for name in list(LLMTemplate._schemes):
        LLMTemplate.unregister_scheme(name)


def config(scheme: str = "fp8", **options: Any) -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str) -> None:
    made = config(scheme)
    assert lower_layer(made.global_quant_config, per_token=True) == SCHEMES[scheme]
    assert made.exclude == ["lm_head"]
    assert scheme in LLMTemplate.get_supported_schemes()


def test_the_documented_schemes_are_there() -> None:
    assert len(DOCUMENTED) == 28 and set(DOCUMENTED) <= set(LLMTemplate.get_supported_schemes())
    for old, new in OLD_SCHEMES.items():
        assert config(old) == config(new)


def test_any_model_type() -> None:
    assert {"llama", "qwen3_moe", "grok-1", "phi3"} <= set(LLMTemplate.list_available())
    assert len(LLMTemplate.list_available()) == len(set(LLMTemplate.list_available())) >= 51
    made = LLMTemplate.get("a_model_of_next_year").get_config("fp8", ["awq", "gptq"])
    assert made == config("fp8", exclude_layers=list(SELECTORS), algorithm=[AWQConfig(), GPTQConfig()])
    assert made.exclude == ["@output_head", "@router", "@non_text", "@outside_blocks"]


def test_a_tower_is_a_part_and_not_what_the_whole_model_is_called() -> None:
    class Speech(nn.Module):
        base_model_prefix = "speech"

        def __init__(self) -> None:
            super().__init__()
            self.speech = nn.ModuleDict(
                {n: nn.Linear(2, 2) for n in ("decoder", "audio_tower", "video_tower", "connector")}
            )

    assert SELECTORS["@non_text"](Speech()) == {"speech.audio_tower", "speech.video_tower", "speech.connector"}


def test_what_a_denoiser_makes_is_no_tower_of_a_model_of_texts() -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual_transformer_blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return hidden_states

    assert SELECTORS["@non_text"](Video()) == set()


def test_a_documented_family_shows_the_documented_lists() -> None:
    assert LLMTemplate.get("mixtral").get_config("fp8").exclude == ["lm_head", "*.gate"]
    assert LLMTemplate.get("gpt_oss").exclude_layers_name == ["lm_head", "*router*"]
    awq, gptq, rotation = config(algorithm=["awq", "gptq", "rotation"]).algo_config or ()
    assert [fold["layers"] for fold in awq.scaling_layers] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    assert awq.scaling_layers[0]["prev_op"] == "input_layernorm" and awq.model_decoder_layers == "model.layers"
    assert len(gptq.inside_layer_modules) == 7 and rotation == RotationConfig()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["awq", "smoothquant", "autosmoothquant", "gptq", "rotation"])
def test_the_lists_that_are_shown_change_nothing_until_they_are_changed(algorithm: str) -> None:
    shown, found = (
        LLMTemplate.get(family).get_config("int4_wo_32", algorithm) for family in ("llama", "a_model_of_next_year")
    )
    ids = torch.arange(64).reshape(4, 16)

    def weights(made: QConfig) -> dict[str, torch.Tensor]:
        quantizer = ModelQuantizer(made)
        return dict(quantizer.freeze(quantizer.quantize_model(tiny_llama(), [ids])).state_dict())

    expected = weights(found)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(shown).items())
    if algorithm == "smoothquant":
        shown.algo_config[0].scaling_layers.pop(0)
        assert not all(torch.equal(tensor, expected[name]) for name, tensor in weights(shown).items())


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "transformer"), ("llama", "classifier"), ("mixtral", "no routers")]
)
def test_a_documented_name_that_a_model_lacks_stands_for_its_role(family: str, name: str) -> None:
    model = tiny_llama()
    if name == "classifier":
        from transformers import LlamaConfig, LlamaForSequenceClassification

        model = LlamaForSequenceClassification(LlamaConfig(**tiny_llama().config.to_dict() | {"num_labels": 3}))
    if name == "transformer":
        model = model.model
    plan = make_plan(LLMTemplate.get(family).get_config("int8_wo"), model)
    assert len(plan.layers) == 14 and not {"lm_head", "score"} & set(plan.layers)
    with pytest.raises(ConfigError, match="'lm_heads'"):
        make_plan(config(exclude_layers=["lm_heads"]), model)


def test_exclude_is_replaced_by_a_list() -> None:
    assert config(exclude_layers=["lm_head"]).exclude == ["lm_head"]
    assert config(exclude_layers=[]).exclude == []
    assert LLMTemplate("x", exclude_layers_name=["*.gate"]).get_config("fp8").exclude == ["*.gate"]
    assert LLMTemplate("x", exclude_layers_name=[]).get_config("fp8").exclude == []


def test_layer_and_type_schemes() -> None:
    made = config(layer_config={"*.o_proj": "int8"}, layer_type_config={nn.Conv2d: "int4_wo_32"})
    assert made.layer_quant_config == {"*.o_proj": config_of_layer(SCHEMES["int8"])}
    assert made.layer_type_quant_config == {nn.Conv2d: config_of_layer(SCHEMES["int4_wo_32"])}


def test_kv_cache_and_attention() -> None:
    made = config("int8", kv_cache_scheme="fp8", min_kv_scale=1.0, layer_config={"*o_proj": "fp8", "*v_proj": "fp8"})
    assert list(made.layer_quant_config) == ["*o_proj", "*v_proj", "*k_proj"]
    assert list(made.kv_cache_quant_config) == ["*k_proj", "*v_proj"]
    assert made.kv_cache_group == [], "a scale each"
    assert made.min_kv_scale == 1.0
    key, value = (made.kv_cache_quant_config[name] for name in ("*k_proj", "*v_proj"))
    assert key.output_tensors == value.output_tensors == FP8
    assert (key.weight.dtype, value.weight.dtype) == (Dtype.int8, Dtype.fp8_e4m3)
    made = config(attention_scheme="fp8")
    assert made.softmax_quant_spec == FP8
    assert made.layer_quant_config["*q_proj"].output_tensors == FP8
    fused = LLMTemplate("x", ["*qkv"], "*qkv").get_config("fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
    assert list(fused.layer_quant_config) == ["*qkv"]
    assert config(kv_cache_scheme="int8").kv_cache_quant_config["*v_proj"].output_tensors.dtype is Dtype.int8
    for option, possible in {"kv_cache_scheme": "'fp8', 'int8'", "attention_scheme": "'fp8'"}.items():
        with pytest.raises(ConfigError, match=f"{option}: unknown scheme 'int4'. Possible: {possible}"):
            config(**{option: "int4"})


def test_families_whose_layers_make_keys_and_values_together() -> None:
    made = LLMTemplate.get("phi3").get_config("int8_wo", kv_cache_scheme="fp8", attention_scheme="fp8")
    assert list(made.kv_cache_quant_config) == list(made.layer_quant_config) == ["*qkv_proj"]
    made = LLMTemplate.get("deepseek_v3").get_config("int8_wo", kv_cache_scheme="fp8", attention_scheme="fp8")
    assert list(made.layer_quant_config) == ["*kv_b_proj", "*q_b_proj"]


def test_algorithms() -> None:
    found = LLMTemplate.get("a_model_of_next_year")
    assert found.get_config("fp8", algorithm="awq").algo_config == [AWQConfig()]
    both = config(algorithm=["smoothquant", "gptq"], algo_configs={"gptq": GPTQConfig(damp_percent=0.1)})
    assert [type(algorithm) for algorithm in both.algo_config] == [
        AutoSmoothQuantConfig,
        GPTQConfig,
    ]
    written = config(algorithm=SmoothQuantConfig(alpha=0.5)).algo_config
    assert (
        written
        == [SmoothQuantConfig(alpha=0.5)]
        == config(algorithm="smooth", algo_configs={"smooth": written[0]}).algo_config
    )
    assert both.algo_config[1] == GPTQConfig(damp_percent=0.1)
    mine = AWQConfig(model_decoder_layers="layers")
    for template in (LLMTemplate("x", algorithm_configs={"awq": mine}), LLMTemplate("x", awq_config=mine)):
        assert template.get_config("fp8", algorithm="awq").algo_config == [mine]
    assert config().algo_config is None
    for name in ALGO_CONFIGS:
        assert config(algorithm=name).algo_config
    mixed = found.get_config("fp8", algorithm=[GPTQConfig(damp_percent=0.2), "awq"]).algo_config
    assert mixed == [GPTQConfig(damp_percent=0.2), AWQConfig()]
    assert config(algorithm=AWQConfig()).algo_config == mixed[1:]
    with pytest.raises(ConfigError, match="takes names and configs of algorithms, got 3"):
        config(algorithm=[3])
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'qptq'. Did you mean 'gptq'"):
        config(algorithm="qptq")
    with pytest.raises(ConfigError, match="Unknown algorithm"):
        config(algo_configs={"qptq": GPTQConfig()})
    with pytest.raises(ConfigError, match=r"no argument 'kv_layer_name'. Did you mean 'kv_layers_name'"):
        LLMTemplate("x", kv_layer_name=["k"])


def test_shared_scales() -> None:
    siblings = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    for scheme in ("nvfp4", "fp4_block16_scale_e4m3"):
        made = config(scheme)
        assert made.shared_scale_groups == siblings and made.sync_moe_expert_input_amax
    assert config("fp8", layer_config={"*.mlp.*": "nvfp4"}).shared_scale_groups == siblings
    assert config("nvfp4", shared_scale_groups=[["a", "b"]]).shared_scale_groups == [["a", "b"]]
    assert config("mxfp4").shared_scale_groups == [] and not config("mxfp4").sync_moe_expert_input_amax


def test_unknown_schemes_list_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown scheme 'uint4_wo_12'. Did you mean 'uint4_wo_128'"):
        config("uint4_wo_12")
    with pytest.raises(ConfigError, match="Unknown scheme 'fp9'"):
        config(layer_config={"*.o_proj": "fp9"})


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("name", "value"),
    [("scheme", [None]), ("scheme", {}), ("layer_config", 1.5), ("layer_config", {"*": {}}), ("layer_type_config", 3),
     ("kv_cache_scheme", [[]]), ("attention_scheme", {}), ("algorithm", 3)],
)  # fmt: skip
def test_arguments_of_other_types_are_refused(name: str, value: Any) -> None:
    arguments = {"scheme": "int8", name: value}
    with pytest.raises(ConfigError):
        LLMTemplate.get("llama").get_config(**arguments)


def test_schemes_of_ones_own() -> None:
    mine = QLayerConfig(weight=Int8PerTensorSpec())
    LLMTemplate.register_scheme("mine", mine)
    assert "mine" in LLMTemplate.get_supported_schemes()
    assert config("mine").global_quant_config == mine
    with pytest.raises(ConfigError, match="choose another name"):
        LLMTemplate.register_scheme("mine", mine)
    LLMTemplate.unregister_scheme("mine")
    with pytest.raises(ConfigError, match="Unknown scheme 'mine'"):
        config("mine")
    with pytest.raises(ConfigError, match="Unknown scheme 'mine'"):
        LLMTemplate.unregister_scheme("mine")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["int8_wo", "nvfp4", "w_fp8_a_fp8"])
def test_a_registered_scheme_stands_in_place_of_a_built_in_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, known = config(name), LLMTemplate.get_supported_schemes()
    mine = QLayerConfig(weight=Int8PerTensorSpec())
    LLMTemplate.register_scheme(name, mine)
    assert f"The registered scheme {name!r} stands in place of the built-in one." in capsys.readouterr().err
    made = config(name)
    assert made.global_quant_config == mine and made.global_quant_config != before.global_quant_config
    assert not made.shared_scale_groups and not made.sync_moe_expert_input_amax, "those are of the built-in nvfp4"
    names = LLMTemplate.get_supported_schemes()
    assert sorted(names) == sorted({*known, name}), "once"
    LLMTemplate.unregister_scheme(name)
    assert config(name) == before


@pytest.mark.usefixtures("clean")
def test_templates_of_ones_own() -> None:
    template = LLMTemplate("mine", kv_layers_name=["*wk", "*wv"], q_layer_name="*wq", exclude_layers_name=["head"])
    LLMTemplate.register_template(template)
    assert LLMTemplate.get("mine") is template and "mine" in LLMTemplate.list_available()
    made = QConfig.with_llm_template(template, "fp8", kv_cache_scheme="fp8")
    assert made.exclude == ["head"] and list(made.kv_cache_quant_config) == ["*wk", "*wv"]


def test_algorithms_may_be_named_in_one_text() -> None:
    names = [
        algorithm.name
        for algorithm in config("int4_wo_64", algorithm="rotation, autosmoothquant,gptq").algo_config or []
    ]
    assert names == ["rotation", "autosmoothquant", "gptq"]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.out = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[0](self.embed(x) + timestep))  # type: ignore[no-any-return]


class NoDenoiser(Denoiser):
    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return super().forward(x, length)


def test_what_stands_outside_the_blocks_of_a_denoiser_stays_in_float_unless_it_is_named() -> None:
    assert SELECTORS["@outside_blocks"](Denoiser()) == {"embed", "out"}
    assert not SELECTORS["@outside_blocks"](NoDenoiser())
    template = LLMTemplate.get("auto")
    assert set(make_plan(template.get_config("int8_wo"), Denoiser()).layers) == {"blocks.0"}
    named = template.get_config("int8_wo", layer_config={"out": "int8_wo"})
    assert set(make_plan(named, Denoiser()).layers) == {"blocks.0", "out"}
