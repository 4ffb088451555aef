"""The effect of the error of a layer's weight on the outputs, to second order.

The outputs are distributions p (softmax of the logits), one for each of T positions. A layer reads x and gives y = W x.
Labels are drawn from p itself, and g = d log p(label) / dy is their score. For a small change D of W (out, in) the
divergence of the outputs is half of the Fisher form,

    KL(p || p_D) per position  =  1/(2 T) sum over tokens of E (g^T D x)^2
                               ~  1/(2 n T) sum_ij G_i X_j D_ij^2          G_i = sum_t g_i^2,  X_j = sum_t x_j^2

over the n tokens that the layer reads. Rounding errors are nearly independent of each other, so that of both second
moments the diagonal is left; keeping all of them (K-FAC, Martens and Grosse 2015) ranks layers no better. The error e
of an input that is quantized, too, adds G_i W_ij^2 sum_t e_j^2 in the same way.

Embeddings are a linear layer that reads one-hot vectors, its weight transposed: X_j is how often token j is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.spec import LayerSpec, TensorSpec
from quark.torch.algorithms.input_group import flat
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.calibration.distributed import in_order, summed, world
from quark.torch.layers.base import input_of
from quark.torch.layers.embedding import lookup_factor


class Moments:
    """Sums over the tokens that a layer reads.

    Attributes:
        count: Tokens, n.
        inputs: X, of shape (in_features,), float32.
        scores: G, of shape (out_features,), float32.
        errors: Spec of a live input -> sum of the squared errors of each channel.
    """

    def __init__(self, layer: nn.Linear, specs: Sequence[TensorSpec]) -> None:
        device = _place_of(layer)
        self.count = 0
        self.inputs = torch.zeros(layer.in_features, device=device)
        self.scores = torch.zeros(layer.out_features, device=device)
        self.errors = {spec: torch.zeros(layer.in_features, device=device) for spec in specs}

    def add_inputs(self, x: torch.Tensor) -> None:
        """Add what the layer reads."""
        rows = flat(x).float()
        self.count += len(rows)
        self.inputs += rows.square().sum(0)
        for spec, total in self.errors.items():
            if rows.numel():
                total += (fake_quantize(rows.contiguous(), None, spec) - rows).square().sum(0)

    def add_scores(self, gradient: torch.Tensor) -> None:
        """Add the scores of what it gives."""
        self.scores += flat(gradient).float().square().sum(0)

    def sums(self) -> list[torch.Tensor]:
        """All sums of floats."""
        return [self.inputs, self.scores, *self.errors.values()]

    def divergence(self, weight: torch.Tensor, spec: LayerSpec, positions: int) -> float:
        """Return the loss by quantizing the layer, in nats for each output position; 0 for one that reads nothing."""
        if self.count == 0:
            return 0.0
        values = weight.detach().float()
        form = torch.zeros_like(self.inputs, dtype=torch.float64)
        if spec.weight is not None:
            params = None if spec.weight.is_cast else tensor_qparams(weight.detach(), spec.weight)
            error = fake_quantize(weight.detach(), params, spec.weight).float() - values
            form += self.inputs.double() * self._scored(error.square()).double()
        if spec.input is not None:
            form += self.errors[spec.input].double() * self._scored(values.square()).double()
        return float(form.sum()) / (2 * self.count * positions)

    def _scored(self, squares: torch.Tensor) -> torch.Tensor:
        """Sum over the output channels of their scores and the squares of a weight, for each input channel."""
        return self.scores @ squares


class EmbeddingMoments(Moments):
    """Sums over the tokens that embeddings are read for.

    Attributes:
        inputs: How often each token is read, of shape (num_embeddings,).
        scores: G, of shape (embedding_dim,).
        factor: That the table multiplies its rows with.
    """

    def __init__(self, layer: nn.Embedding) -> None:
        device = _place_of(layer)
        self.count = 0
        self.inputs = torch.zeros(layer.num_embeddings, device=device)
        self.scores = torch.zeros(layer.embedding_dim, device=device)
        self.errors = {}
        self.factor = lookup_factor(layer) or 1.0

    def add_inputs(self, x: torch.Tensor) -> None:
        """Add the tokens that are read."""
        self.count += x.numel()
        self.inputs += torch.bincount(x.flatten(), minlength=len(self.inputs)).to(self.inputs)

    def _scored(self, squares: torch.Tensor) -> torch.Tensor:
        return squares * self.factor**2 @ self.scores


def _place_of(layer: nn.Linear | nn.Embedding) -> torch.device:
    """Where a layer runs: a weight outside of the blocks that comes when its layer is called comes to the CPU."""
    return torch.device("cpu") if layer.weight.is_meta else layer.weight.device


class BatchedSums:
    """The moments of some layers, batch by batch.

    Where several processes have a part of the batches each, they add what one batch of each gave in the order of the
    data, so that the sums are those of one process to the bit.

    Args:
        moments: Of each layer, of the batches of this process since the last `add`.
    """

    def __init__(self, moments: Mapping[str, Moments]) -> None:
        self.moments = moments
        self._own = [x for of_layer in moments.values() for x in of_layer.sums()]
        self._totals = [torch.zeros_like(x) for x in self._own] if world() > 1 else self._own

    def add(self) -> None:
        """Add what one batch of each process gave; all of them call this as often, without a batch where one has less.

        The sums of a process alone are there as they are.
        """
        if world() == 1 or not self._own:
            return
        here = torch.cat(self._own)
        for of_rank in in_order([here]):
            for total, part in zip(self._totals, torch.split(of_rank, [len(x) for x in self._own]), strict=True):
                total += part
        for own in self._own:
            own.zero_()

    def finish(self) -> None:
        """Give the moments the sums over all batches of all processes."""
        counts = summed(torch.tensor([of_layer.count for of_layer in self.moments.values()]))
        for of_layer, count in zip(self.moments.values(), counts.tolist(), strict=True):
            of_layer.count = count
        for own, total in zip(self._own, self._totals, strict=True):
            own.copy_(total)


@contextmanager
def collecting(
    layers: Mapping[str, nn.Linear | nn.Embedding], specs: Sequence[TensorSpec]
) -> Iterator[dict[str, Moments]]:
    """Within: what runs forward and backward through the layers is added to their moments."""
    moments = {
        name: EmbeddingMoments(layer) if isinstance(layer, nn.Embedding) else Moments(layer, specs)
        for name, layer in layers.items()
    }

    def note(
        own: Moments, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        own.add_inputs(input_of(args, kwargs).detach())
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # it reads what no block gives: a timestep, a text
            output = output.detach().requires_grad_()
        output.register_hook(own.add_scores)  # type: ignore[no-untyped-call]
        return output

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(note, moments[name]), with_kwargs=True))
        yield moments
