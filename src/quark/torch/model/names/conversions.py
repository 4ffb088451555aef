"""What transformers knows of the names of a model: renamings and mergers, of its own list."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers', whose loader is known."""
    # It can only be one if this is loaded; nothing is imported for the question.
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def conversions(model: nn.Module, legacy: bool = False) -> list[Any]:
    """Transformers' conversions for a model of its own; none for any other module.

    With `legacy` also those of names that only old checkpoints have (LayerNorm.gamma).
    """
    mapping = sys.modules.get("transformers.conversion_mapping")
    if mapping is None or not is_transformers_model(model):
        return []
    found: list[Any] = mapping.get_model_conversion_mapping(model, add_legacy=legacy)
    return found


def renamed(name: str, renamings: Iterable[Any]) -> str:
    """A name after all renamings of transformers, one after another."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def expert_leaves(known: Sequence[Any], fused: str) -> tuple[str, ...]:
    """Leaf names of the linear layers of an expert that a fused tensor is merged from, in the order of its rows.

    Args:
        known: From `conversions`.
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
