"""Rotations folded into weights. Q is orthonormal; W is (out, in), so a layer computes x W^T + b.

    norm gain g       W <- W diag(g)        for all layers that read the norm, whose gain becomes 1
    norm bias c       b <- b + W c; where a reader has no bias the norm keeps one: c <- (c / g) Q
    reader            W <- W Q
    writer            W <- Q^T W, b <- b Q  embedding: E <- E Q
    values (R2)       W_v <- Q^T W_v for the rows of each value head, W_o <- W_o Q for the columns of each head
    online            W <- W Q, and the input is rotated in each forward

All of it is computed in float64, a few rows at a time, and rounded once to the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from quark.core.array import row_chunks
from quark.core.solvers.hadamard import Rotation
from quark.errors import StructureError
from quark.torch.algorithms.rotation.value_heads import ValuePath
from quark.torch.layers.online_rotation import rotate_input
from quark.torch.model.residual_stream import Residual, StreamNorm

CHUNK_BYTES = 1 << 26


class Turning(Protocol):
    """Q: what rotates rows of any float array, block by block."""

    def apply(self, x: Any) -> Any:
        """Return x Q along the last axis, in the dtype of x."""


def rotate_writers(part: nn.Module, residual: Residual, rotation: Turning) -> None:
    """Rotate what the writers of a part add to the stream."""
    for name in residual.writers:
        module = part.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _change(module.weight, rotation.apply)
        else:
            _rotate_outputs(module, rotation)


def rotate_readers(part: nn.Module, residual: Residual, rotation: Turning) -> None:
    """Fold the norms of a part and rotate what their readers, and those without a norm, read."""
    for norm in residual.norms:
        _fold_norm(part, norm, rotation)
    for name in dict.fromkeys([r for norm in residual.norms for r in norm.readers] + list(residual.readers)):
        _change(_weight(part, name), rotation.apply)


def rotate_heads(part: nn.Module, path: ValuePath, heads: list[torch.Tensor], rotation: Turning) -> None:
    """R2: rotate each value head, and the inputs of the output projection back."""
    value = part.get_submodule(path.value)
    weight: torch.Tensor = value.weight  # type: ignore[assignment]
    _rotate_outputs(
        value, rotation, torch.cat(heads).to(weight.device, non_blocking=True)
    )  # it turns blocks, of which a head is some
    _change(_weight(part, path.output), rotation.apply)


def rotate_online(part: nn.Module, name: str, rotation: Rotation) -> None:
    """Rotate the input of a layer in each forward, and its weight against it."""
    _change(_weight(part, name), rotation.apply)
    rotate_input(part.get_submodule(name), rotation)


def _weight(part: nn.Module, name: str) -> torch.Tensor:
    weight: torch.Tensor = part.get_submodule(name).weight  # type: ignore[assignment]
    return weight


def _rotate_outputs(module: nn.Module, rotation: Turning, rows: torch.Tensor | slice = slice(None)) -> None:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = getattr(module, "bias", None)
    with torch.no_grad():
        columns = weight[rows].t()
        turned = torch.empty_like(columns)
        for part in row_chunks(len(columns), columns.shape[-1] * 8, CHUNK_BYTES):
            turned[part] = rotation.apply(columns[part].double()).to(weight.dtype)
        weight[rows] = turned.t()
        if bias is not None:
            bias[rows] = rotation.apply(bias[rows].double()).to(bias.dtype)


def _fold_norm(part: nn.Module, norm: StreamNorm, rotation: Turning) -> None:
    module = part.get_submodule(norm.name)
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    shift: torch.Tensor | None = getattr(module, "bias", None)
    gain = weight.detach().double() + norm.offset
    with torch.no_grad():
        has_shift, has_zero = (
            (False, False) if shift is None else torch.stack([shift.any(), (gain == 0).any()]).tolist()
        )
        if shift is not None and has_shift:
            shift.copy_(_moved_shift(part, norm, shift.detach().double(), gain, rotation, has_zero))
        for name in norm.readers:
            _change(_weight(part, name), lambda rows: rows * gain.to(rows.device))
        weight.fill_(1 - norm.offset)


def _moved_shift(
    part: nn.Module, norm: StreamNorm, shift: torch.Tensor, gain: torch.Tensor, rotation: Turning, has_zero: bool
) -> torch.Tensor:
    """Move the bias of a norm into the layers that read it; return what the norm keeps."""
    readers = [part.get_submodule(name) for name in norm.readers]
    biases = [getattr(reader, "bias", None) for reader in readers]
    if all(bias is not None for bias in biases):
        for reader, bias in zip(readers, biases, strict=True):
            bias += (reader.weight.double() @ shift).to(bias.dtype)  # type: ignore[operator,union-attr]
        return torch.zeros_like(shift)
    if has_zero:
        raise StructureError(
            f"{norm.name} has a bias and a gain of 0 in {int((gain == 0).sum())} channels, and not all layers that "
            "read it have a bias to take it over: it cannot be rotated."
        )
    turned: torch.Tensor = rotation.apply(shift / gain)
    return turned


def _change(weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the rows of a weight in place, computed in float64."""
    with torch.no_grad():
        for rows in row_chunks(len(weight), weight.shape[-1] * 8, CHUNK_BYTES):
            weight[rows] = change(weight[rows].double()).to(weight.dtype)
