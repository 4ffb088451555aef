"""The mixes of block types that llama.cpp calls Q4_K_M and so on: which tensor of a GGUF file gets which type.

A mix has a type for most tensors; the values of attention and the way down of the feed-forward network, which lose
most, get a wider one in some layers. The head (and embeddings that are the head too) is Q6_K. llama.cpp's
llama_tensor_get_type (llama-quant.cpp) is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quark.core.blocks.block_types import BLOCK_TYPES, fitting_block_type
from quark.core.names.registry import Registry


@dataclass(frozen=True)
class WeightRole:
    """Which matrix of a model a tensor is.

    Attributes:
        name: Of the tensor in the file, without ".weight": "blk.3.attn_v".
        columns: Values in a row.
        layers: Blocks of the model.
        sharing: Query heads for each head of keys and values.
        experts: Experts of a block; 0 where there are none.
        tied: Whether the embeddings are the head too.
    """

    name: str
    columns: int
    layers: int
    sharing: int = 1
    experts: int = 0
    tied: bool = False

    @property
    def layer(self) -> int:
        """The block; 0 outside of blocks."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blk" else 0

    @property
    def matrix(self) -> str:
        """The name without the block, experts as the layer that they are: "attn_v", "ffn_down"."""
        return self.name.rpartition(".")[2].removesuffix("_exps").removesuffix("_shexp")

    @property
    def is_head(self) -> bool:
        """True where the logits are products with this tensor."""
        return self.name == "output" or (self.tied and self.name == "token_embd")


def role_of(name: str, columns: int, config: Any) -> WeightRole:
    """The role of a tensor.

    Args:
        name: In the file.
        columns: Values in a row.
        config: Of the transformers model.
    """
    heads = getattr(config, "num_attention_heads", None) or 1  # a model of states alone has none
    sharing = heads // (getattr(config, "num_key_value_heads", None) or heads)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return WeightRole(name.removesuffix(".weight"), columns, config.num_hidden_layers, sharing, int(experts), tied)


Rule = Callable[[WeightRole], bool]


def always(role: WeightRole) -> bool:
    """Every layer."""
    return True


def _more_bits(role: WeightRole) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    first, last = role.layers // 8, 7 * role.layers // 8
    return role.layer < first or role.layer >= last or (role.layer - first) % 3 == 2


def first(share: int) -> Rule:
    """The first 1 / share of the layers."""
    return lambda role: role.layer < role.layers // share


def below(layer: int) -> Rule:
    """The layers before this one."""
    return lambda role: role.layer < layer


def shared(role: WeightRole) -> bool:
    """Return True where four heads or more read the same keys and values: their tensors are small, and matter more."""
    return role.sharing >= 4


@dataclass(frozen=True)
class Mix:
    """One mix.

    Attributes:
        base: Type of what no rule names.
        file_type: The member of gguf.LlamaFileType, without "MOSTLY_".
        wider: Matrix -> rules in the order that they are asked, and the type that each gives.
    """

    base: str
    file_type: str
    wider: Mapping[str, tuple[tuple[Rule, str], ...]] = field(default_factory=dict)

    def type_of(self, role: WeightRole) -> str | None:
        """The block type of a tensor; None where it stays in float, as its rows are no whole blocks of any."""
        return fitting_block_type(self._head(role) if role.is_head else self._wanted(role), role.columns)

    def _head(self, role: WeightRole) -> str:
        whole = role.columns % BLOCK_TYPES[self.base].block == 0
        return "q6_k" if whole and self.base != "q8_0" else "q8_0"

    def _wanted(self, role: WeightRole) -> str:
        if role.experts == 8 and role.matrix in ("attn_k", "attn_v"):
            return "q8_0"  # small beside eight experts
        if role.experts == 8 and role.matrix == "attn_output" and self.base in ("q2_k", "q3_k", "q4_k", "iq4_nl"):
            return self.base if self.file_type == "Q3_K_L" else "q5_k"
        chosen = next((to for rule, to in self.wider.get(role.matrix, ()) if rule(role)), self.base)
        # Of the models of 70 billion parameters, eight heads share one tensor of values.
        large = role.matrix == "attn_v" and role.layers == 80 and chosen in ("q3_k", "q4_k")
        return "q5_k" if large else chosen


CHOSEN_TYPES = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
"""The types that a budget chooses from: each the best of its size. Rows that are no whole blocks get the types that
llama.cpp gives them."""

MIXES: Registry[Mix] = Registry("mix of block types")
_NL = {"attn_v": ((shared, "q5_k"),), "ffn_down": ((first(8), "q5_k"),)}
for _name, _mix in {
    "q2_k": Mix(
        "q2_k",
        "Q2_K",
        {
            "attn_v": ((shared, "q4_k"), (always, "q3_k")),
            "ffn_down": ((always, "q3_k"),),
            "attn_output": ((always, "q3_k"),),
        },
    ),
    "q3_k_s": Mix("q3_k", "Q3_K_S"),
    "q3_k_m": Mix(
        "q3_k",
        "Q3_K_M",
        {
            "attn_v": ((below(2), "q5_k"), (always, "q4_k")),
            "ffn_down": ((first(16), "q5_k"), (always, "q4_k")),
            "attn_output": ((always, "q4_k"),),
            "attn_qkv": ((always, "q4_k"),),
        },
    ),
    "q3_k_l": Mix(
        "q3_k",
        "Q3_K_L",
        {
            "attn_v": ((always, "q5_k"),),
            "ffn_down": ((always, "q5_k"),),
            "attn_output": ((always, "q5_k"),),
            "attn_qkv": ((always, "q4_k"),),
        },
    ),
    "q4_k_s": Mix("q4_k", "Q4_K_S", {"attn_v": ((below(4), "q5_k"),), "ffn_down": ((first(8), "q5_k"),)}),
    "q4_k_m": Mix(
        "q4_k",
        "Q4_K_M",
        {
            "attn_v": ((_more_bits, "q6_k"),),
            "ffn_down": ((_more_bits, "q6_k"),),
            "attn_qkv": ((always, "q5_k"),),
        },
    ),
    "q5_k_s": Mix("q5_k", "Q5_K_S"),
    "q5_k_m": Mix(
        "q5_k",
        "Q5_K_M",
        {
            "attn_v": ((_more_bits, "q6_k"),),
            "ffn_down": ((_more_bits, "q6_k"),),
            "attn_qkv": ((always, "q6_k"),),
        },
    ),
    "q6_k": Mix("q6_k", "Q6_K"),
    "iq4_xs": Mix("iq4_xs", "IQ4_XS", _NL),
    "iq4_nl": Mix("iq4_nl", "IQ4_NL", _NL),
    **{name: Mix(name, name.upper()) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")},
}.items():
    MIXES.register(_name, _mix)
