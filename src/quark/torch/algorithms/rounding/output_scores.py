"""Scores of outputs: how a unit of error in what a layer gives changes the distribution that the model gives.

    g = d log p(label) / d y,   label drawn from p itself;   G = sum over tokens of g g^T,  (out, out)

Both `ScorePasses` through the float model keep the scores of what each block gives; when its turn comes, each block
runs once more on the float model's inputs, and hands them down to its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.input_group import flat
from quark.torch.algorithms.score_passes import ScorePasses, without_gradients
from quark.torch.algorithms.tape import Tape
from quark.torch.calibration.distributed import summed
from quark.torch.layers import QuantLayer
from quark.torch.model.blocks import WHOLE


class OutputScores(ScorePasses):
    """The scores of what each block gives, for each batch.

    Args:
        model: The float model; not changed.
        blocks: Names of its blocks, in running order.
        data: Calibration batches.
        weights: Brings and takes the weights of blocks.
        tape: Where the scores lie, as large as the hidden states behind all blocks.

    Raises:
        NotSupportedError: The model gives no logits, or has no list of blocks.
        NonFiniteError: Scores hold NaN or Inf; names the block.
    """

    keeps_scores = True

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any], weights: BlockWeights, tape: Tape
    ) -> None:
        super().__init__(model, blocks, data, weights, tape)
        if WHOLE in blocks:
            raise NotSupportedError(f"{type(model).__name__} has no list of blocks, which fisher=True needs.")
        self.go_back("scores")
        tape.drop(self.inputs_of(0))

    def of_layers(self, block: Block) -> dict[str, torch.Tensor]:
        """Full name of each quantized linear layer of a float block -> G, of those that outputs depend on."""
        leaves = sorted({leaf for group in block.groups for leaf in group})
        found = {block.full(leaf): _zeros(block.layer(leaf)) for leaf in leaves}

        def add(name: str, gradient: torch.Tensor) -> None:
            rows = flat(gradient).float()
            found[name].addmm_(rows.T, rows)

        def watch(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(add, name))  # type: ignore[no-untyped-call]

        index = self.names.index(block.name)
        scores = self.tape.read(self.scores_of(index + 1))
        self.tape.drop(self.scores_of(index))  # of a block that is finished: a killed run does not read it again
        with ExitStack() as hooks, without_gradients(block.module), torch.enable_grad():
            for leaf in leaves:
                hook = partial(watch, block.full(leaf))
                hooks.enter_context(block.layer(leaf).register_forward_hook(hook))
            for call, score in zip(block.float_calls or block.calls, scores, strict=True):
                given = call.with_hidden(call.hidden.detach().requires_grad_()).run(block.module)
                given.backward(score.to(given.device))  # type: ignore[no-untyped-call]
        for leaf in leaves:
            summed(found[block.full(leaf)])
        return {name: of_layer for name, of_layer in found.items() if bool(of_layer.any())}


def _zeros(layer: QuantLayer) -> torch.Tensor:
    weight = cast(torch.Tensor, layer.weight)
    return torch.zeros(len(weight), len(weight), device=weight.device)
