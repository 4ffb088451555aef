"""From the file to the module: which tensor of a model one of a checkpoint becomes, in any class that loads it.

    name in the file  --(renamings, then mergers of transformers)-->  tensor of the class

The way back is that of a published checkpoint. What the loader of a class finds of a folder is known from the names in
the files alone; what is left out, a checkpoint holds and no class builds (layers of further tokens, buffers).

Beside the class of the model, others load one folder, and each has its own names for the layers:

AutoModelForCausalLM of a composite    its text model: model.language_model.layers.0 is model.layers.0
AutoModel                              without the head: model.layers.0 is layers.0
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from quark.torch.model.meta_model import empty_model
from quark.torch.model.names.conversions import conversions, is_transformers_model


def source_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, by the renames that transformers itself applies when it loads."""
    core = sys.modules["transformers.core_model_loading"]
    renames = [rule for rule in conversions(model, legacy=True) if isinstance(rule, core.WeightRenaming)]
    own = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)
    return {_renamed(name, core.rename_source_key(name, renames, [], prefix, own)[0], own): name for name in stored}


def _renamed(stored: str, renamed: str, own: Mapping[str, Any]) -> str:
    """What the loader of transformers makes of its renaming: a name that the model has stays where that misses.

    DeepSeek V4 is such a case: its renaming of `.norm.` inside attention is also one of `model.norm.weight`.
    """
    return stored if renamed not in own and stored in own else renamed


def loaded_as(model: Any, own: Mapping[str, Any]) -> Callable[[str], str]:
    """The function from the name of a tensor in a checkpoint to the name of the one that transformers loads it into.

    Args:
        model: Of the class that loads.
        own: Its state dict.
    """
    known, core = conversions(model, legacy=True), sys.modules.get("transformers.core_model_loading")
    if core is None or not known:
        return lambda name: name
    renames = [rule for rule in known if isinstance(rule, core.WeightRenaming)]
    mergers = [rule for rule in known if isinstance(rule, core.WeightConverter)]
    prefix = getattr(model, "base_model_prefix", None)
    return lambda name: _renamed(name, str(core.rename_source_key(name, renames, mergers, prefix, own)[0]), own)


def names_in(model: Any) -> Callable[[str], str]:
    """The function from the name of a tensor in a checkpoint to that in a model, of any class that loads it.

    As transformers renames, but that merges nothing: experts keep their numbers. So a text model finds what a composite
    has as `model.language_model.*`, and a model without a head what one with a head has as `model.*`.
    """
    known, core = conversions(model, legacy=True), sys.modules.get("transformers.core_model_loading")
    renames = [rule for rule in known if core is not None and isinstance(rule, core.WeightRenaming)]
    prefix = getattr(model, "base_model_prefix", "") or ""
    roots = {name.partition(".")[0] for name, _ in model.named_modules() if name}

    def find(name: str) -> str:
        out: str = core.apply_renamings(name, renames) if core is not None and renames else name
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
    publish, known = published_names(model), conversions(model)
    renamed = [name for name in names if (publish(name) if stored is None else stored.get(name, name)) != name]
    if not renamed:
        return set()
    core = sys.modules["transformers.core_model_loading"]
    converters = [c for c in known if isinstance(c, core.WeightConverter)]
    return {name for name in renamed if core.apply_converters(name, converters)[1] is not None}


# Published ------------------------------------------------------------------------------------------------------------


def published_names(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a tensor in the module to its name in a checkpoint.

    A name that transformers' renamings would not bring back keeps the module's form.
    """
    core = sys.modules.get("transformers.core_model_loading")
    known = conversions(model)
    if core is None or not known:
        return lambda name: name
    renamings = [c for c in known if isinstance(c, core.WeightRenaming) and not isinstance(c, core.PrefixChange)]
    reverse = [renaming.reverse_transform() for renaming in reversed(renamings)]

    def publish(name: str) -> str:
        out: str = core.apply_renamings(name, reverse)
        return out if core.apply_renamings(out, renamings) == name else name

    return publish


def layers_published(model: nn.Module) -> Callable[[str], str]:
    """The function from the name of a layer to that in a checkpoint; see `published_names`."""
    publish = published_names(model)
    return lambda layer: publish(f"{layer}.weight").removesuffix(".weight")


# What a reader finds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a class finds.

    Attributes:
        places: Name in the file -> name in the class.
        lost: Names in the file for which the class has no place; its loader leaves them out.
        missing: Tensors of the class for which there is nothing in the file; its loader makes them up.
    """

    places: dict[str, str]
    lost: list[str]
    missing: list[str]


def found_by(twin: Any, stored: Iterable[str]) -> Found:
    """What transformers' loader finds of a float folder with these names.

    Args:
        twin: An empty model of the class that loads.
        stored: Names of the tensors in the files.
    """
    own = dict(twin.state_dict())
    target = loaded_as(twin, own)
    places = {name: target(name) for name in stored}
    there = set(places.values())
    ties = getattr(twin, "all_tied_weights_keys", None) or {}
    there |= {one for pair in ties.items() if there.intersection(pair) for one in pair}
    optional = getattr(twin, "_keys_to_ignore_on_load_missing", None) or []
    missing = sorted(name for name in own if name not in there and not any(re.search(p, name) for p in optional))
    return Found(places, sorted(name for name, to in places.items() if to not in own), missing)


# What is left out -----------------------------------------------------------------------------------------------------


def dropped_names(model: Any, stored: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint that the transformers class leaves out by design (mtp.*, for one), or computes itself.

    The second are the buffers of old checkpoints that transformers ignores whatever the class says.
    """
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    buffers = [name for name, _ in model.named_buffers()]
    computed = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    patterns += [pattern for pattern, end in computed.items() if any(name.endswith(end) for name in buffers)]
    patterns += _of_further_tokens(model)
    found = [name for name in stored if any(re.search(p, name) for p in patterns)]
    return _without_own(model, found) if found else []


FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields of configs that count the layers that predict further tokens: of DeepSeek, GLM and Kimi, of MiniMax, of
Qwen 3.5, of MiMo. DeepSeek and those after it number these layers on behind the last of the model."""


def _of_further_tokens(model: Any) -> list[str]:
    """Patterns of the tensors of layers that predict further tokens (MTP), which no class of transformers builds."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    counts = [getattr(part, field, None) for field in FURTHER_TOKENS for part in (text, config)]
    more = max((count for count in counts if isinstance(count, int)), default=0)
    numbers = "|".join(str(layers + index) for index in range(more)) if isinstance(layers, int) else ""
    return [r"(^|\.)mtp(_\w+)?\.", *([rf"(^|\.)layers\.({numbers})\."] if numbers else [])]


def _without_own(model: Any, stored: Sequence[str]) -> list[str]:
    """The names that no tensor of a model is loaded from.

    A part of a model may leave out what is another part's, by the name of that part in files: of Tipsv2 the text model
    leaves out the vision model, and the other way round, and the patterns of both are those of the whole.
    """
    own = model.state_dict()
    target = loaded_as(model, own)
    return [name for name in stored if target(name) not in own]


# Other classes --------------------------------------------------------------------------------------------------------


LOADERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
"""What people load a folder with."""


def names_elsewhere(model: nn.Module) -> Callable[[str], tuple[str, ...]]:
    """The function from the name of a layer in checkpoints to its names in other classes, where it has others there.

    Args:
        model: Of transformers; of any other module there are no other classes.
    """
    finders = [layers_in_model(meta) for meta in models_of_other_classes(model)]
    own = {name for name, _ in model.named_modules()}

    def names(layer: str) -> tuple[str, ...]:
        found = dict.fromkeys(find(layer) for find in finders)
        # A name that is another layer's here would be taken for that.
        return tuple(name for name in found if name != layer and name not in own)

    return names


def models_of_other_classes(model: Any) -> list[Any]:
    """An empty model of each other class that one of LOADERS takes for the config of a model."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not is_transformers_model(model):
        return []
    seen: set[Any] = {type(model)}
    others: list[Any] = []
    for loader in LOADERS:
        found = getattr(transformers, loader)._model_mapping.get(type(model.config), ())
        for kind in found if isinstance(found, tuple) else (found,):
            if kind not in seen:
                seen.add(kind)
                # A class that cannot be built of this config loads no such folder.
                with suppress(ImportError, AttributeError, KeyError, TypeError, ValueError):
                    others.append(empty_model(kind, _config_for(kind, model.config), model.dtype))
    return others


def _config_for(kind: Any, config: Any) -> Any:
    """What transformers gives to a class: the config of the folder, or of the text model in it."""
    inside = config.sub_configs.get("text_config")
    part = inside is not None and getattr(kind, "config_class", None) is inside
    out = copy.deepcopy(config.get_text_config() if part else config)
    out.__dict__.pop("quantization_config", None)
    return out
