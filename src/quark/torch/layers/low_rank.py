"""A low-rank branch beside a quantized linear layer (SVDQuant, Li et al. 2024, arXiv:2411.05007).

    y = Q(x) Q(R)^T + (x L1^T) L2^T + b        R = W - L2 L1, L1 (rank, in), L2 (out, rank)

The branch computes in the dtype of the model and reads x before it is quantized. In a checkpoint its matrices are
`<layer>.correction.l1.weight` and `<layer>.correction.l2.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quark.core.names.patterns import matches_any
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.torch.config.algo_configs import SVDQuantConfig
from quark.torch.config.config import algorithms_in

BRANCH = "correction"
"""Name of the branch, a module of the layer."""


class LowRankBranch(nn.Module):
    """x L1^T L2^T.

    Args:
        l1: (rank, in_features).
        l2: (out_features, rank).
    """

    def __init__(self, l1: torch.Tensor, l2: torch.Tensor) -> None:
        super().__init__()
        self.l1, self.l2 = _linear(l1), _linear(l2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of another dtype where all parameters that were floats were cast, and the layer computes as before.
        out: torch.Tensor = self.l2(self.l1(x.to(self.l1.weight.dtype)))
        return out.to(x.dtype)

    def product(self) -> torch.Tensor:
        """L2 L1, (out_features, in_features), float64."""
        return self.l2.weight.double() @ self.l1.weight.double()


def _linear(weight: torch.Tensor) -> nn.Linear:
    """A layer that holds the matrix; nothing is initialised."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def branch_of(layer: nn.Module) -> LowRankBranch | None:
    """The branch of a layer, or None."""
    branch = layer._modules.get(BRANCH)
    return branch if isinstance(branch, LowRankBranch) else None


def with_branch(layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return y plus the output of the branch of a layer for x, if there is a branch."""
    branch = branch_of(layer)
    return y if branch is None else y + branch(x)


def put_branch(layer: nn.Module, branch: LowRankBranch | None) -> None:
    """Let a layer have this branch, or none."""
    layer._modules.pop(BRANCH, None)
    if branch is not None:
        layer.add_module(BRANCH, branch)


def undo_branch(layer: nn.Module) -> None:
    """Add the branch of a layer to its float weight, and take it away; nothing happens to a layer without one."""
    branch = branch_of(layer)
    if branch is not None:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        with torch.no_grad():
            weight.copy_(weight.double() + branch.product())
        put_branch(layer, None)


def branches(model: nn.Module) -> Iterator[tuple[str, LowRankBranch]]:
    """Full name of every layer that has a branch, and the branch."""
    for name, module in model.named_modules():
        branch = branch_of(module)
        if branch is not None:
            yield name, branch


def can_have_branch(config: SVDQuantConfig, name: str, layer: nn.Module, spec: TensorSpec | None) -> bool:
    """Return True where SVDQuant may give a layer, whose weight is quantized by a spec, a branch."""
    return (
        isinstance(layer, nn.Linear)
        and spec is not None
        and not spec.is_cast
        and min(layer.in_features, layer.out_features) >= config.min_layer_size
        and not matches_any(name, config.exclude_patterns)
    )


def branch_bytes(config: SVDQuantConfig, layer: nn.Linear) -> int:
    """Bytes of the branch of a layer, rank (in + out) numbers in the dtype of its weight. Reads no value."""
    rank = min(config.svd_rank, layer.in_features, layer.out_features)
    return rank * (layer.in_features + layer.out_features) * layer.weight.element_size()


def hold_branches(model: nn.Module, config: SVDQuantConfig) -> None:
    """Make room for the branches of a checkpoint, on the layers that its config lists."""
    modules = dict(model.named_modules())
    for name in config.correction_layers or []:
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"correction_layers: {name!r} is no linear layer of this model.")
        rank = min(config.svd_rank, layer.in_features, layer.out_features)
        quantizer: Any = layer._modules.get("weight_quantizer")
        like: torch.Tensor = getattr(quantizer, "float_like", layer.weight)
        l1, l2 = (
            torch.empty(shape, dtype=like.dtype, device=layer.weight.device)
            for shape in ((rank, layer.in_features), (layer.out_features, rank))
        )
        put_branch(layer, LowRankBranch(l1, l2))


def record_branches(stored: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A `QConfig.to_dict()` whose SVDQuant lists the layers of this model that have a branch."""
    names = [name for name, _ in branches(model)]
    for algo in algorithms_in(stored):
        if algo.get("name") == "svdquant":
            algo["correction_layers"] = names
    return stored
