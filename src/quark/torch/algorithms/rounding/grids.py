"""Grids: the values that the columns of a weight may take while a solver visits them, and the scales behind.

Several layers are solved at once; their rows lie one below the other, their columns in the solver's order. Where
experts of one shape are solved at once, what is given for each layer is given for each layer of each expert, and the
columns have the shape (experts, columns, rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from quark.core.array import dtype_name
from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import elementwise, quantize_elements
from quark.core.scales import QParams, round_scale
from quark.core.solvers import gptq
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import FLOAT_SCALES, TensorSpec


class StaticGrid:
    """Rounds columns on scales that are fixed before."""

    def __init__(
        self,
        params: list[list[QParams]],
        weights: list[list[torch.Tensor]],
        spec: TensorSpec,
        orders: Sequence[torch.Tensor],
    ) -> None:
        self.spec = spec
        parts = [
            [elementwise(p, spec, tuple(w.shape)) for p, w in zip(*own, strict=True)]
            for own in zip(params, weights, strict=True)
        ]
        self.scale = gptq.columns_of(_columns([[scale for scale, _ in own] for own in parts], orders))
        zeros = [[zero for _, zero in own if zero is not None] for own in parts]
        self.zero = gptq.columns_of(_columns(zeros, orders)) if zeros[0] else None

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        zero = None if self.zero is None else self.zero[index]
        return quantize_elements(work[..., index, :], self.scale[index], zero, self.spec)


def _columns(parts: list[list[torch.Tensor]], orders: Sequence[torch.Tensor]) -> torch.Tensor:
    """(rows, columns) of each layer of each expert -> (experts, columns, rows); without the first axis for one."""
    columns = [torch.cat(of_expert).T[order].contiguous() for of_expert, order in zip(parts, orders, strict=True)]
    return columns[0] if len(columns) == 1 else torch.stack(columns)


class DynamicGrid:
    """Rounds columns on scales that are found when a group is reached, from its columns as they are then."""

    def __init__(
        self,
        spec: TensorSpec,
        orders: Sequence[torch.Tensor],
        group_size: int,
        dtype: torch.dtype,
        importance: torch.Tensor,
    ) -> None:
        self.spec, self.group_size, self.dtype, self.importance = spec, group_size, dtype, importance
        self.places = [(order[::group_size] // group_size).argsort() for order in orders]
        self.of_groups: list[QParams] = []

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        if index // self.group_size == len(self.of_groups):
            columns = slice(index, index + self.group_size)
            weight = work[..., columns, :].mT.to(self.dtype)
            importance = self.importance[..., None, columns].expand(weight.shape)
            weight, importance = (x.reshape(-1, self.group_size).contiguous() for x in (weight, importance))
            self.of_groups.append(weighted_qparams(weight, importance, self.spec))
        params, now = self.of_groups[-1], work[..., index, :]
        zero = None if params.zero_point is None else params.zero_point.reshape(now.shape)
        return quantize_elements(now, params.scale.reshape(now.shape), zero, self.spec)

    def params(self, rows: list[int]) -> list[list[QParams]]:
        """The scales of the layers of each expert, which have so many rows each."""
        scales = self._of_layers([p.scale for p in self.of_groups], rows)
        if self.of_groups[0].zero_point is None:
            return [[QParams(scale) for scale in own] for own in scales]
        zeros = self._of_layers([cast(torch.Tensor, p.zero_point) for p in self.of_groups], rows)
        return [[QParams(s, z) for s, z in zip(*own, strict=True)] for own in zip(scales, zeros, strict=True)]

    def _of_layers(self, found: list[torch.Tensor], rows: list[int]) -> list[list[torch.Tensor]]:
        experts = torch.split(torch.cat(found, 1), sum(rows))
        return [
            [part.contiguous() for part in torch.split(own[:, places], rows)]
            for own, places in zip(experts, self.places, strict=True)
        ]


def refitted(
    params: list[list[QParams]],
    weights: list[list[torch.Tensor]],
    spec: TensorSpec,
    goal: torch.Tensor,
    solved: torch.Tensor,
    hessian: torch.Tensor,
    orders: Sequence[torch.Tensor],
) -> list[list[QParams]]:
    """The scales fitted to the codes of a solution; scales that are coarse, or of whole tensors, stay as they are.

    Args:
        params: Of each layer.
        weights: Float weights, for their shapes and dtype.
        spec: The same for all.
        goal, solved: Float and quantized columns, in the solver's order, shape (columns, rows of all layers).
        hessian: In the solver's order.
        orders: Of each expert: column at each place.
    """
    split = spec.split
    if not by_row(spec) or spec.scale_type not in FLOAT_SCALES or spec.scale_spec is not None or spec.dtype.is_block:
        return params
    length, dtype = len(orders[0]), dtype_name(weights[0][0])
    size = split.split(length)[1] if isinstance(split, PerGroup) else length
    groups = (orders[0] if len(orders) == 1 else torch.stack(list(orders))) // size
    factors = gptq.refit(goal, solved, hessian, groups, -(-length // size))
    of_layers = torch.split(factors, [len(w) for w in weights[0]], -2)

    def fitted(one: QParams, factor: torch.Tensor) -> QParams:
        scale = round_scale(one.scale * factor.reshape(one.scale.shape), spec, dtype)
        return QParams(scale, one.zero_point, one.second)

    several = len(orders) > 1
    return [
        [fitted(one, factor[expert] if several else factor) for one, factor in zip(own, of_layers, strict=True)]
        for expert, own in enumerate(params)
    ]


def by_row(spec: TensorSpec) -> bool:
    """Whether no scale is shared by two rows."""
    split = spec.split
    return (isinstance(split, PerChannel) and split.axis == 0) or (
        isinstance(split, PerGroup) and split.axis in (-1, 1)
    )


def dynamic_group(spec: TensorSpec) -> int:
    """The group size along the columns whose scale can be found on the way; 1 where there is none."""
    split = spec.split
    if not isinstance(split, PerGroup) or split.axis not in (-1, 1) or split.pad or spec.scale_spec is not None:
        return 1
    return max(split.size, 1)
