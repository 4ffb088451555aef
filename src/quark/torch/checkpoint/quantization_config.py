"""The part of the config.json of a checkpoint about a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from quark.core.spec import LayerSpec
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.config.selectors import output_head
from quark.torch.formats import FORMATS, Folder
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_rules import feeds_cache
from quark.torch.layers.low_rank import branches, record_branches
from quark.torch.layers.online_rotation import record_rotations, rotated_inputs
from quark.torch.model.names import layers_published, names_elsewhere
from quark.torch.model.passes import UnfusedExperts
from quark.torch.model.passes.unfuse_experts import fused_blocks, layer_names
from quark.torch.plan import Plan


def folder_of(
    model: nn.Module,
    config: QConfig,
    plan: Plan,
    weight_format: str = REAL_QUANTIZED,
    pack_method: str = "reorder",
    beside: Iterable[str] = (),
    everywhere: bool = False,
    solved: bool = True,
) -> Folder:
    """Return the folder of a model that was quantized by this plan, as its `quantization_config` describes it.

    Args:
        model, config, plan: The model, what was asked for, and what that gave.
        weight_format, pack_method: As for `export_safetensors`.
        beside: Names of float tensors that lie in the files and are in no layer of the model: those of the layers that
            predict further tokens (mtp.*), for one.
        everywhere: Also name layers as other classes that load the folder call them: for readers that know the names
            of the model alone that they build.
        solved: Whether the algorithms have run; else branches that they will add are foreseen.
    """
    specs, cache = _without_caches(config, plan)
    specs |= plan.beside
    known = _KnownNames(model, everywhere)
    fused = (layer for name, leaves in fused_blocks(model).items() for layer in layer_names(model, name, leaves))
    heads = output_head(model)
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return Folder(
        specs,
        _ignored(model, plan, known, beside),
        config,
        record_branches(record_rotations(config.to_dict(), model), model),
        rotated_inputs(model),
        _branched(model, config, specs, solved),
        cache,
        {name: known.forms(name) for name in (*specs, *cache)},
        _experts(model),
        tuple(map(known.publish, fused)),
        tuple(name for name in specs if name in heads),
        tuple(name for name in embeddings if name in specs),
        tuple(form for name in embeddings if name not in specs for form in known.forms(name)),
        _by_class(model, config, specs),
        pack_method,
        weight_format,
    )


def _branched(model: nn.Module, config: QConfig, layers: Iterable[str], solved: bool) -> tuple[str, ...]:
    """The layers with a low-rank branch; before the algorithms have run, one where some will have one."""
    if not solved and any(isinstance(algorithm, SVDQuantConfig) for algorithm in config.algo_config or []):
        return tuple(layers)[:1]
    return tuple(name for name, _ in branches(model))


def _by_class(model: nn.Module, config: QConfig, layers: Iterable[str]) -> dict[str, str]:
    """The layers that a rule of their class is for, unless one by name is -> the class of the rule."""
    if not config.layer_type_quant_config:
        return {}
    modules = dict(model.named_modules())
    found = ((name, kind) for name in layers for kind in config.layer_type_quant_config if name in modules)
    of_class = [(name, kind.__name__) for name, kind in found if isinstance(modules[name], kind)]
    return dict(reversed(of_class))  # the first rule counts


def _without_caches(config: QConfig, plan: Plan) -> tuple[dict[str, LayerSpec], dict[str, LayerSpec]]:
    """The specs of the layers without outputs that are the KV cache, and these outputs."""
    specs, cache = {}, {}
    for name, spec in plan.layers.items():
        if spec.output is not None and feeds_cache(config, name):
            cache[name] = LayerSpec(output=spec.output)
            spec = replace(spec, output=None)
        if spec != LayerSpec():
            specs[name] = spec
    return specs, cache


class _KnownNames:
    """How readers know the layers of a model.

    Args:
        model: The model.
        everywhere: Also as other classes that load the folder call them.
    """

    def __init__(self, model: nn.Module, everywhere: bool) -> None:
        self.publish = layers_published(model)
        self.elsewhere = names_elsewhere(model) if everywhere else lambda layer: ()

    def forms(self, name: str) -> tuple[str, ...]:
        """All names of a layer, the module's first."""
        published = self.publish(name)
        return tuple(dict.fromkeys((name, published, *self.elsewhere(published))))


def _ignored(model: nn.Module, plan: Plan, known: _KnownNames, beside: Iterable[str]) -> list[str]:
    """The names of what stays in float, and of what readers would take for quantized."""
    # Such are classes derived from Linear, too (the output projection of torch's own attention).
    linear = (name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in plan.layers)
    inside = [form for name in dict.fromkeys((*plan.to_exclude, *linear)) for form in known.forms(name)]
    layers = [name.removesuffix(".weight") for name in beside if name.endswith(".weight")]
    layers = [name for name in layers if name not in plan.beside]
    outside = [form for name in layers for form in (name, *known.elsewhere(name))]
    return list(dict.fromkeys((*inside, *outside)))


def _experts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The blocks of experts that were taken apart, and the layers in them, quantized or not."""
    blocks = [name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)]
    return {
        block: tuple(
            f"{block}.{leaf}"
            for leaf, layer in model.get_submodule(block).named_modules()
            if isinstance(layer, (nn.Linear, QuantLayer))
        )
        for block in blocks
    }


def quantization_config(model: nn.Module, config: QConfig, plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of a quark folder: the config with excludes resolved, what the user wrote beside it."""
    return FORMATS["quark"].describe(folder_of(model, config, plan))
