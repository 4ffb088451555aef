"""Grids: the values that the columns of a weight may take while a solver visits them, and the scales behind.

Several layers are solved at once; their rows lie one below the other, their columns in the solver's order.
"""

from __future__ import annotations

from typing import cast

import torch

from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import elementwise, quantize_elements
from quark.core.scales import QParams, ScaleType, round_scale
from quark.core.solvers import gptq
from quark.core.solvers.importance import weighted_qparams
from quark.core.spec import TensorSpec

CONTINUOUS = (ScaleType.float, ScaleType.float32, ScaleType.float16, ScaleType.bfloat16)
"""Scale types fine enough to be fitted."""


class StaticGrid:
    """Rounds columns on scales that are fixed before."""

    def __init__(
        self, params: list[QParams], weights: list[torch.Tensor], spec: TensorSpec, order: torch.Tensor
    ) -> None:
        self.spec = spec
        parts = [elementwise(p, spec, tuple(w.shape)) for p, w in zip(params, weights, strict=True)]
        self.scale = torch.cat([scale for scale, _ in parts]).T[order].contiguous()
        zeros = [zero for _, zero in parts if zero is not None]
        self.zero = torch.cat(zeros).T[order].contiguous() if zeros else None

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        zero = None if self.zero is None else self.zero[index]
        return quantize_elements(work[index], self.scale[index], zero, self.spec)


class DynamicGrid:
    """Rounds columns on scales that are found when a group is reached, from its columns as they are then."""

    def __init__(
        self, spec: TensorSpec, order: torch.Tensor, group: int, dtype: torch.dtype, importance: torch.Tensor
    ) -> None:
        self.spec, self.group, self.dtype, self.importance = spec, group, dtype, importance
        self.order: list[int] = order.tolist()
        self.found: dict[int, QParams] = {}

    def __call__(self, index: int, work: torch.Tensor) -> torch.Tensor:
        group = self.order[index] // self.group
        if group not in self.found:
            columns = slice(index, index + self.group)
            weight = work[columns].T.to(self.dtype).contiguous()
            self.found[group] = weighted_qparams(weight, self.importance[columns], self.spec)
        params = self.found[group]
        zero = None if params.zero_point is None else params.zero_point[:, 0]
        return quantize_elements(work[index], params.scale[:, 0], zero, self.spec)

    def params(self, rows: list[int]) -> list[QParams]:
        """The scales of the layers, which have so many rows each."""
        found = [self.found[group] for group in sorted(self.found)]
        scales = torch.split(torch.cat([p.scale for p in found], 1), rows)
        if found[0].zero_point is None:
            return [QParams(scale.contiguous()) for scale in scales]
        zeros = torch.split(torch.cat([cast(torch.Tensor, p.zero_point) for p in found], 1), rows)
        return [QParams(s.contiguous(), z.contiguous()) for s, z in zip(scales, zeros, strict=True)]


def refitted(
    params: list[QParams],
    weights: list[torch.Tensor],
    spec: TensorSpec,
    goal: torch.Tensor,
    solved: torch.Tensor,
    hessian: torch.Tensor,
    order: torch.Tensor,
) -> list[QParams]:
    """The scales fitted to the codes of a solution; scales that are coarse, or of whole tensors, stay as they are.

    Args:
        params: Of each layer.
        weights: Float weights, for their shapes and dtype.
        spec: The same for all.
        goal, solved: Float and quantized columns, in the solver's order, shape (columns, rows of all layers).
        hessian: In the solver's order.
        order: Column at each place.
    """
    split = spec.split
    by_row = (isinstance(split, PerChannel) and split.axis == 0) or (
        isinstance(split, PerGroup) and split.axis in (-1, 1)
    )
    if not by_row or spec.scale_type not in CONTINUOUS or spec.scale_spec is not None or spec.dtype.is_block:
        return params
    size = split.split(len(order))[1] if isinstance(split, PerGroup) else len(order)
    factors = gptq.refit(goal, solved, hessian, order // size, -(-len(order) // size))
    dtype = str(weights[0].dtype).removeprefix("torch.")
    found = []
    for one, factor in zip(params, torch.split(factors, [len(w) for w in weights]), strict=True):
        scale = round_scale(one.scale * factor.reshape(one.scale.shape), spec, dtype)
        found.append(QParams(scale, one.zero_point, one.second))
    return found


def dynamic_group(spec: TensorSpec) -> int:
    """The group size along the columns whose scale can be found on the way; 1 where there is none."""
    split = spec.split
    if not isinstance(split, PerGroup) or split.axis not in (-1, 1) or split.pad or spec.scale_spec is not None:
        return 1
    return max(split.size, 1)
