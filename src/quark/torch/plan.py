"""Plan: module name -> LayerSpec. Made once from a config and a model, frozen, printed before any work is done."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from quark.core.patterns import first_match, matches, matches_any, require_matches
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, NotSupportedError, ShapeError
from quark.torch.config import QConfig, QLayerConfig
from quark.torch.layers import LAYERS, ONLY_WHEN_NAMED, QuantLayer, layer_class
from quark.torch.lowering import lower_layer
from quark.torch.structure import resolve_selectors

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Plan:
    """What happens to each layer of one model.

    Attributes:
        layers: Full module name -> spec, in the order of the model; only layers that change.
        excluded: Full names of the layers that could have been quantized and stay in float.
        unknown: Full names of layers derived from a supported class with a forward of their own; they stay in float.
    """

    layers: dict[str, LayerSpec]
    excluded: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    @property
    def needs_data(self) -> bool:
        """Whether activations must be calibrated."""
        return any(spec.needs_data for spec in self.layers.values())

    def bits(self, name: str) -> float | None:
        """Bits of a weight element of a layer, without its scales; None if it stays in float."""
        spec = self.layers.get(name)
        return spec.weight.dtype.bits if spec and spec.weight else None

    def table(self, model: nn.Module) -> Table:
        """The plan as a table: layers of equal shape and spec share a row."""
        # rich is imported when a table is really printed, not with the package.
        from rich.table import Table

        table = Table("layers", "count", "weight shape", "weight", "input", "output", title="Plan")
        rows: dict[tuple[str, ...], list[str]] = {}
        for name in [*self.layers, *self.excluded, *self.unknown]:
            spec = self.layers.get(name, LayerSpec())
            kept, shape = self.kept(name), self.weight_shape(model, name)
            key = (shape, *(str(t or kept) for t in (spec.weight, spec.input, spec.output)))
            rows.setdefault(key, []).append(name)
        for key, names in rows.items():
            shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1].rsplit('.', 1)[-1]}"
            table.add_row(shown, str(len(names)), *key)
        return table

    def weight_shape(self, model: nn.Module, name: str) -> str:
        """The shape of the weight of a layer, as the table shows it."""
        return str(tuple(cast(torch.Tensor, model.get_submodule(name).weight).shape))

    def kept(self, name: str) -> str:
        """What the table says of a tensor that is not quantized."""
        return "float (own forward)" if name in self.unknown else "float"


def make_plan(config: QConfig, model: nn.Module, strict: bool = True) -> Plan:
    """Decide what happens to each layer: exclude > layer_quant_config > layer_type_quant_config > global.

    Args:
        config: The user's config; it is not changed.
        model: The float model (any device, meta too).
        strict: Whether a pattern that matches nothing is an error. Loading a checkpoint is not strict: its names
            were resolved when it was written.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to quantize.
        ShapeError: A granularity does not fit a weight; names the layer.
    """
    candidates = {name: module for name, module in model.named_modules() if layer_class(module)}
    if any(isinstance(module, QuantLayer) for module in model.modules()):
        raise ConfigError("The model holds quantized layers already; quantize the float model.")
    patterns = [pattern for pattern in config.exclude if not pattern.startswith("@")]
    if strict:
        names = {name for name, _ in model.named_modules()}
        require_matches(patterns, names, "exclude")
        require_layers(patterns, names, candidates)
        _refuse_fused_experts(model, patterns)
        require_matches(config.layer_quant_config, candidates, "layer_quant_config")
        _require_types(config, candidates)
    selected = resolve_selectors((p for p in config.exclude if p.startswith("@")), model)
    layers, excluded = {}, []
    for name, module in candidates.items():
        chosen = None if name in selected or matches_any(name, patterns) else _layer_config(config, name, module)
        spec = lower_layer(chosen, per_token=isinstance(module, nn.Linear))
        if spec == LayerSpec():
            excluded.append(name)
            continue
        weight = cast(torch.Tensor, module.weight)
        check_shapes(name, type(module).__name__, tuple(weight.shape), getattr(module, "in_features", None), spec)
        layers[name] = spec
    unknown = tuple(
        name for name, module in model.named_modules() if isinstance(module, tuple(LAYERS)) and name not in candidates
    )
    if strict and not layers:
        kinds = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
        raise ConfigError(
            f"Nothing to quantize: of {len(candidates)} supported layers all are excluded or without a config. "
            f"The leaf modules of this model are {', '.join(kinds)}; supported: Linear, Conv2d, ConvTranspose2d, and "
            "Embedding, EmbeddingBag where a layer or type entry names them."
        )
    return Plan(layers, tuple(excluded), unknown)


def _layer_config(config: QConfig, name: str, module: nn.Module) -> QLayerConfig | None:
    by_name = first_match(name, config.layer_quant_config)
    if by_name is not None:
        return by_name
    for layer_type, by_type in config.layer_type_quant_config.items():
        if isinstance(module, layer_type):
            return by_type
    return None if isinstance(module, ONLY_WHEN_NAMED) else config.global_quant_config


def require_layers(patterns: list[str], names: set[str], candidates: Collection[str]) -> None:
    """Raise for an exclude pattern that names a block but none of the layers in it: it would exclude nothing."""
    for pattern in patterns:
        found = [name for name in names if matches(name, pattern)]
        inside = any(layer.startswith(f"{name}.") for name in found for layer in candidates)
        if inside and not any(name in candidates for name in found):
            raise ConfigError(
                f"exclude: {pattern!r} matches the module {found[0]!r} but none of the layers in it. "
                f"Possible: {pattern + '.*'!r}."
            )


def _refuse_fused_experts(model: nn.Module, patterns: list[str]) -> None:
    """Raise for experts held as one 3-D parameter, which no layer class here replaces, unless they are excluded."""
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and "expert" in f"{name}.{leaf}".lower() and not matches_any(name, patterns):
                raise NotSupportedError(
                    f"{name}.{leaf} of shape {tuple(parameter.shape)} holds fused experts, which this version cannot "
                    "quantize. Possible: keep them in float, with '*experts*' in the exclude list."
                )


def _require_types(config: QConfig, candidates: dict[str, nn.Module]) -> None:
    for layer_type in config.layer_type_quant_config:
        if not any(isinstance(module, layer_type) for module in candidates.values()):
            present = sorted({type(module).__name__ for module in candidates.values()})
            raise ConfigError(
                f"layer_type_quant_config: no quantizable layer is a {layer_type.__name__}. "
                f"Present: {', '.join(present) or 'none'}."
            )


def check_shapes(name: str, kind: str, weight: tuple[int, ...] | None, features: int | None, spec: LayerSpec) -> None:
    """Raise ShapeError, naming the layer, where a granularity does not fit its weight or its input features."""
    try:
        if spec.weight is not None and weight is not None:
            _fit(spec.weight, weight, "weight")
        if spec.input is not None and features is not None and spec.input.dynamic:
            _fit(spec.input, (1, features), "input")
    except ShapeError as error:
        raise ShapeError(f"Layer {name!r} ({kind}, weight {weight}): {error}") from None


def _fit(spec: TensorSpec, shape: tuple[int, ...], role: str) -> None:
    """Raise ShapeError, naming the tensor, when the granularity does not fit the shape."""
    try:
        spec.split.scale_shape(shape)
        if spec.code_spec is not None:
            spec.code_spec.split.scale_shape(shape)
    except ShapeError as error:
        raise ShapeError(f"{role}: {error}") from None
