"""Problems that the column solvers solve at once: layers that read one tensor, or experts of one shape, stacked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from quark.core.kernels import products
from quark.core.quantize import fake_quantize
from quark.core.solvers import gptq
from quark.core.solvers.kept_share import freedom, kept_share
from quark.core.spec import TensorSpec
from quark.torch.algorithms.input_group import InputGroup, flat
from quark.torch.algorithms.layer_weights import weight_spec
from quark.torch.layers import QuantLayer

ROWS = 1024
"""Rows of a weight that are converted to float32 at once."""


@dataclass
class ColumnProblem:
    """A problem that is solved at once: layers that read one tensor, with the order in which their columns are visited.

    `damping` is the share of the mean of the diagonal that the factor took, `own` that of each column's own moment;
    `pulls` are those of layers that have one; `drift`, GPTAQ's P, where all of it is there, so that pulls follow from
    it; `varied`, by how much the outputs of some of their rows drift, summed over these: the mean square of
    (X - X~) W^T.
    """

    group: InputGroup
    layers: dict[str, QuantLayer]
    order: torch.Tensor
    damping: float | torch.Tensor = 0.0
    own: float = 0.0
    pulls: dict[str, torch.Tensor] = field(default_factory=dict)
    varied: dict[str, torch.Tensor] = field(default_factory=dict)
    drift: torch.Tensor | None = None

    def ordered(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rows and columns in the order of the solver."""
        return matrix[self.order[:, None], self.order]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Columns, tokens, rows of all layers, and by how much products of inputs take less time than of float32."""
        fast = self.group.inputs[0].dtype is torch.bfloat16 and products.serves(self.group.gram)
        every = sum(cast(nn.Linear, layer).weight.shape[0] for layer in self.layers.values())
        return len(self.order), self.group.count, every, 2 if fast else 1

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Of the layers, where their inputs' moments are."""
        return {name: cast(nn.Linear, x).weight.detach().to(self.order.device) for name, x in self.layers.items()}

    def add_pulls(self) -> None:
        """Find (X~ X^T - H) W of each layer, what draws its weight to the one that does best on the real inputs.

        Of W (rows, columns), transposed: (columns, rows). X~ X^T costs tokens x columns products for each column, and
        the pull columns x rows; X~ ((X - X~)^T W), which is the same, twice tokens x rows. The cheaper way is taken.
        """
        columns, tokens, every, speed = self.sizes
        if 2 * tokens * every < columns * (speed * every + tokens):
            self.add_pulls_of_outputs()
            return
        weights = self.weights
        self.pulls = {name: self.group.gram.new_empty(w.shape[1], w.shape[0]) for name, w in weights.items()}
        for which, cross in self.group.cross_bands():
            # One band of the difference at a time.
            drift = cross - self.group.gram[which]
            for name, weight in weights.items():
                for start in range(0, len(weight), ROWS):
                    rows = slice(start, start + ROWS)
                    self.pulls[name][which, rows] = drift @ weight[rows].float().T

    def add_pulls_of_outputs(self, share: float = 1.0) -> None:
        """Find `share` times what `add_pulls` finds, from what the drift does to outputs."""
        self.pulls = self.group.drift_of_outputs(self.weights)
        for pull in self.pulls.values():
            pull *= share

    @property
    def drift_gives_pulls(self) -> bool:
        """True where pulls cost less from all of P than from outputs, and the part above its diagonal is found anyway.

        For each column, P takes 2/3 columns^2 products more and then columns x rows; outputs, twice tokens x rows and
        half of columns x rows for a solution.
        """
        columns, tokens, every, speed = self.sizes
        return every * (4 * tokens - columns) * 3 > 2 * speed * columns * columns

    def add_varied(self) -> None:
        """Find `varied`, while the inputs of the float model are there."""
        rows = {name: cast(nn.Linear, layer).weight.detach() for name, layer in self.layers.items()}
        some = {
            name: weight[gptq.some_rows(len(weight))].to(self.order.device).float() for name, weight in rows.items()
        }
        self.varied = {name: self.group.gram.new_zeros(()) for name in some}
        both = (self.group.in_turn(side) for side in (self.group.inputs, self.group.float_inputs))
        for real, wanted in zip(*both, strict=True):
            drift = flat(wanted).float() - flat(real).float()
            for name, weight in some.items():
                self.varied[name] += (drift @ weight.T).square().sum() / self.group.count

    def keep_what_is_learned(self, feedback: torch.Tensor, importance: torch.Tensor) -> None:
        """Shrink the pulls by what of them is the noise of few tokens; see `core/solvers/kept_share.py`."""
        diagonal = self.group.gram.diagonal()[self.order]
        added = gptq.added_to(diagonal, self.damping, self.own)
        free = freedom(feedback, importance, added)
        for name, varied in self.varied.items():
            pull = self.pulls[name][:, gptq.some_rows(self.pulls[name].shape[1])][self.order]
            offset = gptq.offset_of(pull, feedback, importance)
            explained = (offset * offset * importance[:, None]).sum().float()
            self.pulls[name] *= kept_share(explained, varied, free, self.group.count)

    def drawn(self, name: str, rows: slice, feedback: torch.Tensor, importance: torch.Tensor) -> torch.Tensor | None:
        """F^T (W' - W) of some rows of a layer, (columns, rows), in the order of the solver; None: nothing draws it.

        Args:
            name: Of the layer.
            rows: Which of its rows.
            feedback, importance: F and d.
        """
        if name in self.pulls:
            return gptq.offset_of(self.pulls[name][:, rows][self.order], feedback, importance)
        if self.drift is None:
            return None
        return gptq.drawn(self.weights[name][rows].float().T[self.order], self.drift)

    def may_round_offset(self, feedback: torch.Tensor, importance: torch.Tensor) -> bool:
        """Return True where the change of the weights may be found by rounded products: on some of the rows at most
        `gptq.ALLOWED` of its gain is then lost.

        Args:
            feedback, importance: F and d, float32.
        """
        if not self.pulls:
            return True
        every = torch.cat([pull[:, gptq.some_rows(pull.shape[1])] for pull in self.pulls.values()], 1)
        pull = every[:, gptq.some_rows(every.shape[1])][self.order]
        exact, rounded = (gptq.offset_of(pull, feedback, importance, way) for way in (False, True))
        lost, gained = (((x * x) * importance[:, None]).sum() for x in (rounded - exact, exact))
        return bool(lost <= gptq.ALLOWED * gained)

    @contextmanager
    def damped(self) -> Iterator[torch.Tensor]:
        """Within: the second moments with the damping on their diagonal; a copy would be a matrix more."""
        gram = self.group.gram
        diagonal = gram.diagonal()
        before = diagonal.clone()
        diagonal += gptq.added_to(before, self.damping, self.own)
        try:
            yield gram
        finally:
            diagonal.copy_(before)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The common properties of problems that are stacked: spec, shape and dtype of each weight."""
        weights = [cast(nn.Linear, layer).weight for layer in self.layers.values()]
        return tuple(
            (weight_spec(layer), w.shape, w.dtype) for layer, w in zip(self.layers.values(), weights, strict=True)
        )


def names_of(problems: list[ColumnProblem]) -> str:
    """The first layers, and how many more."""
    first = ", ".join(problems[0].layers)
    return first if len(problems) == 1 else f"{first} and those of {len(problems) - 1} more experts"


def stacked(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """One tensor for all experts; the tensor itself where there is one."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def unstacked(whole: torch.Tensor, problems: list[ColumnProblem]) -> list[torch.Tensor]:
    """The part of each problem; the tensor itself where there is one."""
    return [whole] if len(problems) == 1 else list(whole)


def by_spec(layers: dict[str, QuantLayer]) -> list[dict[str, QuantLayer]]:
    """The layers, those of one spec together."""
    by_spec: dict[TensorSpec, dict[str, QuantLayer]] = {}
    for name, layer in layers.items():
        by_spec.setdefault(weight_spec(layer), {})[name] = layer
    return list(by_spec.values())


def as_read(group: InputGroup, layers: dict[str, QuantLayer]) -> InputGroup:
    """The group with its inputs quantized as the layers will quantize them, where that follows from each input alone.

    The layers then make up for the error of their activations, too, as far as weights can.
    """
    specs = {layer.spec.input for layer in layers.values()}
    spec = next(iter(specs))
    if len(specs) > 1 or spec is None or not spec.dynamic or spec.scale_spec is not None:
        return group
    return group.changed(lambda x: fake_quantize(x.contiguous(), None, spec) if x.numel() else x, spec)
