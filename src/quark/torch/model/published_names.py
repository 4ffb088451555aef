"""How a published checkpoint calls the tensors of a transformers model, which since version 5 may call them otherwise.

transformers keeps a list of conversions for each model: renamings (`.block_sparse_moe.` of Mixtral is `.mlp.` in the
module) and mergers (`experts.*.w1.weight` and `experts.*.w3.weight` make `experts.gate_up_proj`). A quantized
checkpoint is written under the published names: those are what runtimes read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def source_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, by the renames that transformers itself applies when it loads."""
    core = sys.modules["transformers.core_model_loading"]
    renames = [rule for rule in conversions(model, legacy=True) if isinstance(rule, core.WeightRenaming)]
    own = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)
    return {core.rename_source_key(name, renames, [], prefix, own)[0]: name for name in stored}


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
    return lambda name: str(core.rename_source_key(name, renames, mergers, prefix, own)[0])


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
