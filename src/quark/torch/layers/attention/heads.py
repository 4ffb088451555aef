"""A scale for each head of what a cache stores, and how many heads that is, known from the module without a forward.

keys, values    (batch, heads, tokens, size of a head)      scale (heads,)
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

COUNTS = ("num_key_value_heads", "num_heads", "num_attention_heads")
"""The names of attention modules and configs for the number of heads, that of keys and values first."""
_QUERIES = ("num_attention_heads", "num_heads")


def holds(name: str) -> str:
    """Return the part of the cache that a layer of this name makes: "k", "v", or "kv" where one layer makes both."""
    leaf = re.sub(r"proj|query", "", name.rpartition(".")[2].lower())
    key, value = "k" in leaf, "v" in leaf
    return "kv" if key == value else "k" if key else "v"


def is_latent(owner: nn.Module, name: str, config: Any = None) -> bool:
    """Return True where a layer makes keys and values from another layer of its module: a cache holds its input then.

    Args:
        owner: The attention module.
        name: Of the layer, in the module.
        config: Of the text model, where the module has none.
    """
    width = _first(("hidden_size",), getattr(owner, "config", None) or config, owner)
    return holds(name.partition(".")[0]) == "kv" and getattr(owner.get_submodule(name), "in_features", None) != width


def stored_heads(owner: nn.Module, name: str, config: Any) -> int | None:
    """How many heads a cache stores of what a layer makes; None where the module does not say it.

    Args:
        owner: The attention module.
        name: Of the layer, in the module.
        config: Of the text model, where the module has none.
    """
    config = getattr(owner, "config", None) or config
    layer, parts = owner.get_submodule(name), holds(name.partition(".")[0])
    rows = getattr(layer, "out_features", 0)
    queries, width = _first(_QUERIES, owner, config), _first(("hidden_size",), config)
    size = _first(("head_dim",), owner, config) or (width // queries if queries and width else None)
    if not rows or size is None or is_latent(owner, name, config):
        return None
    if parts == "v":
        size = _first(("v_head_dim",), owner) or size
    # Configs may have a number of heads that the class does not read; what fits the layer is meant.
    for count in (*_numbers(COUNTS, owner, config), 1):
        # One layer makes both, with or without queries.
        made = [queries + 2 * count, 2 * count] if parts == "kv" and queries else [count]
        if rows in [n * size for n in made]:
            return count
    return None


def _first(names: tuple[str, ...], *places: Any) -> int | None:
    return next(iter(_numbers(names, *places)), None)


def _numbers(names: tuple[str, ...], *places: Any) -> list[int]:
    """The positive numbers that objects have under some names."""
    found = [_attribute_of(place, name) for name in names for place in places]
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0]


def _attribute_of(place: Any, name: str) -> Any:
    """Return the attribute of an object under a name; None also where its layers differ, of which configs of
    transformers tell by an error of their own.
    """
    try:
        return getattr(place, name, None)
    except RuntimeError:
        return None
