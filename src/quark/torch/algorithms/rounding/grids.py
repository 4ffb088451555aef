"""Grids: the values that the columns of a weight may take while a solver visits them, and their scales.

Several layers are solved at once; their rows lie one below the other, their columns in the solver's order. Where
experts of one shape are solved at once, what is given for each layer is given for each layer of each expert, and the
columns have the shape (experts, columns, rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from quark.core.array import dtype_name
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.quantize import elementwise
from quark.core.scales import QParams, round_scale
from quark.core.solvers.columns.columns import ColumnGrid
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import FLOAT_SCALES, TensorSpec, by_row

ALL = slice(None)


def static_grid(
    params: list[list[QParams]],
    weights: list[list[torch.Tensor]],
    spec: TensorSpec,
    orders: Sequence[torch.Tensor] | None = None,
) -> ColumnGrid:
    """Rounds columns on scales that are fixed before; in their natural order without `orders`."""
    if can_be_spread(spec):
        return _spread_grid(params, weights, spec, orders)
    parts = [
        [elementwise(p, spec, tuple(w.shape)) for p, w in zip(*own, strict=True)]
        for own in zip(params, weights, strict=True)
    ]
    zeros = [[zero for _, zero in own if zero is not None] for own in parts]
    scale = _columns([[scale for scale, _ in own] for own in parts], orders)
    shared = _shared(spec, weights[0][0].shape[1], orders is not None)
    return ColumnGrid(spec, scale, _columns(zeros, orders) if zeros[0] else None, shared)


def _shared(spec: TensorSpec, length: int, ordered: bool) -> int:
    """Neighbouring columns with one scale in each row; `ordered`: they may have been mixed."""
    split = spec.split
    if isinstance(split, PerTensor) or (isinstance(split, PerChannel) and split.axis == 0):
        return length
    if isinstance(split, PerGroup) and split.axis in (-1, 1):
        size = split.split(length)[1]
        return size if not ordered or size >= length else 1
    return 1


def can_be_spread(spec: TensorSpec) -> bool:
    """Return True where the scales of a weight are a matrix, (rows, groups), and are not quantized themselves."""
    return by_row(spec) and spec.scale_spec is None and spec.code_spec is None and spec.split == spec.granularity


def _spread_grid(
    params: list[list[QParams]],
    weights: list[list[torch.Tensor]],
    spec: TensorSpec,
    orders: Sequence[torch.Tensor] | None,
) -> ColumnGrid:
    """Scales of columns from whole rows of scales, which are copied faster than elements."""
    length = weights[0][0].shape[1]
    size = spec.split.split(length)[1] if isinstance(spec.split, PerGroup) else length

    def of_columns(some: list[list[torch.Tensor]]) -> torch.Tensor:
        spread = []
        for index, own in enumerate(some):
            groups = torch.cat([one.reshape(len(one), -1) for one in own]).T.float().contiguous()
            columns = torch.arange(length, device=groups.device) if orders is None else orders[index]
            spread.append(groups[columns // size])
        return spread[0] if len(spread) == 1 else torch.stack(spread)

    zeros = [[one.zero_point for one in own if one.zero_point is not None] for own in params]
    scale = of_columns([[one.scale for one in own] for own in params])
    shared = _shared(spec, length, orders is not None)
    return ColumnGrid(spec, scale, of_columns(zeros) if zeros[0] else None, shared)


def _columns(parts: list[list[torch.Tensor]], orders: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """(rows, columns) of each layer of each expert -> (experts, columns, rows); without the first axis for one."""
    columns = [torch.cat(of_expert).T for of_expert in parts]
    columns = [c if orders is None else c[order] for c, order in zip(columns, orders or columns, strict=True)]
    columns = [c.contiguous() for c in columns]
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
        return self.block(index, index + 1, work)(0, work[..., index : index + 1, :])

    def block(self, start: int, stop: int, work: torch.Tensor) -> ColumnGrid:
        """The grid of columns start to stop, which are of one group."""
        if start // self.group_size == len(self.of_groups):
            columns = slice(start, start + self.group_size)
            weight = work[..., columns, :].mT.to(self.dtype)
            importance = self.importance[..., None, columns].expand(weight.shape)
            weight, importance = (x.reshape(-1, self.group_size).contiguous() for x in (weight, importance))
            self.of_groups.append(weighted_qparams(weight, importance, self.spec))
        params, (*lead, _, rows) = self.of_groups[-1], work.shape

        def of_columns(parameter: torch.Tensor) -> torch.Tensor:
            return parameter.reshape(*lead, 1, rows).expand(*lead, stop - start, rows)

        zero = None if params.zero_point is None else of_columns(params.zero_point)
        return ColumnGrid(self.spec, of_columns(params.scale), zero, stop - start)

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


class FittedScales:
    """The scales of a grid in natural order, which are fitted to the codes of a solution group by group."""

    def __init__(self, params: list[list[QParams]], weights: list[list[torch.Tensor]], grid: ColumnGrid) -> None:
        self.params, self.grid, self.dtype = params, grid, dtype_name(weights[0][0])
        self.rows = [len(weight) for weight in weights[0]]
        split, length = grid.spec.split, weights[0][0].shape[1]
        self.size = split.split(length)[1] if isinstance(split, PerGroup) else length
        scales = [torch.cat([one.scale.reshape(len(one.scale), -1) for one in own]) for own in params]
        self.scale = scales[0] if len(scales) == 1 else torch.stack(scales)

    def fit(self, group: int, factor: torch.Tensor, rows: slice = ALL) -> torch.Tensor:
        """Multiply the scales of a group, of some rows; the factors that are left when they are rounded."""
        before = self.scale[..., rows, group].clone()
        fitted = round_scale(before * factor, self.grid.spec, self.dtype)
        self.scale[..., rows, group] = fitted
        self.grid.scale[..., group * self.size : (group + 1) * self.size, rows] = fitted[..., None, :]
        return fitted / before

    def fitted(self) -> list[list[QParams]]:
        """The scales of each layer of each expert."""
        experts = list(self.scale) if self.scale.ndim > 2 else [self.scale]
        return [
            [
                QParams(scale.reshape(one.scale.shape).clone(), one.zero_point, one.second)
                for scale, one in zip(torch.split(of_expert, self.rows), own, strict=True)
            ]
            for of_expert, own in zip(experts, self.params, strict=True)
        ]


def can_be_fitted(spec: TensorSpec) -> bool:
    """Return True where scales are of single rows, and so fine that any factor is worth having."""
    fine = spec.scale_type in FLOAT_SCALES and spec.scale_spec is None and not spec.dtype.is_block
    return fine and by_row(spec)


def dynamic_group(spec: TensorSpec) -> int:
    """The group size along the columns whose scale can be found on the way; 1 where there is none."""
    split = spec.split
    if (
        not isinstance(split, PerGroup)
        or split.axis not in (-1, 1)
        or split.pad
        or spec.scale_spec is not None
        or spec.dtype.is_block
    ):
        return 1
    return max(split.size, 1)


def joined(parts: list[QParams]) -> QParams:
    """The parameters of rows that were solved one part after the other, of both levels."""
    first = parts[0]
    if len(parts) == 1 or first.scale.ndim == 0:
        return first
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    seconds = [part.second for part in parts if part.second is not None]
    return QParams(
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
        joined(seconds) if seconds else None,
    )
