"""Two passes over the data, block by block: forward, which keeps the inputs of each block; back, with the scores.

    g = d log p(label) / d y,   label drawn from p itself
    p = softmax(logits);   of a model without logits N(output, 1), whose likelihood is a squared error

    forward:  for each block: run it on what the block before it gave, keep its inputs
    tail:     final norm and head; labels drawn from the model's own distribution; scores of the last block's outputs
    back:     for each block from the last: run it again with gradients, hand down the scores

One block is in memory, and what one pass keeps for the next lies on a `PassStore`: a killed run goes on at its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from quark.base.progress import progress
from quark.errors import NonFiniteError, NotSupportedError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.block_loop import (
    Hidden,
    LoopState,
    between_blocks,
    loop_over_blocks,
    record_inputs,
)
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.calibration.distributed import part_of, rank, summed, world
from quark.torch.calibration.divergence import log_probabilities
from quark.torch.calibration.work_device import WorkDevice, bytes_of
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.model.batches import calibration_step, evaluating, input_device, named_outputs, to_device, to_host
from quark.torch.model.blocks import Call
from quark.torch.model.blocks.after_blocks import blocks_aside, given_around

SEED = 0
"""Of the labels of the first batch; those of each next one have the next number, whichever process draws them."""
TAIL = "tail"
"""The result of what runs after the blocks."""


class ScorePasses:
    """Both passes over one model. Subclasses see the gradients of each part of it.

    Args:
        model: Float model whose weights `weights` brings; it is not changed.
        names: Of its blocks, in running order.
        data: Batches as `quantize_model` takes them.
        weights: Brings and takes the weights of blocks.
        store: Where a killed run goes on.
    """

    keeps_scores: ClassVar[bool] = False
    """True where the scores of outputs of blocks stay in the store."""
    needs_logits = False
    """True where a model without logits is refused; else its loss is the squared error of its outputs."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], data: Sequence[Any], weights: BlockWeights, store: PassStore
    ) -> None:
        self.model, self.names, self.data, self.weights, self.store = model, list(names), data, weights, store

    @contextmanager
    def watching(self, block: str | None) -> Iterator[Callable[[], None]]:
        """Within: a block, None for what runs after the blocks, runs forward and back; call what it gives a batch."""
        yield lambda: None

    def result(self, block: str | None, call: Call | None, positions: int) -> dict[str, Any]:
        """Return the tensors that are kept of a part that was watched, while its weights are there.

        Args:
            block: Its name; None for what runs after the blocks.
            call: Its first call; None after the blocks.
            positions: Of all data, at which something is predicted.
        """
        return {}

    def go_back(self, loop: str) -> None:
        """Run both passes, or what a killed run left of them.

        Args:
            loop: What the way back is called where it says how far it is.

        Raises:
            CalibrationError: No data. NonFiniteError: Scores hold NaN or Inf; names the block.
            NotSupportedError: The model gives no logits.
        """
        with evaluating(self.model), without_gradients(self.model):
            calls, _ = record_inputs(self.model, {}, self.names, self.data, self.weights)
            self._forward(calls, f"{loop}, forward")
            if self.store.result(TAIL) is None:
                self._tail(calls)
            left = [index for index in reversed(range(len(self.names))) if self.store.result(f"block-{index}") is None]
            done = len(self.names) - len(left)
            with between_blocks(self.model, self.names, calls, self.weights):
                for index in progress(left, loop, len(self.names), name=self.names.__getitem__, done=done):
                    self._back(index, calls[self.names[index]])

    def inputs_of(self, index: int) -> str:
        """Name in the store of the inputs of a block; after the last one, of its outputs."""
        return f"inputs-{index}"

    def scores_of(self, index: int) -> str:
        """Name in the store of the scores of the inputs of a block; after the last one, of its outputs."""
        return f"scores-{index}"

    def _forward(self, calls: Mapping[str, list[Call]], loop: str) -> None:
        """Keep the inputs of each block, and the outputs of the last."""
        last = len(self.names)
        if self.store.has(self.inputs_of(last)) or self.store.result(TAIL) is not None:
            return
        done = next((index for index in range(last, 0, -1) if self.store.has(self.inputs_of(index))), 0)

        def work(block: Block) -> tuple[Hidden, Hidden]:
            index = self.names.index(block.name)
            with torch.no_grad(), _in_float(block.module):
                outputs = block.run(block.calls)
            if index == 0:
                self.store.keep(self.inputs_of(0), [call.hidden for call in block.calls])
            self.store.keep(self.inputs_of(index + 1), outputs)
            return outputs, None

        state = LoopState(done, self.store.read(self.inputs_of(done)) if done else None)
        loop_over_blocks(self.model, self.names, dict(calls), work, self.weights, state=state, loop=loop)

    def _tail(self, calls: Mapping[str, list[Call]]) -> None:
        """Run the part after the blocks, and keep the scores of its inputs."""
        scores, positions = [], 0
        with self.weights.around(self.names), _in_float(self.model), torch.no_grad():
            device, finite = input_device(self.model), []
            arounds = given_around(self.model, self.names, calls[self.names[0]])
            with torch.enable_grad(), self.watching(None) as count_batch:
                outputs = self.store.read(self.inputs_of(len(self.names)))
                for index, (batch, hidden) in enumerate(zip(part_of(self.data), outputs, strict=True)):
                    leaf = to_device(hidden, device).detach().requires_grad_()
                    generator = torch.Generator().manual_seed(SEED + index * world() + rank())
                    likelihood, count = self._likelihood(batch, leaf, arounds[index], device, generator)
                    likelihood.backward()  # type: ignore[no-untyped-call]
                    assert leaf.grad is not None
                    scores.append(to_host(leaf.grad))
                    finite.append(torch.isfinite(leaf.grad).all())
                    positions += count
                    count_batch()
            positions = int(summed(torch.tensor(positions)))
            _require_finite("the outputs of the model", finite)
            result = self.result(None, None, positions)
        self.store.keep(self.scores_of(len(self.names)), scores)
        self.store.keep_result(TAIL, {"positions": positions, **result})

    def _likelihood(
        self,
        batch: Any,
        hidden: torch.Tensor,
        around: Callable[[int, torch.Tensor], Any],
        device: torch.device,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, int]:
        """The log likelihood of labels drawn at each position, and the number of positions."""
        seen: list[Any] = []
        with ExitStack() as aside:
            handle = self.model.register_forward_hook(lambda module, args, result: seen.append(result))
            aside.callback(handle.remove)
            aside.enter_context(blocks_aside(self.model, self.names, around, hidden))
            calibration_step(self.model, batch, device, 0)
        return _drawn_likelihood(self.model, seen[0], generator, self.needs_logits)

    def _back(self, index: int, calls: Sequence[Call]) -> None:
        """Watch one block, and hand the scores to the one before it."""
        name = self.names[index]
        inputs, scores = self.store.read(self.inputs_of(index)), self.store.read(self.scores_of(index + 1))
        below: list[torch.Tensor] = []
        finite: list[torch.Tensor] = []
        self.weights.bring(name)
        try:
            block = self.model.get_submodule(name)
            place = WorkDevice.of(self.weights.where(block), bytes_of(calls))
            here = place.calls(call.with_hidden(x) for call, x in zip(calls, inputs, strict=True))
            with torch.enable_grad(), _in_float(block), self.watching(name) as count_batch:
                for call, score in zip(here, scores, strict=True):
                    call = call.loaded()
                    leaf = call.hidden.detach().requires_grad_()
                    given = call.with_hidden(leaf).run(block)
                    given.backward(to_device(score, given.device))  # type: ignore[no-untyped-call]
                    assert leaf.grad is not None
                    below.append(to_host(leaf.grad))
                    finite.append(torch.isfinite(leaf.grad).all())
                    count_batch()
            _require_finite(f"the block {name!r}", finite)
            result = self.result(name, here[0].loaded(), self.store.result(TAIL)["positions"])
        finally:
            self.weights.take(name)
        self.store.keep(self.scores_of(index), below)
        self.store.keep_result(f"block-{index}", result)
        if not self.keeps_scores:
            self.store.drop(self.scores_of(index + 1))
        self.store.drop(self.inputs_of(index + 1))


def _in_float(module: nn.Module) -> AbstractContextManager[None]:
    """Within: what was brought runs in float, whatever its layers will be."""
    return quantizers_off([layer for layer in module.modules() if isinstance(layer, QuantLayer)])


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Within: parameters take no gradient, which would be as large as they are."""
    asking = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def _require_finite(what: str, finite: Sequence[torch.Tensor]) -> None:
    """Raise NonFiniteError unless the scores of all batches are finite, of which there is one flag each."""
    all_are = all(torch.stack(list(finite)).tolist()) if finite else True
    if int(summed(torch.tensor(int(not all_are)))):  # so that all processes end
        raise NonFiniteError(
            f"The scores of {what} hold NaN or Inf. Possible: a model in float32 or bfloat16, whose gradients do not "
            "overflow, and calibration data that it gives finite outputs for."
        )


def _drawn_likelihood(
    model: nn.Module, result: Any, generator: torch.Generator, needs_logits: bool
) -> tuple[torch.Tensor, int]:
    """The log likelihood of labels drawn at each position, and the number of positions, which all are real.

    Args:
        model: Named where it gives nothing.
        result: What it returned: logits of shape (batch, positions, vocabulary), or other tensors, of which the largest
            is taken (the prediction of a denoiser); its values are positions.
        generator: Draws, on the CPU.
        needs_logits: Whether nothing else is taken.

    Raises:
        NotSupportedError: The model gives no floating-point tensor, or no logits where they are needed.
    """
    given = dict(named_outputs(result))
    if not given:
        raise NotSupportedError(f"{type(model).__name__} gives no floating-point tensor, by which a loss is measured.")
    if "logits" not in given and not needs_logits:
        y = max(given.values(), key=torch.Tensor.numel).float()
        noise = torch.empty(y.shape).normal_(generator=generator).to(y.device, non_blocking=True)
        return -(y - (y.detach() + noise)).square().sum() / 2, y.numel()
    rows = log_probabilities(result, type(model).__name__).flatten(0, -2)
    # What `torch.multinomial` draws on a CPU, where the model is: its probabilities are not waited for.
    noise = torch.empty(rows.shape).exponential_(1, generator=generator).to(rows.device, non_blocking=True)
    labels = (rows.detach().exp() / noise).argmax(-1, keepdim=True)
    return rows.gather(1, labels).sum(), len(rows)
