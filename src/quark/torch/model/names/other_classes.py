"""The classes by which transformers loads one folder, beside that of the model: each has its own names for the layers.

AutoModelForCausalLM of a composite    its text model: model.language_model.layers.0 is model.layers.0
AutoModel                              without the head: model.layers.0 is layers.0
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from quark.base.libraries.transformers import classes_of, is_transformers_model
from quark.torch.model.meta_model import empty_model
from quark.torch.model.names.in_model import layers_in_model

LOADERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
"""The classes that people load a folder with."""


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
    if not is_transformers_model(model):
        return []
    seen: set[Any] = {type(model)}
    others: list[Any] = []
    for loader in LOADERS:
        for kind in classes_of(loader, model.config):
            if kind not in seen:
                seen.add(kind)
                # A class that cannot be built of this config loads no such folder.
                with suppress(ImportError, AttributeError, KeyError, TypeError, ValueError):
                    inside = model.config.sub_configs.get("text_config")
                    of_part = inside is not None and getattr(kind, "config_class", None) is inside
                    config = copy.deepcopy(model.config.get_text_config() if of_part else model.config)
                    config.__dict__.pop("quantization_config", None)
                    others.append(empty_model(kind, config, model.dtype))
    return others
