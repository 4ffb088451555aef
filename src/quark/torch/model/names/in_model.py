"""From the file to the module: which tensor of a model one of a checkpoint becomes, in any class that loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quark.base.libraries.transformers import Rules, conversions, merged_as, mergers, name_in_model, renamed, renamings
from quark.torch.model.names.published import published_names


def source_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, by the renames that transformers itself applies when it loads."""
    rules: Rules = renamings(conversions(model, legacy=True)), []
    own = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)
    return {_renamed(name, name_in_model(name, rules, prefix, own)[0], own): name for name in stored}


def _renamed(stored: str, renamed: str, own: Mapping[str, Any]) -> str:
    """Return the name that the loader of transformers looks for: one of the model stays where its renaming misses.

    DeepSeek V4 is such a case: its renaming of `.norm.` inside attention is also one of `model.norm.weight`.
    """
    return stored if renamed not in own and stored in own else renamed


def loaded_as(model: Any, own: Mapping[str, Any]) -> Callable[[str], str]:
    """The function from the name of a tensor in a checkpoint to the name of the one that transformers loads it into.

    Args:
        model: Of the class that loads.
        own: Its state dict.
    """
    known = conversions(model, legacy=True)
    if not known:
        return lambda name: name
    rules, prefix = (renamings(known), mergers(known)), getattr(model, "base_model_prefix", None)
    return lambda name: _renamed(name, name_in_model(name, rules, prefix, own)[0], own)


@dataclass(frozen=True)
class Converted:
    """A tensor of a checkpoint that transformers converts when it loads it.

    Attributes:
        first: The name by which the parts of one conversion are known to belong together.
        targets: Names of the tensors of the model that they become.
        rule: The conversion.
        pattern: That of its sources which the tensor is.
    """

    first: str
    targets: tuple[str, ...]
    rule: Any
    pattern: str


def converted_as(model: Any, own: Mapping[str, Any]) -> Callable[[str], Converted | None]:
    """The function from the name of a tensor in a checkpoint to what transformers converts it to, in a model.

    None for a tensor that it takes as it is, or makes nothing of that the model has.

    Args:
        model: Of the class that loads.
        own: Its state dict.
    """
    known = conversions(model, legacy=True)
    if not known:
        return lambda name: None
    rules = renamings(known), mergers(known)
    by_pattern = {pattern: rule for rule in rules[1] for pattern in rule.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)

    def convert(name: str) -> Converted | None:
        first, pattern = name_in_model(name, rules, prefix, own)
        if pattern is None:
            return None
        rule = by_pattern[pattern]
        names = (first.replace(rule.target_patterns[0], target) for target in rule.target_patterns)
        targets = tuple(target for target in names if target in own)
        return Converted(first, targets, rule, pattern) if targets else None

    return convert


def loaded_into(model: Any, own: Mapping[str, Any]) -> Callable[[str], tuple[str, ...]]:
    """The function from the name of a tensor in a checkpoint to those of all that transformers loads it into.

    Args:
        model, own: As for `loaded_as`.
    """
    target, convert = loaded_as(model, own), converted_as(model, own)

    def find(name: str) -> tuple[str, ...]:
        made = convert(name)
        return (target(name),) if made is None else made.targets

    return find


def names_in(model: Any) -> Callable[[str], str]:
    """The function from the name of a tensor in a checkpoint to that in a model, of any class that loads it.

    As transformers renames, but that merges nothing: experts keep their numbers. So a text model finds what a composite
    has as `model.language_model.*`, and a model without a head what one with a head has as `model.*`.
    """
    renames = renamings(conversions(model, legacy=True))
    prefix = getattr(model, "base_model_prefix", "") or ""
    roots = {name.partition(".")[0] for name, _ in model.named_modules() if name}

    def find(name: str) -> str:
        out = renamed(name, renames)
        first = out.partition(".")[0]
        if not prefix or first in roots:
            return out
        return f"{prefix}.{out}" if prefix in roots else out.removeprefix(f"{prefix}.")

    return find


def layers_in_model(model: Any) -> Callable[[str], str]:
    """The function from the name of a layer in a checkpoint to that in a model; see `names_in`."""
    find = names_in(model)
    return lambda layer: find(f"{layer}.weight").removesuffix(".weight")


def merged_names(model: nn.Module, names: Iterable[str], stored: Mapping[str, str] | None = None) -> set[str]:
    """The names of a module's tensors that transformers merges with others when it loads a checkpoint.

    It does not where the name in the file is the module's own: such a tensor is taken as it is.

    Args:
        model: The module.
        names: In it.
        stored: Name in the module -> name in the file; None: the published ones.
    """
    publish = published_names(model)
    renamed = [name for name in names if (publish(name) if stored is None else stored.get(name, name)) != name]
    if not renamed:
        return set()
    converters = mergers(conversions(model))
    return {name for name in renamed if merged_as(name, converters)[1] is not None}
