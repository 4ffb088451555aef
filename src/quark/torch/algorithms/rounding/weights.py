"""What algorithms that solve weights share: which layers, their scales, and the solved weight written back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from quark.core.scales import QParams
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.rounding.grids import by_row
from quark.torch.calibration.calibrate import FROM_OWN_RANGE, sharing_scales, tensor_qparams
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode

SIDE_BY_SIDE = 1 << 18
"""Elements of small weights, those of experts, whose scales are searched at once."""


def weight_quantizer(layer: QuantLayer) -> FakeQuantize:
    """The quantizer of a layer's weight."""
    return cast(FakeQuantize, layer.quantizer("weight"))


def chosen_layers(group: InputGroup, block: Block, names: Sequence[str]) -> dict[str, QuantLayer]:
    """The layers that `inside_layer_modules` names (all, if it names none) and whose type has scales."""
    layers = {name: cast(QuantLayer, layer) for name, layer in group.layers.items()}
    return {
        name: layer
        for name, layer in layers.items()
        if (not names or name.removeprefix(f"{block.name}.") in names) and not weight_quantizer(layer).spec.is_cast
    }


def fix_scales(layers: Mapping[str, QuantLayer], block: Block, importance: Mapping[str, torch.Tensor]) -> None:
    """Find the scales of weights for which no algorithm before has chosen any.

    Where the spec asks for no statistic of its own, they are the scales that lose least under the `importance` of each
    layer, shape (in_features,); the range itself is among those tried.

    Raises:
        ConfigError: A weight was solved before.
    """
    searched: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        quantizer = weight_quantizer(layer)
        if quantizer.mode is Mode.frozen:
            raise ConfigError(f"{name} was solved by an algorithm before this one; name one solver in algo_config.")
        if quantizer.params is None:
            weight = cast(nn.Linear, layer).weight.detach()
            if quantizer.spec.observer in FROM_OWN_RANGE:
                searched.setdefault((quantizer.spec, weight.shape, weight.dtype), []).append(name)
            else:
                quantizer.store(tensor_qparams(weight, quantizer.spec))
            quantizer.mode = Mode.off
    for (spec, *_), names in searched.items():
        weights = [cast(nn.Linear, layers[name]).weight.detach() for name in names]
        found = _least_loss(weights, [importance[name] for name in names], spec)
        for name, params in zip(names, found, strict=True):
            weight_quantizer(layers[name]).store(params)
    specs = {name: weight_quantizer(layer).spec for name, layer in layers.items()}
    for members in sharing_scales(specs, block.shared_scale_groups):
        seconds = [cast(torch.Tensor, weight_quantizer(layers[name]).scale_2) for name in members]
        largest = QParams(torch.stack(seconds).amax(0))
        for name in members:
            weight = cast(nn.Linear, layers[name]).weight.detach()
            quantizer = weight_quantizer(layers[name])
            quantizer.store(weighted_qparams(weight, importance[name], quantizer.spec, largest))
            quantizer.mode = Mode.off


def _least_loss(
    weights: Sequence[torch.Tensor], importance: Sequence[torch.Tensor], spec: TensorSpec
) -> Iterator[QParams]:
    """`weighted_qparams` of weights of one shape; rows have scales of their own, so those of many may be one weight."""
    alone = not by_row(spec) or spec.scale_spec is not None or spec.code_spec is not None
    step = 1 if alone else max(1, SIDE_BY_SIDE // weights[0].numel())
    for start in range(0, len(weights), step):
        some, seen = weights[start : start + step], importance[start : start + step]
        if len(some) == 1:
            yield weighted_qparams(some[0], seen[0], spec)
            continue
        spread = torch.cat([one.expand(weight.shape) for one, weight in zip(seen, some, strict=True)])
        found, rows = weighted_qparams(torch.cat(list(some)), spread, spec), len(some[0])
        zeros: Any = [None] * len(some) if found.zero_point is None else torch.split(found.zero_point, rows)
        for scale, zero in zip(torch.split(found.scale, rows), zeros, strict=True):
            yield QParams(scale.clone(), None if zero is None else zero.clone())


def freeze_weight(layer: QuantLayer, weight: torch.Tensor, params: QParams) -> None:
    """Write a solved weight, whose values lie on the grid of `params`, into a layer."""
    parameter = cast(nn.Parameter, layer.weight)
    parameter.data.copy_(weight)
    quantizer = weight_quantizer(layer)
    quantizer.store(params)
    quantizer.mode = Mode.frozen
