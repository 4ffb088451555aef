"""Finds parts of a model by what they are, not by a table of architectures.

A selector ("@output_head") names such a part in an exclude list; it is resolved on the model at hand and, unlike a
pattern, may select nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from quark.errors import ConfigError, did_you_mean

ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "wg", "gate_network"})
NON_TEXT = re.compile(r"vision|visual|image|audio|speech|multi_modal_projector|mm_projector|patch_embed", re.I)


def output_head(model: nn.Module) -> set[str]:
    """The linear layer that gives logits: what `get_output_embeddings` names, else a bias-free or biased Linear at
    the top of the model whose rows count as many as an embedding's.
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is not None:
        return {name for name, module in model.named_modules() if module is head}
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        name
        for name, module in model.named_children()
        if isinstance(module, nn.Linear) and module.out_features in vocabularies
    }


def routers(model: nn.Module) -> set[str]:
    """Linear layers that choose experts: named like a gate, beside a child that holds experts."""
    found = set()
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if any("expert" in child for child in children):
            found |= {f"{name}.{child}".lstrip(".") for child in children if child in ROUTER_NAMES}
    return found


def non_text(model: nn.Module) -> set[str]:
    """Layers of vision and audio towers and of the projectors behind them."""
    return {name for name, module in model.named_modules() if NON_TEXT.search(name) and not list(module.children())}


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the text model that are called attention, the innermost where they are nested."""
    named = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Attention")}
    return {
        name: module
        for name, module in named.items()
        if not any(other.startswith(f"{name}.") for other in named) and not NON_TEXT.search(name)
    }


SELECTORS: dict[str, Callable[[nn.Module], set[str]]] = {
    "@output_head": output_head,
    "@router": routers,
    "@non_text": non_text,
}


def resolve_selectors(selectors: Iterable[str], model: nn.Module) -> set[str]:
    """Names of the modules that the selectors stand for."""
    found: set[str] = set()
    for selector in selectors:
        if selector not in SELECTORS:
            raise ConfigError(f"exclude: unknown selector {selector!r}. {did_you_mean(selector, SELECTORS)}")
        found |= SELECTORS[selector](model)
    return found


def tying_configs(model: nn.Module) -> list[Any]:
    """The transformers configs of a model that say whether embedding and head are tied."""
    config = getattr(model, "config", None)
    found = [config, getattr(config, "text_config", None)]
    return [item for item in found if getattr(item, "tie_word_embeddings", None) is not None]
