"""Scores of outputs: how a unit of error in what a layer gives changes the distribution that the model gives.

    g = d log p(label) / d y,   label drawn from p itself;   G = sum over tokens of g g^T,  (out, out)

One pass forward and back through the float model keeps the scores of what each block gives; when its turn comes, each
block runs once more on the float model's inputs, and hands them down to its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.errors import NonFiniteError, NotSupportedError, StructureError
from quark.progress import progress
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import flat
from quark.torch.calibration.drawn_labels import drawn_likelihood
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.blocks import WHOLE

SEED = 0
"""Of the labels of the first batch; those of each next one have the next number."""


class OutputScores:
    """The scores of what each block gives, for each batch.

    Args:
        model: The float model, in memory; not changed.
        blocks: Names of its blocks, in running order.
        data: Calibration batches.

    Raises:
        NotSupportedError: The model gives no logits, or has no list of blocks.
        StructureError: A block returns no tensor. NonFiniteError: Scores hold NaN or Inf; names the block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> None:
        if WHOLE in blocks:
            raise NotSupportedError(f"{type(model).__name__} has no list of blocks, which fisher=True needs.")
        self.blocks: dict[str, list[torch.Tensor]] = {name: [] for name in blocks}
        device = input_device(model)
        with evaluating(model), _without_gradients(model), torch.enable_grad(), self._kept(model):
            for index, batch in enumerate(progress(data, "scores", len(data))):
                generator = torch.Generator().manual_seed(SEED + index)
                likelihood, _ = drawn_likelihood(model, forward_batch(model, batch, device), batch, generator)
                likelihood.backward()  # type: ignore[no-untyped-call]
        for name, scores in self.blocks.items():
            if not all(bool(torch.isfinite(x).all()) for x in scores):
                raise NonFiniteError(f"The scores of the block {name!r} hold NaN or Inf. Possible: a float32 model.")

    @contextmanager
    def _kept(self, model: nn.Module) -> Iterator[None]:
        """Within: the scores of what blocks give are kept when they are known."""

        def keep(name: str, module: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, (tuple, list)) else output  # as `Call.run` reads it
            if not isinstance(hidden, torch.Tensor):
                raise StructureError(f"{name} returns a {type(hidden).__name__}; fisher=True reads one tensor.")
            if not hidden.requires_grad:  # the first block: no parameter asks for a gradient
                hidden = hidden.detach().requires_grad_().clone()
            hidden.register_hook(self.blocks[name].append)  # type: ignore[no-untyped-call]
            return (hidden, *output[1:]) if isinstance(output, (tuple, list)) else hidden

        with ExitStack() as hooks:
            for name in self.blocks:
                hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(keep, name)))
            yield

    def of_layers(self, block: Block) -> dict[str, torch.Tensor]:
        """Full name of each quantized linear layer of a float block -> G, of those that outputs depend on."""
        found: dict[str, torch.Tensor] = {}

        def add(name: str, gradient: torch.Tensor) -> None:
            rows = flat(gradient).float()
            if name not in found:
                found[name] = rows.new_zeros(rows.shape[-1], rows.shape[-1])
            found[name].addmm_(rows.T, rows)

        def watch(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(add, name))  # type: ignore[no-untyped-call]

        scores = self.blocks.pop(block.name)
        with ExitStack() as hooks, _without_gradients(block.module), torch.enable_grad():
            for leaf in sorted({leaf for group in block.groups for leaf in group}):
                hook = partial(watch, block.full(leaf))
                hooks.enter_context(block.layer(leaf).register_forward_hook(hook))
            for call, score in zip(block.float_calls or block.calls, scores, strict=True):
                given = call.with_hidden(call.hidden.detach().requires_grad_()).run(block.module)
                given.backward(score.to(given.device))  # type: ignore[no-untyped-call]
        return {name: of_layer for name, of_layer in found.items() if bool(of_layer.any())}


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Within: parameters take no gradient, which would be as large as they are."""
    asking = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
