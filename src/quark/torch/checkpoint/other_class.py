"""A quantized folder in a model of another class than it was saved from: the text model of a composite, or no head.

    layer of the file  --(renamings of transformers)-->  layer of the model

What a config says by the name in the file is said by the name in the model, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quark.core.names.patterns import first_match, matches_any
from quark.torch.config.config import QConfig
from quark.torch.model.names import layers_in_model


def config_for(model: Any, config: QConfig, stored: Iterable[str]) -> QConfig:
    """The config of a folder for a model, which may be of another class than that of the folder.

    Args:
        model: On the meta device; its `config` is that of the folder, or of a part of it.
        config: As stored; its excludes are resolved names.
        stored: Names of the tensors in the files.
    """
    if type(model).__name__ in (getattr(model.config, "architectures", None) or ()):
        return config
    other = {layer: name for layer, name in _layers(model, stored) if layer != name}
    excluded = [name for layer, name in other.items() if _excludes(config.exclude, layer)]
    named = {}
    for layer, name in other.items():
        found = first_match(layer, config.layer_quant_config)
        if found is not None and first_match(name, config.layer_quant_config) is not found:
            named[name] = found
    return replace(
        config,
        exclude=list(dict.fromkeys((*config.exclude, *excluded))),
        layer_quant_config=_first(named, config.layer_quant_config),
    )


def _layers(model: Any, stored: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each layer of the files, and its name in the model."""
    find = layers_in_model(model)
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in stored):
        yield layer, find(layer)


def _excludes(exclude: Iterable[str], layer: str) -> bool:
    literal = {name for name in exclude if not re.search(r"[*?\[]|^re:", name)}
    return layer in literal or matches_any(layer, [name for name in exclude if name not in literal])


def _first(named: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Rules, of which the first that matches counts, behind those for single layers."""
    return {**named, **{key: value for key, value in rules.items() if key not in named}}
