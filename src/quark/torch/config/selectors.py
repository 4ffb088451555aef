"""Selectors: "@output_head" in an exclude list stands for a part of the model, whatever its name.

A part is found by what it is, not by a table of architectures. Unlike a pattern, a selector may select nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn

from quark.core.names.patterns import matches
from quark.torch.config.families import PATTERNS
from quark.torch.diffusion.network import is_denoiser

_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "wg", "gate_network"})
NON_TEXT = re.compile(
    r"vision|visual|image|video|audio|speech|multi_modal_projector|mm_projector|patch_embed"
    r"|(^|\.)(connector|projector|merger)(\.|$)",  # between a tower and the text: SmolVLM, HyperCLOVA X, MiniCPM-V
    re.I,
)


def output_head(model: nn.Module) -> set[str]:
    """The linear layers that give the outputs: what `get_output_embeddings` names, else those outside the base model
    (of transformers: classifiers, projections), else a Linear at the top of the model whose rows count as many as an
    embedding's.
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is not None:
        return {name for name, module in model.named_modules() if module is head}
    base = getattr(model, "base_model", model)
    if base is not model:
        inside = set(base.modules())
        return {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m not in inside}
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
            found |= {f"{name}.{child}".lstrip(".") for child in children if child in _ROUTER_NAMES}
    return found


def non_text(model: nn.Module) -> set[str]:
    """Layers of vision and audio towers and of the projectors after them, in a model that writes text.

    In one that does not (a classifier of images, an encoder of both, a denoiser) they are the model.
    """
    writes = getattr(model, "can_generate", lambda: True)
    if not writes() or is_denoiser(type(model)):
        return set()
    # What the whole model is called (`speecht5.`) says nothing of its parts.
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    leaves = (name for name, module in model.named_modules() if not list(module.children()))
    return {name for name in leaves if NON_TEXT.search(name.removeprefix(prefix))}


def outside_blocks(model: nn.Module) -> set[str]:
    """Of a denoiser, the layers before and after its blocks: they read noise, timestep and text, and make the output.

    They are few, run once a step, and what they lose reaches all others. Blocks are what stands in a ModuleList.
    """
    if not is_denoiser(type(model)):
        return set()
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    outside = {name for name in leaves if not name.startswith(lists)}
    return outside if outside != leaves else set()


SELECTORS: dict[str, Callable[[nn.Module], set[str]]] = {
    "@output_head": output_head,
    "@router": routers,
    "@non_text": non_text,
    "@outside_blocks": outside_blocks,
}


def patterns_of(exclude: Iterable[str]) -> list[str]:
    """The patterns of an exclude list, without its selectors."""
    return [entry for entry in exclude if not entry.startswith("@")]


ROLES = {
    "@output_head": re.compile(r"(lm_)?head|output_layer"),
    "@router": re.compile(r"gate$|gate\*$|router"),
    "@non_text": NON_TEXT,
}
"""Selector -> what patterns of the documented templates say it by."""


def required_patterns(exclude: Iterable[str]) -> list[str]:
    """The patterns that have to match something: all but those of the documented templates."""
    return [pattern for pattern in patterns_of(exclude) if pattern not in PATTERNS]


def resolved_names(exclude: Iterable[str], model: nn.Module) -> list[str]:
    """An exclude list of a checkpoint, whose names are those of layers and stand for no selector, for one model.

    One that this class does not have, as `lm_head` of a model without a head, says nothing of its other layers.
    """
    names = [name for name, _ in model.named_modules()]
    return [entry for entry in exclude if entry not in PATTERNS or any(matches(name, entry) for name in names)]


def selected_names(exclude: Iterable[str], model: nn.Module) -> set[str]:
    """Names of the modules that the selectors of an exclude list stand for, and the documented patterns that match
    nothing: a model may call its head otherwise.
    """
    names = [name for name, _ in model.named_modules()]
    chosen = {entry for entry in exclude if entry.startswith("@")}
    for pattern in PATTERNS.intersection(exclude):
        if not any(matches(name, pattern) for name in names):
            chosen |= {selector for selector, said in ROLES.items() if said.search(pattern)}
    return {name for entry in chosen for name in SELECTORS[entry](model)}
