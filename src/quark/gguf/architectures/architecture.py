"""One architecture of GGUF files: which tensors of a model change on the way, and what readers compute with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ACTIVATIONS = {
    "silu": ("silu", "swish"),
    # Readers have a table of the form with tanh alone, 5e-4 from the exact one.
    "gelu": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"),
    "relu2": ("relu2",),
}
"""Activation of a reader -> names of it in configs of transformers."""
ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation")


@dataclass(frozen=True)
class Change:
    """A change of the values of a tensor that stays in float.

    Attributes:
        write: On its way into the file, given the config; files hold the result in float32.
        read: On the way back, but for the shape, which is the model's.
        exact: Whether both ways lead back to the very values, before these are rounded to the type of the model.
    """

    write: Callable[[torch.Tensor, Any], torch.Tensor]
    read: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    exact: bool = True


@dataclass(frozen=True)
class Architecture:
    """How models of one `model_type` become a GGUF file.

    Attributes:
        arch: Name in gguf.MODEL_ARCH_NAMES.
        activation: Name in ACTIVATIONS of the one that readers compute with.
        pairs: Whether rows of q and k are reordered, because the reader rotates neighbours and not halves.
        unit_norms: Whether the model computes with 1 + weight in its norms; files hold the sum.
        plain_norms: End of the names of norms that do not, in a model of which the others do.
        layer_norm: Whether its norms subtract the mean (else they are RMS norms).
        fused_heads: Name of the layer in which the queries, key and value of each group of heads lie together; files
            hold all queries, then all keys, then all values.
        alternating: Name of the layer of an expert in which rows of gate and up alternate; files hold all of the one,
            then all of the other.
        window_period: Every so many layers one has full attention, and the others have a sliding window; 0: readers
            know no window.
        window_layers: How many layers models have in which readers know windows, where only such have them.
        mixture: Whether it is a mixture of experts.
        without: Fields of the config that have to be false: readers know nothing of the kind.
        whole_heads: Whether a head has hidden_size / heads values, always.
        details: Field of the config -> method of the writer, for what only this architecture has.
        derived: The config -> other metadata, the writer's method without "add_" -> value.
        inner: The config -> values between the two layers of a feed-forward network, where no field has them.
        changes: End of a name -> what becomes of the values of such a tensor.
        splits: The config -> end of a name -> the tensors of a block, by their names in the file, that the rows of
            such a matrix become in equal parts.
        attention: The config -> whether each layer has attention; None: all have. Layers without have no heads of keys.
        gating: Name in gguf.ExpertGatingFuncType of what makes weights of experts, where a file has to say it.
        refuse: What of a config has no place in a file; a phrase, or None.
    """

    arch: str
    activation: str = "silu"
    pairs: bool = False
    unit_norms: bool = False
    plain_norms: tuple[str, ...] = ()
    layer_norm: bool = False
    fused_heads: str = ""
    alternating: str = ""
    window_period: int = 0
    window_layers: int | None = None
    mixture: bool = False
    without: tuple[str, ...] = ()
    whole_heads: bool = False
    details: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    inner: Callable[[Any], int] | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)
    splits: Callable[[Any], Mapping[str, tuple[str, ...]]] = lambda config: {}
    attention: Callable[[Any], Sequence[bool]] | None = None
    gating: str = ""
    refuse: Callable[[Any], str | None] = lambda config: None

    def row_order(self, name: str, config: Any) -> torch.Tensor | None:
        """Which row of the model's tensor each row in the file is; None where nothing moves."""
        leaf = name.rsplit(".", 2)[-2]
        if leaf == self.fused_heads:
            groups, size = kv_heads(config), head_size(config)
            rows = torch.arange((config.num_attention_heads + 2 * groups) * size).reshape(groups, -1, size)
            return torch.cat([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])
        if leaf == self.alternating:
            return torch.arange(2 * config.intermediate_size).reshape(-1, 2).t().reshape(-1)
        if not self.pairs or leaf not in ("q_proj", "k_proj"):
            return None
        heads, size = config.num_attention_heads if leaf == "q_proj" else kv_heads(config), head_size(config)
        # Halves of a head, one under the other, become neighbours.
        return torch.arange(heads * size).reshape(heads, 2, size // 2).transpose(1, 2).reshape(-1)

    def full_attention_period(self, config: Any) -> int:
        """`window_period`, where readers know windows in a model of so many layers."""
        return self.window_period if self.window_layers in (None, config.num_hidden_layers) else 0

    def adds_one(self, name: str) -> bool:
        """Return True where the file holds 1 + the tensor."""
        return self.unit_norms and name.endswith("norm.weight") and not name.endswith(self.plain_norms or ("/",))

    def change(self, name: str) -> Change | None:
        """Return the change of the values of a tensor; None where they stay."""
        return next((change for end, change in self.changes.items() if name.endswith(end)), None)

    def parts(self, name: str, config: Any) -> tuple[str, ...]:
        """Names in the file, within a block, of what a matrix is parted into; none where it is one tensor."""
        return next((parts for end, parts in self.splits(config).items() if name.endswith(end)), ())


def head_size(config: Any) -> int:
    """Values in an attention head of queries and keys."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Heads of keys and values."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.num_attention_heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return int(first_of(config, "num_key_value_heads", "num_kv_heads") or config.num_attention_heads)


def first_of(config: Any, *names: str) -> Any:
    """The first of some fields that a config has; None if it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def refuse_activation(architecture: Architecture, config: Any) -> str | None:
    """An activation that readers do not compute with; None if they do."""
    possible = ACTIVATIONS[architecture.activation]
    named = (getattr(config, name, None) for name in ACTIVATION_FIELDS)
    other = next((name for name in named if name is not None and name not in possible), None)
    return None if other is None else f"the activation {other}"


def refuse_fields(architecture: Architecture, config: Any) -> str | None:
    """A field that is set, or a size of heads, that readers know nothing of; None if there is none."""
    if architecture.whole_heads and head_size(config) * config.num_attention_heads != config.hidden_size:
        return "heads of other than hidden_size / num_attention_heads values"
    found = ((name, getattr(config, name, None)) for name in architecture.without)
    return next((f"{name}={value}" for name, value in found if value), None)


def sliding_window(config: Any) -> int | None:
    """Tokens that layers with a sliding window see; None where no layer has one."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or not getattr(config, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    return int(window)


def refuse_windows(architecture: Architecture, config: Any) -> str | None:
    """Layers with a sliding window other than those where readers have one; None if all are in their places."""
    period, kinds = architecture.full_attention_period(config), getattr(config, "layer_types", None)
    if not period:
        return None  # the context of the file ends where the window does
    expected = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(config.num_hidden_layers)]
    return None if kinds == expected else f"full attention in layers other than each {period}th"
