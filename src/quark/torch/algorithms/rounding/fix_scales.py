"""Common steps of algorithms that solve weights: which layers, and the scales on which their weights are rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from quark.core.scales import QParams
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import TensorSpec, by_row
from quark.errors import ConfigError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import store_qparams, weight_quantizer, weight_spec
from quark.torch.calibration.calibrate import FROM_OWN_RANGE, sharing_scales, tensor_qparams
from quark.torch.calibration.distributed import shared_work
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import Mode

_SIDE_BY_SIDE = 1 << 18
"""Elements of small weights, those of experts, whose scales are searched at once."""
PIECE = 1 << 22
"""Elements of a large weight whose scales a CPU searches at once: the search has copies of them in float32."""


def chosen_layers(group: InputGroup, block: Block, names: Sequence[str]) -> dict[str, QuantLayer]:
    """The layers that `inside_layer_modules` names (all, if it names none) and whose type has scales."""
    layers = {}
    for name, module in group.layers.items():
        layer = cast(QuantLayer, module)
        named = not names or name.removeprefix(f"{block.name}.") in names
        if named and not weight_spec(layer).is_cast:
            layers[name] = layer
    return layers


def fix_scales(layers: Mapping[str, QuantLayer], block: Block, importance: Mapping[str, torch.Tensor]) -> None:
    """Find the scales of weights for which no algorithm before has chosen any.

    Where the spec asks for no statistic of its own, they are the scales that lose least under the `importance` of each
    layer, shape (in_features,); the range itself is among those tried.

    Raises:
        ConfigError: A weight was solved before.
    """
    searched: dict[Any, list[str]] = {}
    weights = {name: cast(nn.Linear, layer).weight.detach() for name, layer in layers.items()}
    specs = {name: weight_spec(layer) for name, layer in layers.items()}
    for name, layer in layers.items():
        if weight_quantizer(layer).mode is Mode.frozen:
            raise ConfigError(f"{name} was solved by an algorithm before this one; name one solver in algo_config.")
        if weight_quantizer(layer).params is not None:
            continue
        if specs[name].observer in FROM_OWN_RANGE:
            searched.setdefault((specs[name], weights[name].shape, weights[name].dtype), []).append(name)
        else:
            store_qparams(layer, tensor_qparams(weights[name], specs[name]))
    for (spec, *_), names in searched.items():
        best = _least_loss([weights[name] for name in names], [importance[name] for name in names], spec)
        for name, params in zip(names, best, strict=True):
            store_qparams(layers[name], params)
    for members in sharing_scales(specs, block.shared_scale_groups):
        seconds = [cast(torch.Tensor, weight_quantizer(layers[name]).scale_2) for name in members]
        largest = QParams(torch.stack(seconds).amax(0))
        for name in members:
            store_qparams(layers[name], weighted_qparams(weights[name], importance[name], specs[name], largest))


def _least_loss(
    weights: Sequence[torch.Tensor], importance: Sequence[torch.Tensor], spec: TensorSpec
) -> Iterator[QParams]:
    """`weighted_qparams` of weights of one shape; rows have scales of their own, so those of many may be one weight.

    Several processes take what is searched at once in turn.
    """
    alone = not by_row(spec) or spec.dtype.is_block or spec.scale_spec is not None or spec.code_spec is not None
    step = 1 if alone else max(1, _SIDE_BY_SIDE // weights[0].numel())
    whole = alone or weights[0].ndim != 2 or weights[0].device.type != "cpu"
    rows = len(weights[0]) if whole or step > 1 else max(1, PIECE // weights[0].shape[1])
    places = [(start, row) for start in range(0, len(weights), step) for row in range(0, len(weights[0]), rows)]

    def search(index: int) -> QParams:
        start, row = places[index]
        batch, weighing = weights[start : start + step], importance[start : start + step]
        if len(batch) == 1:
            return weighted_qparams(batch[0][row : row + rows], weighing[0], spec)
        of_elements = torch.cat([*map(torch.Tensor.expand_as, weighing, batch)])
        return weighted_qparams(torch.cat(list(batch)), of_elements, spec)

    found = shared_work(len(places), search, weights[0].device)
    for start in range(0, len(weights), step):
        parts = [next(found) for _ in range(0, len(weights[0]), rows)]
        yield from _apart(parts, len(weights[start : start + step]))


def _apart(parts: Sequence[QParams], count: int) -> Iterator[QParams]:
    """The scales of each of so many weights of one shape, from those of some rows, one after the other."""
    if len(parts) == count == 1:
        yield parts[0]
        return
    zeros = [params.zero_point for params in parts if params.zero_point is not None]
    scale, zero = torch.cat([params.scale for params in parts]), torch.cat(zeros) if zeros else None
    rows = len(scale) // count
    for own in (slice(start, start + rows) for start in range(0, len(scale), rows)):
        yield QParams(scale[own].clone(), None if zero is None else zero[own].clone())
