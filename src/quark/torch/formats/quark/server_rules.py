"""Rules by name as vLLM and SGLang read them: fnmatch on the names of published checkpoints, experts as one layer.

vLLM 0.33.0 (quark.py, get_layer_quant_config_from_name) takes the first pattern that matches, and one without "*" where
the name is a part of it; SGLang 0.5.23 (quark.py, _find_matched_config) the first by fnmatch. Neither knows "re:". Both
ask for the experts of a block at once, by the name of the block ("model.layers.0.block_sparse_moe.experts").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quark.core.names.patterns import first_match
from quark.torch.formats.format import Folder

EXPERT = re.compile(r"(?P<block>.*experts?)\.\d+\.[^.]+")
"""The name of a layer of an expert."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def with_server_rules(rules: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The rules, behind those that servers need to find the same for every layer.

    Args:
        rules: Pattern on names of modules -> what a layer gets; the first that matches counts.
        folder: What is quantized.
    """
    wanted = _wanted(rules, folder)
    missed = {name: rule for name, rule in wanted.items() if rule is not None and _found(name, rules) is not rule}
    modules = {name: first_match(name, rules) for name in folder.specs}
    added = {}
    for name, rule in missed.items():
        pattern = NUMBER.sub("*", name)
        alike = all(
            other is rule for known in (wanted, modules) for n, other in known.items() if fnmatchcase(n, pattern)
        )
        added[pattern if alike else name] = rule
    return {**added, **{pattern: rule for pattern, rule in rules.items() if pattern not in added}}


def _wanted(rules: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """Each name by which servers ask -> the rule of its layer; None where it has none.

    Experts of a block with several rules are asked for by their own names: a server refuses them.
    """
    wanted: dict[str, Any] = {}
    blocks: dict[str, dict[str, Any]] = {}
    for layer in folder.specs:
        rule = first_match(layer, rules)
        for name in folder.forms([layer])[1:] or [layer]:
            expert = EXPERT.fullmatch(name)
            (blocks.setdefault(expert["block"], {}) if expert else wanted)[name] = rule
    for block, experts in blocks.items():
        one, *others = experts.values()
        wanted |= {block: one} if all(rule is one for rule in others) else experts
    return wanted


def _found(name: str, rules: Mapping[str, Any]) -> Any:
    """The rule that both servers find; None where one of them finds none."""
    for pattern, rule in rules.items():
        if fnmatchcase(name, pattern):
            return rule if "*" in pattern or name in pattern else None
    return None
