"""The `quark` format: the folder around the quark layout. It takes every spec.

vLLM and SGLang read rules by name: fnmatch on the names of published checkpoints, experts as one layer. vLLM 0.33.0
(quark.py, get_layer_quant_config_from_name) takes the first pattern that matches, and one without "*" where the name is
a part of it; SGLang 0.5.23 (quark.py, _find_matched_config) the first by fnmatch. Neither knows "re:". Both ask for the
experts of a block at once, by the name of the block ("model.layers.0.block_sparse_moe.experts").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from quark.__version__ import __version__
from quark.core.blocks.block_types import BlockType
from quark.core.names.patterns import first_match
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.formats.format import Folder, FolderFormat, Stored
from quark.torch.formats.quark.layout import QuarkLayout


class QuarkFormat(FolderFormat):
    """Folders with `quant_method` "quark": what transformers' quark integration, vLLM and SGLang read."""

    name = "quark"
    layout = QuarkLayout
    options = True
    cache = ("fp8_e4m3", "int8")
    cache_heads = True
    own_loader = True

    def refusal(self, spec: LayerSpec) -> str | None:
        if spec.weight is not None and isinstance(spec.weight.dtype, BlockType):
            return f"the block types of GGUF; here {spec.weight}"
        return None

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        """Everything that can be quantized can be stored, but the block types of GGUF."""
        for name, spec in folder.specs.items():
            if reason := self.refusal(spec):
                raise NotSupportedError(f"{name}: the quark format cannot hold {reason}. {self.possible()}")

    def describe(self, folder: Folder) -> dict[str, Any]:
        """The config with excludes resolved, and what the user wrote beside it."""
        config, stored = folder.config, folder.written
        # Readers look for the patterns of the cache among the layers, too.
        own = config.layer_type_quant_config.get(nn.Linear, config.global_quant_config)
        rules = stored["layer_quant_config"]
        caches = {
            pattern: replace(own, output_tensors=cache.output_tensors).to_dict()
            for pattern, cache in config.kv_cache_quant_config.items()
        }
        for pattern, cache_layer in caches.items():
            rules.setdefault(pattern, cache_layer)
        rules = with_server_rules(rules, folder)
        # vLLM refuses rules whose name a pattern of the cache matches and that do not say the same of it.
        stored["layer_quant_config"] = {
            name: {**rule, "output_tensors": cache["output_tensors"]}
            if (cache := first_match(name, caches)) is not None
            else rule
            for name, rule in rules.items()
        }
        patterns = stored["exclude"]
        return {
            "quant_method": "quark",
            "version": __version__,
            **stored,
            "exclude": folder.ignored,
            "exclude_patterns": patterns,
            "export": folder.export_block(),
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        export = stored.get("export") or {}
        return Stored(
            QConfig.from_dict(stored),
            export.get("pack_method", "reorder"),
            export.get("weight_format") or "real_quantized",
        )


# Rules as servers read them -------------------------------------------------------------------------------------------


EXPERT = re.compile(r"(?P<block>.*experts?)\.\d+\.[^.]+")
"""The name of a layer of an expert."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def with_server_rules(rules: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The rules, after those that servers need to find the same for every layer.

    Args:
        rules: Pattern on names of modules -> what a layer gets; the first that matches counts.
        folder: What is quantized.
    """
    wanted = _wanted(rules, folder)
    missed = {name: rule for name, rule in wanted.items() if rule is not None and _first_rule(name, rules) is not rule}
    modules = {name: _rule_of(name, rules, folder) for name in folder.specs}
    added = {}
    for name, rule in missed.items():
        pattern = NUMBER.sub("*", name)
        one_rule = all(
            other is rule for known in (wanted, modules) for n, other in known.items() if fnmatchcase(n, pattern)
        )
        added[pattern if one_rule else name] = rule
    return {**added, **{pattern: rule for pattern, rule in rules.items() if pattern not in added}}


def _wanted(rules: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """Each name by which servers ask -> the rule of its layer; None where it has none.

    Experts of a block with several rules are asked for by their own names: a server refuses them.
    """
    wanted: dict[str, Any] = {}
    blocks: dict[str, dict[str, Any]] = {}
    for layer in folder.specs:
        rule = _rule_of(layer, rules, folder)
        for name in folder.forms([layer])[1:] or [layer]:
            expert = EXPERT.fullmatch(name)
            (blocks.setdefault(expert["block"], {}) if expert else wanted)[name] = rule
    for block, experts in blocks.items():
        one, *others = experts.values()
        wanted |= {block: one} if all(rule is one for rule in others) else experts
    return wanted


def _rule_of(layer: str, rules: Mapping[str, Any], folder: Folder) -> Any:
    """The rule of a layer by its name, or by its class where that is not the rule of all; else None.

    Servers pass over rules by class: vLLM and SGLang ask for classes of their own.
    """
    found = first_match(layer, rules)
    if found is not None or layer not in folder.by_class:
        return found
    typed = folder.written["layer_type_quant_config"][folder.by_class[layer]]
    return None if typed == folder.written["global_quant_config"] else typed


def _first_rule(name: str, rules: Mapping[str, Any]) -> Any:
    """The rule that both servers find; None where one of them finds none."""
    for pattern, rule in rules.items():
        if fnmatchcase(name, pattern):
            return rule if "*" in pattern or name in pattern else None
    return None
