"""The mixes of block types: which tensor gets which, as llama.cpp chooses."""

from __future__ import annotations

import pytest

from quark.gguf import MIXES, WeightRole, role_of

LAYERS = 34
ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down")
CHOSEN = {
    ("iq4_nl", 8): "IQ4_NL Q6_K n n n n n 5555nnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
    ("iq4_xs", 8): "IQ4_XS Q6_K x x x x x 5555xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ("q2_k", 8): "Q2_K Q6_K 2 2 3 3 2 3",
    ("q3_k_l", 8): "Q3_K Q6_K 3 3 5 5 3 5",
    ("q3_k_m", 8): "Q3_K Q6_K 3 3 5544444444444444444444444444444444 4 3 5544444444444444444444444444444444",
    ("q3_k_s", 8): "Q3_K Q6_K 3 3 3 3 3 3",
    ("q4_0", 8): "Q4_0 Q6_K 4 4 4 4 4 4",
    ("q4_1", 8): "Q4_1 Q6_K 4 4 4 4 4 4",
    ("q4_k_m", 8): "Q4_K Q6_K 4 4 6666446446446446446446446446466666 4 4 6666446446446446446446446446466666",
    ("q4_k_s", 8): "Q4_K Q6_K 4 4 5555444444444444444444444444444444 4 4 5555444444444444444444444444444444",
    ("q5_0", 8): "Q5_0 Q6_K 5 5 5 5 5 5",
    ("q5_1", 8): "Q5_1 Q6_K 5 5 5 5 5 5",
    ("q5_k_m", 8): "Q5_K Q6_K 5 5 6666556556556556556556556556566666 5 5 6666556556556556556556556556566666",
    ("q5_k_s", 8): "Q5_K Q6_K 5 5 5 5 5 5",
    ("q6_k", 8): "Q6_K Q6_K 6 6 6 6 6 6",
    ("q8_0", 8): "Q8_0 Q8_0 8 8 8 8 8 8",
    ("iq4_nl", 2): "Q6_K - n n 5 n n 5555nnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
    ("iq4_xs", 2): "Q6_K - x x 5 x x 5555xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ("q2_k", 2): "Q6_K - 2 2 4 3 2 3",
    ("q3_k_l", 2): "Q6_K - 3 3 5 5 3 5",
    ("q3_k_m", 2): "Q6_K - 3 3 5544444444444444444444444444444444 4 3 5544444444444444444444444444444444",
    ("q3_k_s", 2): "Q6_K - 3 3 3 3 3 3",
    ("q4_0", 2): "Q6_K - 4 4 4 4 4 4",
    ("q4_1", 2): "Q6_K - 4 4 4 4 4 4",
    ("q4_k_m", 2): "Q6_K - 4 4 6666446446446446446446446446466666 4 4 6666446446446446446446446446466666",
    ("q4_k_s", 2): "Q6_K - 4 4 5555444444444444444444444444444444 4 4 5555444444444444444444444444444444",
    ("q5_0", 2): "Q6_K - 5 5 5 5 5 5",
    ("q5_1", 2): "Q6_K - 5 5 5 5 5 5",
    ("q5_k_m", 2): "Q6_K - 5 5 6666556556556556556556556556566666 5 5 6666556556556556556556556556566666",
    ("q5_k_s", 2): "Q6_K - 5 5 5 5 5 5",
    ("q6_k", 2): "Q6_K - 6 6 6 6 6 6",
    ("q8_0", 2): "Q8_0 - 8 8 8 8 8 8",
}
"""(mix, heads of keys and values) -> types of embeddings, of the head ("-": tied) and of each role, a letter for each
layer or one for all. From llama_model_quantize (llama.cpp b6173) on a Llama of 34 layers with 8 heads, the second with
tied embeddings."""


def letter(kind: str | None) -> str:
    assert kind is not None
    return {"iq4_nl": "n", "iq4_xs": "x"}.get(kind, kind.strip("q")[0])


@pytest.mark.parametrize(("name", "heads"), CHOSEN)
def test_every_tensor_gets_the_type_that_llama_cpp_gives_it(name: str, heads: int) -> None:
    mix, tied = MIXES[name], heads == 2

    def kind(stored: str) -> str | None:
        return mix.type_of(WeightRole(stored, 256, LAYERS, 8 // heads, tied=tied))

    found = [str(kind("token_embd")).upper(), "-" if tied else str(kind("output")).upper()]
    for role in ROLES:
        each = "".join(letter(kind(f"blk.{layer}.{role}")) for layer in range(LAYERS))
        found.append(each if len(set(each)) > 1 else each[0])
    assert " ".join(found) == CHOSEN[name, heads]


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("q2_k", "ffn_gate", "iq4_nl"), ("q3_k_m", "ffn_down", "q5_0"), ("q4_k_m", "attn_q", "q5_0"),
        ("q5_k_s", "attn_q", "q5_1"), ("q6_k", "attn_q", "q8_0"), ("iq4_xs", "attn_q", "iq4_nl"),
    ],
)  # fmt: skip
def test_rows_that_are_no_whole_blocks_get_blocks_of_32(name: str, role: str, expected: str) -> None:
    """As llama_model_quantize did on a model whose rows have 640 values."""
    assert MIXES[name].type_of(WeightRole(f"blk.3.{role}", 640, 5)) == expected
    assert MIXES[name].type_of(WeightRole(f"blk.3.{role}", 48, 5)) is None
    assert MIXES[name].type_of(WeightRole("output", 640, 5)) == "q8_0"


def test_eight_experts_and_eighty_layers_get_wider_attention() -> None:
    """The rules of llama_tensor_get_type for Mixtral and for models of 70 billion parameters."""
    mixtral = {role: MIXES["q4_k_m"].type_of(WeightRole(f"blk.9.{role}", 4096, 32, 4, 8)) for role in ROLES}
    assert mixtral["attn_k"] == mixtral["attn_v"] == "q8_0" and mixtral["attn_output"] == "q5_k"
    assert MIXES["q3_k_l"].type_of(WeightRole("blk.9.attn_output", 4096, 32, 4, 8)) == "q3_k"
    assert MIXES["q4_k_m"].type_of(WeightRole("blk.11.attn_v", 8192, 80, 8)) == "q5_k"


def test_a_place_is_read_from_a_config() -> None:
    class Config:
        num_attention_heads, num_key_value_heads, num_hidden_layers, num_local_experts = 32, 8, 24, 8

    role = role_of("blk.3.ffn_down_exps.weight", 256, Config)
    assert role == WeightRole("blk.3.ffn_down_exps", 256, 24, 4, 8)
    assert (role.matrix, role.layer, role.is_head) == ("ffn_down", 3, False)
