"""The table of what vLLM makes one matrix of: models whose names differ, or that keep apart what others join."""

from __future__ import annotations

import pytest

from quark.goals.fused_layers import FUSED_LAYERS, PROGRAMS, VLLM, fused_siblings

QKV = ("q_proj", "k_proj", "v_proj")
CASES = [
    ("self_attn", (*QKV, "o_proj"), "LlamaForCausalLM", {"qkv_proj": QKV}),
    ("self_attn", ("q_proj", "k_proj", "o_proj"), "Gemma4ForCausalLM", {"qkv_proj": ("q_proj", "k_proj")}),
    ("encoder_attn", (*QKV, "out_proj"), "WhisperForConditionalGeneration", {"kv_proj": ("k_proj", "v_proj")}),
    ("linear_attn", (*QKV, "g_proj", "o_proj"), "OlmoHybridForCausalLM", {"in_proj_qkvg": (*QKV, "g_proj")}),
    ("self_attn", (*QKV, "g_proj", "o_proj"), "Step3p5ForCausalLM", {"qkv_proj": QKV}),
    (
        "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), "Qwen3_5ForCausalLM",
        {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")},
    ),
    ("linear_attn", ("in_proj_qkvz", "in_proj_ba", "out_proj"), "Qwen3NextForCausalLM", {}),
    (
        "self_attn", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "DeepseekV3ForCausalLM",
        {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")},
    ),
    ("self_attn", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "MiniCPM3ForCausalLM", {}),
    ("self_attn", ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), "DeepseekV2ForCausalLM", {}),
    ("feed_forward", ("w1", "w3", "w2"), "Lfm2ForCausalLM", {"w13": ("w1", "w3")}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2])
def test_rows_match_the_layers_of_a_module(case: tuple[str, tuple[str, ...], str, dict[str, tuple[str, ...]]]) -> None:
    module, leaves, architecture, expected = case
    found = fused_siblings(module, leaves, {architecture}, VLLM)
    assert found is not None
    assert {row.fused: tuple(members) for row, members in found if row.fused} == expected


def test_of_other_names_nothing_is_known() -> None:
    assert fused_siblings("SelfAttention", ("q", "k", "v", "o"), {"T5ForConditionalGeneration"}, VLLM) is None


def test_servers_have_rows_of_their_own() -> None:
    found = fused_siblings("mlp", ("w1", "w2", "c_proj"), {"QWenLMHeadModel"}, "SGLang")
    assert found is not None and [row.fused for row, _ in found] == ["gate_up_proj"]
    assert fused_siblings("mlp", ("w1", "w2", "c_proj"), {"QWenLMHeadModel"}, VLLM) is None
    dense = ("feed_forward", ("w1", "w3", "w2"), {"Lfm2ForCausalLM"})
    assert [{row.fused for row, _ in fused_siblings(*dense, program) or ()} for program in PROGRAMS] == [{"w13"}, {""}]


def test_each_row_says_where_it_is_from() -> None:
    assert all(row.source and len(row.members) > 1 for row in FUSED_LAYERS)
