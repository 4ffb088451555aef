"""The float layer moved as rotations and scalings moved the quantized one, found from both weights.

    V ~ L^T diag(s) W diag(b) R      y' = (s y) L      x' = (x / b) R

    b      AWQ, SmoothQuant, gains of norms that are folded         R    R1 of what reads the residual stream, R2
    s      layers whose outputs the next one reads scaled           L    R1 of what writes into it, R2 of values

W is the float weight, V that of the quantized layer, both (out, in). R1 is what makes the embeddings of one model those
of the other; R2 is fitted to each head. A layer counts as moved where that explains three quarters of V - W: quantizing
shrinks weights, which factors explain too, but never so much. So a move that is smaller than the noise stays unseen,
and costs at most 6 dB of a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark.torch.flows.compared.coded_layers import decoded_weight

EXPLAINED = 0.25
"""The most of V - W that may be left where a layer counts as moved."""
AS_GOOD = 1.5
"""A simpler move is taken if it leaves at most so many times what the best one leaves."""
NEAR = 1e-6
"""An error of a weight, relative and squared, below which nothing has moved."""
ROUNDS = 4
"""Of fitting both factors in turn."""
ROWS = 4
"""Of the embeddings, how many for each feature the rotation of the stream is fitted to."""


@dataclass(frozen=True)
class Turn:
    """An orthogonal matrix of blocks on its diagonal, (blocks, size, size)."""

    matrices: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Q along the last axis."""
        blocks, size, _ = self.matrices.shape
        if blocks == 1:
            return x @ self.matrices[0].to(x)
        parts = x.reshape(-1, blocks, size).transpose(0, 1)
        return (parts @ self.matrices.to(x)).transpose(0, 1).reshape(x.shape)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Q^T along the last axis."""
        return Turn(self.matrices.transpose(1, 2)).apply(x)


@dataclass(frozen=True)
class LayerMove:
    """A move of a layer; None stands for what stays.

    Attributes:
        rows, columns: s and b, (out,) and (in,).
        left, right: L and R.
    """

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    left: Turn | None = None
    right: Turn | None = None

    @property
    def is_none(self) -> bool:
        """True where nothing moved."""
        return self.rows is None and self.columns is None and self.left is None and self.right is None

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        """The float weight, (out, in), moved."""
        x = x if self.columns is None else x * self.columns
        x = x if self.rows is None else x * self.rows[:, None]
        x = x if self.right is None else self.right.apply(x)
        return x if self.left is None else self.left.apply(x.T).T

    def output(self, y: torch.Tensor) -> torch.Tensor:
        """The output of the float layer, (..., out), moved."""
        y = y if self.rows is None else y * self.rows.to(y)
        return y if self.left is None else self.left.apply(y)

    def output_back(self, y: torch.Tensor) -> torch.Tensor:
        """The output of the quantized layer, (..., out), moved back."""
        y = y if self.left is None else self.left.undo(y)
        return y if self.rows is None else y / _nonzero(self.rows).to(y)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the float layer, (..., in), moved."""
        x = x if self.columns is None else x / _nonzero(self.columns).to(x)
        return x if self.right is None else self.right.apply(x)

    def scaled_to(self, expected: torch.Tensor, given: torch.Tensor) -> LayerMove:
        """This move where both factors are known up to one that they share: it is what outputs say.

        Args:
            expected: What the float layer gives, moved.
            given: What the quantized layer gives.
        """
        if self.rows is None or self.columns is None:
            return self
        expected, given = expected.double(), given.double()
        shared = float((expected * given).sum() / (expected * expected).sum().clamp(min=1e-300))
        usable = math.isfinite(shared) and shared > 0
        return LayerMove(self.rows * shared, self.columns / shared, self.left, self.right) if usable else self


class Moves:
    """The moves of the layers of a model.

    Args:
        before, after: The float and the quantized model; their embeddings have weights.
    """

    def __init__(self, before: nn.Module, after: nn.Module) -> None:
        self.stream, config = _stream_rotation(before, after), getattr(before, "config", None)
        config = getattr(config, "text_config", None) or config
        heads, size = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
        self.head = getattr(config, "head_dim", None) or (size // heads if heads and size else 0)

    def find(self, layer: nn.Module, weight: torch.Tensor, given: torch.Tensor) -> LayerMove:
        """The move of a layer.

        Args:
            layer: The float one.
            weight, given: Its weight and that of the quantized layer, of one shape; of a linear layer, (out, in), or
                of an embedding.
        """
        if weight.ndim != 2 or weight.shape != given.shape or weight.is_meta:
            return LayerMove()
        w, v = weight.detach().float(), given.detach().to(weight.device).float()
        nothing = _error(w, v)
        if nothing < NEAR:
            return LayerMove()
        found = [*(self._of_table(w, v) if isinstance(layer, nn.Embedding) else self._of_linear(w, v))]
        best = min((error for error, _ in found), default=math.inf)
        if best > EXPLAINED * nothing:
            return LayerMove()
        return next(move for error, move in found if error <= AS_GOOD * best)

    def _of_table(self, w: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[float, LayerMove]]:
        """The error of an embedding, whose columns are its output, moved as the stream is."""
        if self.stream is not None and self._streams(w.shape[1]):
            yield _error(w, self.stream.undo(v)), LayerMove(left=self.stream)

    def _of_linear(self, w: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[float, LayerMove]]:
        """The errors of moves that the shapes of a linear layer allow, simple ones first."""
        lefts = [None, *([self.stream] if self._streams(w.shape[0]) else [])]
        rights = [None, *([self.stream] if self._streams(w.shape[1]) else [])]
        for left, right in ((left, right) for left in lefts for right in rights):
            back = v if right is None else right.undo(v)  # turned back, the error is equal and the fit by factors
            back = back if left is None else left.undo(back.T).T
            if left is not None or right is not None:
                yield _error(w, back), LayerMove(left=left, right=right)
            for error, factors in _factors(w, back):
                yield error, LayerMove(*factors, left, right)
            if left is None and self._has_heads(w.shape[0]):
                scaled = w * (columns := back.norm(dim=0) / _nonzero(w.norm(dim=0)))
                turn = _turn_of_heads(scaled.T, back.T, self.head)
                yield _error(turn.apply(scaled.T), back.T), LayerMove(None, columns, turn, right)
            if right is None and self._has_heads(w.shape[1]):
                turn = _turn_of_heads(w, back, self.head)
                yield _error(turn.apply(w), back), LayerMove(left=left, right=turn)

    def _streams(self, size: int) -> bool:
        return self.stream is not None and self.stream.matrices.shape[1] == size

    def _has_heads(self, size: int) -> bool:
        return bool(self.head) and size > self.head and size % self.head == 0


def _factors(
    w: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[float, tuple[torch.Tensor | None, torch.Tensor | None]]]:
    """Error and factors (rows, columns) of v ~ diag(rows) w diag(columns): of columns, of rows, of both."""
    columns = _column_factors(w, v)
    yield _error(w * columns, v), (None, columns)
    rows = _column_factors(w.T, v.T)
    yield _error(w * rows[:, None], v), (rows, None)
    for _ in range(ROUNDS):
        columns = _column_factors(w * rows[:, None], v)
        rows = _column_factors((w * columns).T, v.T)
    yield _error(w * columns * rows[:, None], v), (rows, columns)


def _column_factors(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of each column the factor of w that is nearest to v; 1 for a column of zeros."""
    squares = (w * w).sum(0)
    return torch.where(squares > 0, (w * v).sum(0) / _nonzero(squares), 1.0)


def _turn_of_heads(w: torch.Tensor, v: torch.Tensor, size: int) -> Turn:
    """The rotation of each `size` columns that brings those of w nearest to those of v."""
    count, rows = w.shape[1] // size, w.shape[0]
    one, other = (x.reshape(rows, count, size).permute(1, 0, 2) for x in (w, v))
    return Turn(_orthogonal(one.transpose(1, 2) @ other))


def _orthogonal(products: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrices Q with the greatest trace of Q^T P, for P of (..., n, n)."""
    u, _, vh = torch.linalg.svd(products.double())
    return u @ vh


def _error(moved: torch.Tensor, v: torch.Tensor) -> float:
    """Relative squared error of a moved weight; Inf where the move leaves nothing of it."""
    signal = float((moved * moved).sum())
    return float(((v - moved) ** 2).sum()) / signal if signal > 0 else math.inf


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _stream_rotation(before: nn.Module, after: nn.Module) -> Turn | None:
    """The rotation between the embeddings of two models; None where they are not rotated, or there are none."""
    first, second = _embeddings(before), _embeddings(after)
    if first is None or second is None or first.shape != second.shape:
        return None
    step = max(1, len(first) // (ROWS * first.shape[1]))
    one, other = (x.detach()[::step].double() for x in (first, second))
    other = other.to(one.device)
    if len(one) < one.shape[1]:
        return None
    difference = float(((one - other) ** 2).sum())
    turn = Turn(_orthogonal(one.T @ other)[None])
    return turn if float(((turn.apply(one) - other) ** 2).sum()) < EXPLAINED * difference else None


def _embeddings(model: Any) -> torch.Tensor | None:
    """The table of input embeddings of a model of transformers, with its values; None for others."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(table, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.is_meta:
        return None
    with torch.no_grad():
        found: torch.Tensor = decoded_weight(table)
        return found
