"""What the config.json of a checkpoint says of a quantized model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from quark.core.spec import LayerSpec
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Folder
from quark.torch.layers import ONLY_WHEN_NAMED, layer_class
from quark.torch.layers.attention import probability_quantizers
from quark.torch.layers.kv_cache import feeds_cache
from quark.torch.layers.online_rotation import input_rotations, record_rotations
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.passes import unconverted
from quark.torch.model.published_names import published_names
from quark.torch.model.roles import attention_modules, routers
from quark.torch.plan import chooser


def folder_of(
    model: nn.Module, config: QConfig, weight_format: str = REAL_QUANTIZED, pack_method: str = "reorder"
) -> Folder:
    """What a `quantization_config` says of a quantized model."""
    specs, cache = {}, {}
    for name, layer in quantized_layers(model).items():
        spec = layer.spec
        if spec.output is not None and feeds_cache(config, name):
            cache[name] = LayerSpec(output=spec.output)
            spec = replace(spec, output=None)
        if spec != LayerSpec():
            specs[name] = spec
    publish = published_names(model)
    published = {name: publish(name) for name in (*specs, *cache)}
    return Folder(
        specs,
        _excluded_names(model, config),
        config,
        record_rotations(config.to_dict(), model),
        tuple(name for name, _ in input_rotations(model)),
        cache,
        published,
        pack_method,
        weight_format,
    )


def quantization_config(model: nn.Module, config: QConfig, weight_format: str, pack_method: str) -> dict[str, Any]:
    """The `quantization_config` of a quark folder: the config with excludes resolved, what the user wrote beside it."""
    return FORMATS["quark"].describe(folder_of(model, config, weight_format, pack_method))


def _excluded_names(model: nn.Module, config: QConfig) -> list[str]:
    """Everything that stays in float and could be taken for quantized, as the module and as checkpoints call it."""
    publish = published_names(model)
    names = [
        name
        for name, module in model.named_modules()
        if layer_class(module) and not isinstance(module, ONLY_WHEN_NAMED)
    ]
    layers = quantized_layers(model)
    # Routers are linear layers in runtimes, whatever class transformers has for them.
    names += sorted(routers(model) - layers.keys() - set(names))
    # A layer without weights to quantize whose output feeds the cache is excluded and quantized at once.
    excludes = chooser(config, model).excludes
    names += [name for name in layers if excludes(name)]
    if config.softmax_quant_spec is not None:
        quantized = probability_quantizers(model)
        names += [name for name in attention_modules(model) if f"{name}.prob_output" not in quantized]
    names += unconverted(model)
    return list(dict.fromkeys(form for name in names for form in (name, publish(name))))
