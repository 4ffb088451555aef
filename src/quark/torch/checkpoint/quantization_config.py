"""What the config.json of a checkpoint says of a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from quark.core.spec import LayerSpec
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Folder
from quark.torch.layers.attention.cache_rules import feeds_cache
from quark.torch.layers.low_rank import branches, record_branches
from quark.torch.layers.online_rotation import record_rotations, rotated_inputs
from quark.torch.model.published_names import published_names
from quark.torch.plan import Plan


def folder_of(
    model: nn.Module,
    config: QConfig,
    plan: Plan,
    weight_format: str = REAL_QUANTIZED,
    pack_method: str = "reorder",
    beside: Iterable[str] = (),
) -> Folder:
    """What a `quantization_config` says of a model that was quantized by this plan.

    Args:
        model, config, plan: The model, what was asked for, and what that gave.
        weight_format, pack_method: As for `export_safetensors`.
        beside: Names of float tensors that lie in the files and are in no layer of the model: those of the layers that
            predict further tokens (mtp.*), for one.
    """
    specs, cache = {}, {}
    for name, spec in plan.layers.items():
        if spec.output is not None and feeds_cache(config, name):
            cache[name] = LayerSpec(output=spec.output)
            spec = replace(spec, output=None)
        if spec != LayerSpec():
            specs[name] = spec
    publish = published_names(model)
    # Readers take classes derived from Linear for quantized too (the output projection of torch's own attention).
    linear = (name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in plan.layers)
    unnamed = dict.fromkeys((*plan.to_exclude, *linear))
    published = {name: publish(name) for name in (*specs, *cache)}
    return Folder(
        specs,
        # As the module and as checkpoints call them.
        list(dict.fromkeys((*(form for name in unnamed for form in (name, publish(name))), *_layers_of(beside)))),
        config,
        record_branches(record_rotations(config.to_dict(), model), model),
        rotated_inputs(model),
        tuple(name for name, _ in branches(model)),
        cache,
        published,
        pack_method,
        weight_format,
    )


def _layers_of(tensors: Iterable[str]) -> list[str]:
    """The layers that have one of these tensors as their weight."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]


def quantization_config(
    model: nn.Module,
    config: QConfig,
    plan: Plan,
    weight_format: str,
    pack_method: str,
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """The `quantization_config` of a quark folder: the config with excludes resolved, what the user wrote beside it."""
    return FORMATS["quark"].describe(folder_of(model, config, plan, weight_format, pack_method, beside))
