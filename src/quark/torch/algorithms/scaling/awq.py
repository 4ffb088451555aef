"""AWQ: scales that protect the weights that matter, then the step of each group of weights.

The algebra is in `core/solvers/smooth.py`: every candidate is scored by the second moments of the input, which is
exact, so the block runs once. Scales are kept where they pay; then the ranges of the weights' groups ("clipping") are
chosen together, in place of a grid for each group alone, and stored with the layer's weight quantizer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch

from quark.core.array import dtype_name
from quark.core.checks import naming
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import fake_quantize, quantize_scales, range_of
from quark.core.scales import QParams, qparams_from_range
from quark.core.solvers import smooth
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.layer_weights import float_weight, store_qparams, weight_quantizer, weight_spec
from quark.torch.algorithms.scaling.base import Folding, InputStatistics, relative
from quark.torch.algorithms.scaling.fold import Fold
from quark.torch.calibration.calibrate import share_scales, tensor_qparams
from quark.torch.layers import QuantLayer

ROWS = 512
"""Rows of a weight on which scales are compared, evenly taken."""


class AWQ(Folding):
    """AWQ (Lin et al. 2023); see `AWQConfig`."""

    needs = ("gram", "mean_abs")
    waiting: dict[tuple[str, ...], torch.Tensor]
    """Layers that read one tensor, whose steps are still to be chosen -> second moments of their input."""

    def enter(self, block: Block) -> None:
        self.waiting = {}
        super().enter(block)

    def _find_folds(self, block: Block) -> list[Fold]:
        folds = super()._find_folds(block)
        if self.config.scaling_layers:
            return folds
        # Rows of very different sizes under one scale lose more than the readers gain.
        modules = [block.module.get_submodule(fold.producer) for fold in folds]
        specs = [module.spec.weight if isinstance(module, QuantLayer) else None for module in modules]
        one_range = [spec is not None and isinstance(spec.split, PerTensor) and not spec.is_cast for spec in specs]
        return [fold for fold, whole in zip(folds, one_range, strict=True) if not whole]

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        gram = group.gram
        s = self.fold_at(group, block)
        self.waiting[tuple(group.layers)] = gram if s is None else gram / s / s.unsqueeze(-1)
        self._choose_ready_steps(block)

    def leave(self, block: Block) -> None:
        self.folds = {}
        self._choose_ready_steps(block)

    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        assert statistics.gram is not None and statistics.mean_abs is not None
        weights = [float_weight(layer) for layer in layers.values()]
        weights = [  # of those whose rows share no ranges about ROWS rows
            weight[:: -(-len(weight) // ROWS)] if _groups(layer) else weight
            for weight, layer in zip(weights, layers.values(), strict=True)
        ]
        rounders = [partial(fake_quantize, params=None, spec=weight_spec(layer)) for layer in layers.values()]
        mean_abs = fold.shared(statistics.mean_abs, "mean")
        return smooth.best_scale(weights, rounders, statistics.gram, mean_abs, fold.feasible)

    def _choose_ready_steps(self, block: Block) -> None:
        """Choose the steps of the layers that no fold to come will change."""
        pending = {block.full(fold.producer) for fold in self.folds.values()}
        for names in [names for names in self.waiting if not pending & set(names)]:
            _choose_steps({name: block.layer(relative(name, block)) for name in names}, self.waiting.pop(names), block)


def _choose_steps(layers: dict[str, QuantLayer], gram: torch.Tensor, block: Block) -> None:
    """Store the weight scales of layers that read one tensor, those of a second level shared as the plan says."""
    layers = {
        name: layer for name, layer in layers.items() if _groups(layer) and weight_quantizer(layer).params is None
    }
    for name, layer in layers.items():
        with naming(f"{name}.weight"):
            store_qparams(layer, tensor_qparams(float_weight(layer), weight_spec(layer)))
    share_scales(layers, block.shared_scale_groups)
    for layer in layers.values():
        store_qparams(layer, stepped(layer, gram))


def stepped(layer: QuantLayer, gram: torch.Tensor) -> QParams:
    """Scales of a layer's weight whose ranges are chosen by the second moments of its input."""
    weight, spec = float_weight(layer), weight_spec(layer)
    low, high = range_of(weight, spec)
    second = cast(QParams, weight_quantizer(layer).params).second
    groups, dtype = _groups(layer), dtype_name(layer.weight)

    def params(factors: torch.Tensor, rows: slice) -> QParams:
        shape = low[rows].shape
        first = replace(spec, scale_spec=None)
        ranged = qparams_from_range(low[rows] * factors.view(shape), high[rows] * factors.view(shape), first, dtype)
        return quantize_scales(ranged, second, spec)

    return params(smooth.best_steps(weight, gram.to(weight.device), params, spec, groups), slice(None))


def _groups(layer: QuantLayer) -> int:
    """Ranges in a row of the weight; 0 where a range spans rows or the codes are quantized once more."""
    spec = weight_spec(layer)
    split, width = spec.split, cast(torch.Tensor, layer.weight).shape[1]
    if spec.is_cast or spec.dtype.is_block or spec.code_spec is not None:
        return 0
    if isinstance(split, PerChannel):
        return int(split.axis % 2 == 0)
    if isinstance(split, PerGroup) and split.axis in (-1, 1):
        groups, size = split.split(width)
        return groups if groups * size == width else 0
    return 0
