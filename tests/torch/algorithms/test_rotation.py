"""Rotations of small random models of many architectures: what they compute stays the same, to 1e-9 in float64."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError, NotSupportedError, StructureError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms.rotation.quarot import ModelRotation
from quark.torch.algorithms.scaling.float64_forward import Exact, difference
from quark.torch.config.algo_configs import OnlineRotationConfig, QuaRotConfig, RotationConfig
from quark.torch.layers.online_rotation import RotatedAttention, input_rotations
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.model.residual_stream import measure_norm
from tests.models.architectures import build, token_ids
from tests.models.families import family

ROTARY = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "falcon", "falcon_new", "gpt_neox"]


def model_of(name: str) -> Any:
    return build(name).double()


def exact(model: nn.Module) -> list[torch.Tensor]:
    """The outputs of the model, computed in float64 throughout."""
    return Exact(model, (token_ids(),), {}).run()[0]


def rotate(model: nn.Module, **options: Any) -> nn.Module:
    ModelRotation(model, RotationConfig(**options)).rotate()
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", [*ROTARY, "opt"])
def test_all_rotations_keep_the_outputs(name: str) -> None:
    model = model_of(name)
    before, weights = exact(model), state(model)
    rotate(model, r2=True, r3=name != "opt", r4=True, random_r1=True, random_r2=True)
    assert difference(before, exact(model)) < 1e-9
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    matrices = {key for key, value in weights.items() if value.ndim == 2}
    assert matrices <= changed | {"model.decoder.embed_positions.weight"}, "every matrix reads or writes the stream"
    assert len(list(input_rotations(model))) == 2, "one down projection in each of two blocks"
    attentions = [m for m in model.modules() if isinstance(m.__dict__.get("forward"), RotatedAttention)]
    assert len(attentions) == (0 if name == "opt" else 2)


@pytest.mark.parametrize("name", ["llama", "gemma", "opt", "falcon"])
def test_gains_of_the_norms_move_into_the_layers_behind_them(name: str) -> None:
    model = rotate(model_of(name))
    norms = [module for module in model.modules() if measure_norm(module) is not None]
    assert len(norms) >= 3
    for norm in norms:
        offset, _ = measure_norm(norm)  # type: ignore[misc]
        torch.testing.assert_close(norm.weight + offset, torch.ones_like(norm.weight))


@pytest.mark.slow
def test_experts_that_are_scaled_by_token_and_summed_are_followed() -> None:
    model = family("llama4_text").double()
    unfuse_experts(model, lambda layer: True)
    before, weights = exact(model), state(model)
    rotate(model, r2=True)
    assert difference(before, exact(model)) < 1e-9
    expert = "model.layers.0.feed_forward.experts.3.down_proj.weight"
    assert not torch.equal(model.state_dict()[expert], weights[expert])


def test_a_table_that_another_layer_reads_too_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    before = state(model)
    with pytest.raises(StructureError, match=r"the weight of decoder\.embed_tokens, which is that of encoder\.embed"):
        rotate(model)
    assert unchanged(model, before)


def test_values_are_rotated_by_one_hadamard_matrix_for_each_head() -> None:
    """R2 of a grouped-query model against products written out: 2 value heads, 4 query heads, 8 features."""
    model = model_of("llama")
    old = copy.deepcopy(model.model.layers[0].self_attn)
    rotate(model, r1=False, r2=True)
    new = model.model.layers[0].self_attn
    h2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    h8 = torch.kron(torch.kron(h2, h2), h2) / 8**0.5
    expected = torch.block_diag(h8, h8).T @ old.v_proj.weight
    torch.testing.assert_close(new.v_proj.weight, nn.Parameter(expected))
    expected = old.o_proj.weight @ torch.block_diag(h8, h8, h8, h8)
    torch.testing.assert_close(new.o_proj.weight, nn.Parameter(expected))
    torch.testing.assert_close(new.q_proj.weight, old.q_proj.weight)


def test_blocks_of_rotation_size_mix_no_other_channels() -> None:
    model = model_of("llama")
    weight = model.model.embed_tokens.weight.detach().clone()
    before = exact(model)
    rotate(model, rotation_size=4, r2=True, r4=True)
    assert difference(before, exact(model)) < 1e-9
    now = model.model.embed_tokens.weight.detach()
    torch.testing.assert_close(now.unflatten(1, (-1, 4)).norm(dim=-1), weight.unflatten(1, (-1, 4)).norm(dim=-1))
    assert {rotation.size for _, rotation in input_rotations(model)} == {4}


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_online_r1_needs_no_residual_stream(name: str) -> None:
    model = model_of(name)
    before = exact(model)
    rotate(model, online_r1_rotation=True, rotation_size=8, r4=True, random_r1=True)
    assert difference(before, exact(model)) < 1e-9
    names = {full.rsplit(".", 1)[-1] for full, _ in input_rotations(model)}
    readers = {"query", "key", "value", "dense"}
    gated = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == (readers if name == "bert" else gated)
    assert not any("attention.output" in full or "o_proj" in full for full, _ in input_rotations(model))


@pytest.mark.slow
def test_signs_are_each_layers_own_unless_shared() -> None:
    options: dict[str, Any] = {"online_r1_rotation": True, "random_r1": True}
    own = dict(input_rotations(rotate(model_of("llama"), **options)))
    shared = OnlineRotationConfig(shared_parallel=True)
    same = dict(input_rotations(rotate(model_of("llama"), **options, online_config=shared)))
    first = [name for name in own if name.startswith("model.layers.0")]
    assert len({own[name].seed for name in first}) == len(first) == 5
    assert len({same[name].seed for name in first}) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "layers.0: post_attention_layernorm .Gemma2RMSNorm. writes to the residual stream"),
        ("gemma3", "layers.0: post_attention_layernorm .Gemma3RMSNorm. writes to the residual stream"),
        ("bert", "LayerNorm"),
        ("mixtral", "layers.0: The operation '.*' in mlp.experts"),
    ],
)
def test_a_stream_that_cannot_be_rotated_is_refused_and_nothing_changes(name: str, reason: str) -> None:
    model = build(name)
    before = state(model)
    with pytest.raises(StructureError, match=reason):
        rotate(model, r2=True)
    assert unchanged(model, before)


@pytest.mark.parametrize("name", ["gemma3", "bert"])
def test_by_name_values_of_heads_are_rotated_where_the_stream_cannot_be(
    name: str,
) -> None:
    """What is written out is refused; a name asks for what the model allows, and the config tells what that was."""
    heads = build(name)
    rotate(heads, r1=False, r2=True)
    named = LLMTemplate.get("auto").get_config("int8_wo", "rotation")
    quantized = ModelQuantizer(named).quantize_model(build(name))
    expected = state(heads)
    assert all(torch.equal(value, expected[key]) for key, value in state(quantized).items() if key in expected)
    (config,) = quantized.quant_config.algo_config
    assert (config.r1, config.r2) == (False, True)
    (asked,) = named.algo_config
    assert (asked.r1, asked.r2) == (True, False)


@pytest.mark.parametrize(("scheme", "kept"), [("mxfp4_weight_only", False), ("int4_wo_per_channel", True)])
def test_by_name_a_rotation_stays_where_the_model_loses_less(scheme: str, kept: bool) -> None:
    """Powers of two are on the grid of MXFP4 as they are; a large column takes the int4 grid from all others."""
    model = build("llama")
    with torch.no_grad():
        for layer in (module for module in model.model.layers.modules() if isinstance(module, nn.Linear)):
            if kept:
                layer.weight[:, 3] *= 30
            else:
                layer.weight.copy_(layer.weight.sign() / 32)
    plain = LLMTemplate.get("auto").get_config(scheme)
    named = LLMTemplate.get("auto").get_config(scheme, "quarot")
    expected = state(ModelQuantizer(plain).quantize_model(copy.deepcopy(model), [token_ids()]))
    quantized = ModelQuantizer(named).quantize_model(model, [token_ids()])
    (error,) = quantized.quant_errors
    assert (error.block, error.algorithm, error.kept) == ("", "quarot", kept)
    assert (error.after < error.before) == kept
    assert (quantized.quant_config.algo_config is not None) == kept
    assert bool(list(input_rotations(quantized))) == kept
    assert unchanged(quantized, expected) != kept


def test_a_bias_of_a_norm_that_nothing_can_take_over_is_refused() -> None:
    model = model_of("falcon")
    with torch.no_grad():
        model.transformer.h[1].input_layernorm.weight[3] = 0
    before = state(model)
    with pytest.raises(StructureError, match=r"h\.1: input_layernorm has a bias and a gain of 0 in 1 channels"):
        rotate(model)
    assert unchanged(model, before)


def test_no_rotary_embedding_no_r3() -> None:
    with pytest.raises(StructureError, match=r"layers\.0: R3 needs queries and keys with a rotary embedding"):
        rotate(model_of("opt"), r1=False, r3=True)


def test_r4_of_fused_experts_is_refused() -> None:
    with pytest.raises(StructureError, match=r"r4=True: no linear layer .* \(fused experts hold none\)"):
        rotate(build("mixtral"), r1=False, r4=True)


def test_a_shared_weight_of_embedding_and_head_becomes_two() -> None:
    model = model_of("gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rotate(model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False


@pytest.mark.slow
def test_rotated_models_can_be_copied_and_pickled() -> None:
    model = rotate(model_of("llama"), r2=True, r3=True, r4=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.model.layers[0].self_attn.forward.attention is twin.model.layers[0].self_attn
        assert difference(exact(model), exact(twin)) == 0
        nn.init.zeros_(twin.model.layers[0].mlp.down_proj.weight)
        assert difference(exact(model), exact(twin)) > 1e-3


# Given structures -----------------------------------------------------------------------------------------------------

ATTENTION = [f"model.layers.layer_id.self_attn.{x}_proj" for x in "qkv"]
MLP = [f"model.layers.layer_id.mlp.{x}_proj" for x in ("gate", "up")]


def llama_layers(readers: list[str] = MLP) -> dict[str, list[dict[str, Any]]]:
    """`scaling_layers` of a Llama, as the guides write it."""
    inner = {
        "prev_modules": ["model.layers.layer_id.self_attn.o_proj"],
        "norm_module": "model.layers.layer_id.post_attention_layernorm",
        "next_modules": readers,
    }
    outer = {"norm_module": "model.layers.layer_id.input_layernorm", "next_modules": ATTENTION}
    last = {"prev_modules": ["model.layers.layer_id.mlp.down_proj"], "norm_module": "model.norm"}
    return {
        "first_layer": [outer | {"prev_modules": ["model.embed_tokens"]}, inner],
        "middle_layers": [outer | {"prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"]}, inner],
        "last_layer": [last | {"next_modules": ["lm_head"]}],
    }


def test_given_scaling_layers_rotate_what_is_found_without_them() -> None:
    given, found = model_of("llama"), model_of("llama")
    rotate(given, scaling_layers=llama_layers())
    rotate(found)
    assert unchanged(given, state(found))


def test_a_wrong_description_fails_its_proof_and_nothing_changes() -> None:
    model = model_of("llama")
    before = state(model)
    with pytest.raises(StructureError, match=r"model\.layers\.0: R1 would change what the block computes, by \d"):
        rotate(model, scaling_layers=llama_layers(MLP[:1]))
    assert unchanged(model, before)


def test_a_wrong_description_of_the_head_fails_its_proof_and_nothing_changes() -> None:
    model = model_of("gemma")
    before = state(model)
    layers = llama_layers()
    layers["first_layer"][0]["prev_modules"] = ["model.layers.layer_id.mlp.down_proj"]
    with pytest.raises(StructureError, match="R1 would change what the embeddings of the model compute"):
        rotate(model, scaling_layers=layers)
    assert unchanged(model, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings


def test_a_failed_proof_ties_embedding_and_head_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise StructureError("no proof")

    model = model_of("gemma")
    before = state(model)
    monkeypatch.setattr(ModelRotation, "_prove_frame", fail)
    with pytest.raises(StructureError, match="no proof"):
        rotate(model)
    assert unchanged(model, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings


def test_target_modules_and_listed_layers_are_rotated_online() -> None:
    layers = {"first_layer": [{"target_modules": MLP}], "middle_layers": [{"target_modules": MLP[:1]}]}
    model = rotate(model_of("llama"), scaling_layers=layers, online_r1_rotation=True)
    names = [f"model.layers.{n}" for n in ("0.mlp.gate_proj", "0.mlp.up_proj", "1.mlp.gate_proj")]
    assert [name for name, _ in input_rotations(model)] == names
    listed = OnlineRotationConfig(shared_parallel=False, online_rotation_layers=["model.layers.1.mlp.down_proj"])
    model = rotate(model_of("llama"), r1=False, r4=True, online_config=listed)
    assert [name for name, _ in input_rotations(model)] == ["model.layers.1.mlp.down_proj"]


# One block at a time --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_rotated_one_by_one_give_the_same_model() -> None:
    """Blocks but the first are on the meta device until their turn, which may come in any order."""
    options: dict[str, Any] = {"r2": True, "r4": True, "random_r1": True}
    whole, parts = build("llama"), build("llama")
    rotate(whole, **options)
    source = parts.model.layers[1].state_dict()
    parts.model.layers[1].to("meta")
    rotation = ModelRotation(parts, RotationConfig(**options))
    rotation.rotate_head()
    parts.model.layers[1].to_empty(device="cpu").load_state_dict(source)
    rotation.rotate_block("model.layers.1")
    rotation.rotate_block("model.layers.0")
    rotation.rotate_embeddings()
    assert unchanged(parts, state(whole))
    assert [name for name, _ in input_rotations(parts)] == [name for name, _ in input_rotations(whole)]


# Bad configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trainable": True, "online_r1_rotation": True}, ConfigError, "trainable=True learns rotations that fold"),
        ({"train_smooth": True}, NotSupportedError, "train_smooth"),
        ({"smooth_positions": ["r1"]}, NotSupportedError, "smooth_positions"),
        (
            {"r4": True, "online_config": OnlineRotationConfig(shared_parallel=False, use_input_prescale=True)},
            NotSupportedError,
            "use_input_prescale",
        ),
        ({"r1": False}, ConfigError, "nothing to rotate"),
        ({"r1": False, "r4": True, "online_r1_rotation": True}, ConfigError, "online_r1_rotation=True has no effect"),
        ({"rotation_size": 5}, ConfigError, "rotation_size=5 does not divide the 32 features of the stream"),
        ({"r1": False, "r4": True, "rotation_size": 48}, ConfigError, "48 does not divide the 64 inputs of mlp.down"),
        ({"r1": False, "r2": True, "rotation_size": 3}, ConfigError, "3 does not divide heads of 8"),
        ({"r1": False, "r2": True, "v_proj": "attn.v"}, ConfigError, "v_proj='attn.v' names no module"),
        ({"model_decoder_layers": "model.blocks"}, StructureError, "model.blocks"),
        ({"scaling_layers": {"first": []}}, ConfigError, "unknown key 'first'.*first_layer"),
        ({"scaling_layers": {"last_layer": [{"norm_module": "model.norm"}]}}, ConfigError, "'prev_modules' is missing"),
        ({"scaling_layers": llama_layers(["model.layers.layer_id.mlp.gat"])}, ConfigError, "'model.*gat' names no mod"),
    ],
)
def test_bad_configs_say_what_is_wrong(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = build("llama")
    before = state(model)
    with pytest.raises(error, match=message):
        rotate(model, **options)
    assert unchanged(model, before)


@pytest.mark.slow
def test_quarot_rotates_everything() -> None:
    model = model_of("llama")
    before = exact(model)
    ModelRotation(model, QuaRotConfig()).rotate()
    assert difference(before, exact(model)) < 1e-9
    assert len(list(input_rotations(model))) == 2


def test_models_without_blocks_or_tokens_are_refused() -> None:
    with pytest.raises(StructureError, match="no list of decoder blocks"):
        rotate(nn.Sequential(nn.Linear(8, 8)))


@pytest.mark.slow
def test_the_decoder_of_a_model_that_hears_is_rotated() -> None:
    """Whisper takes features and the ids of its decoder; its float outputs stay what they were."""
    from benchmarks.architectures.__main__ import build, families, result

    model, data = build("whisper", families(every=False)["whisper"])
    weight = model.model.decoder.layers[0].fc1.weight.detach().clone()
    expected = result(model, data[0])
    ModelRotation(model, RotationConfig()).rotate()
    assert not torch.equal(model.model.decoder.layers[0].fc1.weight, weight)
    torch.testing.assert_close(result(model, data[0]), expected, rtol=1e-4, atol=1e-5)


def test_where_possible_leaves_a_model_alone_that_cannot_be_rotated(caplog: pytest.LogCaptureFixture) -> None:
    """A group that no axis of the model is a multiple of."""
    config = LLMTemplate.get("llama").get_config("int8_wo")
    data = [token_ids(24, seed) for seed in range(2)]
    impossible = RotationConfig(r1=True, online_r1_rotation=True, rotation_size=7)
    with pytest.raises(ConfigError, match="rotation_size=7"):
        ModelQuantizer(replace(config, algo_config=[impossible])).quantize_model(build("llama"), data)
    with caplog.at_level("INFO", "quark"):
        chosen = replace(config, algo_config=[replace(impossible, where_possible=True)])
        model = ModelQuantizer(chosen).quantize_model(build("llama"), data)
    assert "Without rotation" in caplog.text and not dict(input_rotations(model))
