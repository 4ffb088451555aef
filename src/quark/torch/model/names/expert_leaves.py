"""The linear layers of an expert that transformers merges with those of others, by the names in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def expert_leaves(known: Sequence[Any], fused: str) -> tuple[str, ...]:
    """Leaf names of the linear layers of an expert that a fused tensor is merged from, in the order of its rows.

    Args:
        known: The conversions of the model.
        fused: Full name of the fused tensor.

    Example: ("w1", "w3") for `model.layers.0.mlp.experts.gate_up_proj` of Mixtral; empty where nothing is known.
    """
    for conversion in known:
        targets = [target.replace("\\", "") for target in conversion.target_patterns]
        if len(targets) != 1 or not fused.endswith(targets[0]) or not hasattr(conversion, "operations"):
            continue
        parts = [source.split(".") for source in conversion.source_patterns]
        if all(len(part) > 2 and part[-1] == "weight" and part[-3].endswith("*") for part in parts):
            return tuple(part[-2] for part in parts)
    return ()
