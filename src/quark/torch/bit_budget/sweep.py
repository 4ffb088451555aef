"""Two passes over the data, block by block: forward, which keeps the inputs of each block; back, with the scores.

    forward:  for each block: run it on what the block before it gave, keep its inputs
    tail:     final norm and head; labels drawn from the model's own distribution; scores of the last block's outputs
    back:     for each block from the last: run it again with gradients, collect `Moments`, hand down the scores
    front:    embeddings, where a type is chosen for them: from the scores of the first block's inputs

One block is in memory, and what one pass keeps for the next lies on a `Tape`: a killed run goes on at its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import CalibrationError, NonFiniteError, NotSupportedError, QuarkError, StructureError
from quark.progress import progress
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.block_loop import (
    BlockWeights,
    Hidden,
    LoopState,
    is_inside,
    loop_over_blocks,
    on_device,
    record_inputs,
)
from quark.torch.bit_budget.groups import alike_experts, alike_in_block
from quark.torch.bit_budget.moments import BatchedSums, Moments, collecting
from quark.torch.bit_budget.tape import Tape
from quark.torch.calibration.distributed import from_first, part_of, rank, shared_work, summed, world
from quark.torch.calibration.drawn_labels import drawn_likelihood
from quark.torch.model.batches import calibration_step, evaluating, input_device
from quark.torch.model.blocks import WHOLE, BlockOutput, Call, find_blocks, passing_through

SEED = 0
"""Of the labels of the first batch; those of each next one have the next number, whichever process draws them."""

Losses = dict[str, list[float | None]]
"""Full name of a layer -> divergence in nats for each position, under each candidate; None: it does not fit."""


@dataclass(frozen=True)
class Swept:
    """What both passes found.

    Attributes:
        groups: Full names of the layers that must be alike.
        losses: Of each layer.
    """

    groups: list[list[str]]
    losses: Losses


class Sweep:
    """Both passes over one model.

    Args:
        model: Float model whose weights `weights` brings; its parameters need no gradient.
        layers: Full name of each linear layer -> its spec under each candidate; the token embeddings may be among
            them.
        data: BatchedSums as `quantize_model` takes them.
        weights: Brings and takes the weights of blocks.
        tape: Where a killed run goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Sequence[LayerSpec | None]],
        data: Sequence[Any],
        weights: BlockWeights,
        tape: Tape,
    ) -> None:
        self.model, self.layers, self.data, self.weights, self.tape = model, layers, data, weights, tape
        self.names = find_blocks(model)
        if self.names == [WHOLE]:
            raise NotSupportedError(
                f"{type(model).__name__} has no list of blocks, one of which could be measured at a time. Possible: "
                "name a scheme, and others for some layers (layer_config)."
            )

    def run(self) -> Swept:
        """Run both passes, or what a killed run left of them.

        Raises:
            CalibrationError: No data, or a layer that no batch reaches; names it.
            NonFiniteError: Scores hold NaN or Inf; names the block.
            NotSupportedError: The model gives no logits.
        """
        with evaluating(self.model), _without_gradients(self.model):
            calls, _ = record_inputs(self.model, {}, self.names, self.data, self.weights)
            self._forward(calls)
            if not self.tape.has(self._scores(len(self.names))) and self.tape.result("tail") is None:
                self._tail(calls[self.names[0]][0])
            left = [index for index in reversed(range(len(self.names))) if self.tape.result(f"block-{index}") is None]
            done = len(self.names) - len(left)
            for index in progress(left, "sensitivity", len(self.names), name=self.names.__getitem__, done=done):
                self._back(index, calls[self.names[index]])
            if self.tape.result("front") is None:
                self._front()
        return self._swept()

    def _embeddings(self) -> dict[str, nn.Embedding]:
        """The layers that are embeddings."""
        modules = {name: self.model.get_submodule(name) for name in self.layers}
        return {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}

    def _inputs(self, index: int) -> str:
        return f"inputs-{index}"

    def _scores(self, index: int) -> str:
        """Scores of the inputs of a block; behind the last one, of its outputs."""
        return f"scores-{index}"

    def _forward(self, calls: Mapping[str, list[Call]]) -> None:
        """Keep the inputs of each block, and the outputs of the last."""
        last = len(self.names)
        if self.tape.has(self._inputs(last)) or self.tape.result("tail") is not None:
            return
        done = next((index for index in range(last, 0, -1) if self.tape.has(self._inputs(index))), 0)

        def work(block: Block) -> tuple[Hidden, Hidden]:
            index = self.names.index(block.name)
            with torch.no_grad():
                outputs = [call.run(block.module) for call in block.calls]
            if index == 0:
                self.tape.keep(self._inputs(0), [call.hidden for call in block.calls])
            self.tape.keep(self._inputs(index + 1), outputs)
            return outputs, None

        state = LoopState(done, self.tape.read(self._inputs(done)) if done else None)
        loop_over_blocks(self.model, self.names, dict(calls), work, self.weights, state=state)

    def _tail(self, first: Call) -> None:
        """What is behind the blocks: the scores of their outputs, and the losses of layers there."""
        inside = {name for name in self.layers for block in self.names if is_inside(name, block)}
        outside = [name for name in self.layers if name not in inside and name not in self._embeddings()]
        output, scores, positions = BlockOutput(), [], 0
        block = self.model.get_submodule(self.names[0])
        with self.weights.around(self.names), torch.no_grad():
            device = input_device(self.model)
            here = first if self.weights.device is None else on_device(first, device)
            output.see(self.names[0], here, block)
            output.fix()
            layers = {name: cast(nn.Linear, self.model.get_submodule(name)) for name in outside}
            with torch.enable_grad(), collecting(layers, self._live(outside)) as moments:
                batches = BatchedSums(moments)
                outputs = self.tape.read(self._inputs(len(self.names)))
                for index, (batch, hidden) in enumerate(zip(part_of(self.data), outputs, strict=True)):
                    leaf = hidden.to(device).requires_grad_()
                    generator = torch.Generator().manual_seed(SEED + index * world() + rank())
                    likelihood, count = self._likelihood(batch, leaf, output, device, generator)
                    likelihood.backward()  # type: ignore[no-untyped-call]
                    assert leaf.grad is not None
                    scores.append(leaf.grad)
                    positions += count
                    batches.add()
                self._finish(batches, len(scores))
            positions = int(summed(torch.tensor(positions)))
            _require_finite("the outputs of the model", scores)
            losses = self._losses(moments, positions)
        self.tape.keep(self._scores(len(self.names)), scores)
        self.tape.keep_result("tail", {"positions": positions, "losses": losses, "groups": [[n] for n in outside]})

    def _likelihood(
        self, batch: Any, hidden: torch.Tensor, output: BlockOutput, device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """The log likelihood of labels drawn at each position, and the number of positions."""
        seen: list[Any] = []
        handle = self.model.register_forward_hook(lambda module, args, result: seen.append(result))
        try:
            with passing_through(self.model, self.names, lambda name, call: None, output):
                for name in self.names:
                    self.model.get_submodule(name).forward = lambda *args, **kwargs: output.of(hidden)
                calibration_step(self.model, batch, device, 0)
        finally:
            handle.remove()
        return drawn_likelihood(self.model, seen[0], batch, generator)

    def _back(self, index: int, calls: Sequence[Call]) -> None:
        """Collect the moments of one block, and hand the scores to the one before it."""
        name = self.names[index]
        inputs, scores = self.tape.read(self._inputs(index)), self.tape.read(self._scores(index + 1))
        own = [layer for layer in self.layers if is_inside(layer, name)]
        below: list[torch.Tensor] = []
        self.weights.bring(name)
        try:
            block = self.model.get_submodule(name)
            layers = {layer: cast(nn.Linear, self.model.get_submodule(layer)) for layer in own}
            here = [on_device(call.with_hidden(x), self.weights.device) for call, x in zip(calls, inputs, strict=True)]
            with torch.no_grad():
                groups = from_first(alike_in_block(name, block, own, here[0]))
            with torch.enable_grad(), collecting(layers, self._live(own)) as moments:
                batches = BatchedSums(moments)
                for call, score in zip(here, scores, strict=True):
                    leaf = call.hidden.detach().requires_grad_()
                    result = call.with_hidden(leaf).run(block)
                    result.backward(score.to(result.device))  # type: ignore[no-untyped-call]
                    assert leaf.grad is not None
                    below.append(leaf.grad.cpu() if self.weights.device is not None else leaf.grad)
                    batches.add()
                self._finish(batches, len(below))
            _require_finite(f"the block {name!r}", below)
            losses = self._losses(moments, self.tape.result("tail")["positions"])
        finally:
            self.weights.take(name)
        self.tape.keep(self._scores(index), below)
        self.tape.keep_result(f"block-{index}", {"losses": losses, "groups": groups})
        self.tape.drop(self._scores(index + 1))
        self.tape.drop(self._inputs(index + 1))

    def _front(self) -> None:
        """Collect the moments of the embeddings: from them to the first block the model runs again."""
        embeddings, losses = self._embeddings(), Losses()
        if embeddings:
            scores = self.tape.read(self._scores(0))
            with self.weights.around(self.names), torch.enable_grad(), _read_from_leaves(embeddings.values()):
                device = input_device(self.model)
                with collecting(embeddings, []) as moments:
                    batches = BatchedSums(moments)
                    for batch, score in zip(part_of(self.data), scores, strict=True):
                        hidden = self._first_hidden(batch, device)
                        hidden.backward(score.to(hidden.device))  # type: ignore[no-untyped-call]
                        batches.add()
                    self._finish(batches, len(scores))
                losses = self._losses(moments, self.tape.result("tail")["positions"])
        self.tape.keep_result("front", {"losses": losses, "groups": [[name] for name in embeddings]})

    def _first_hidden(self, batch: Any, device: torch.device) -> torch.Tensor:
        """What the first block gets of a batch."""

        def end(name: str, call: Call) -> None:
            raise _FirstBlockReachedError(call.hidden)

        with passing_through(self.model, self.names, end, BlockOutput()):
            try:
                calibration_step(self.model, batch, device, 0)
            except _FirstBlockReachedError as reached:
                return reached.hidden
        raise StructureError(f"The block {self.names[0]!r} is not reached. Possible: --exclude the embeddings.")

    def _finish(self, batches: BatchedSums, own: int) -> None:
        """The sums are whole, where this process has had `own` batches and others may have one more."""
        for _ in range(own, -(-len(self.data) // world())):
            batches.add()
        batches.finish()

    def _live(self, names: Iterable[str]) -> list[Any]:
        """The specs of the inputs that candidates quantize."""
        found = {spec.input for name in names for spec in self.layers[name] if spec is not None and spec.input}
        return sorted(found, key=str)

    def _losses(self, moments: Mapping[str, Moments], positions: int) -> dict[str, list[float | None]]:
        experts = {layer for group in alike_experts(self.layers) for layer in group}
        for name, own in moments.items():
            # An expert that no token reaches loses nothing here; its mixture is chosen by those that are reached.
            if name not in experts and (own.count == 0 or not bool(own.scores.any())):
                raise CalibrationError(
                    f"{name}: no output depends on this layer in the calibration data. Possible: other data, or "
                    "exclude it."
                )
        names = list(moments)

        def of_layer(index: int) -> list[float | None]:
            name = names[index]
            weight = cast(torch.Tensor, self.model.get_submodule(name).weight)
            try:
                return [
                    None if spec is None else moments[name].divergence(weight, spec, positions)
                    for spec in self.layers[name]
                ]
            except QuarkError as error:
                raise type(error)(f"{name}: {error}") from None

        return dict(zip(names, shared_work(len(names), of_layer, torch.device("cpu")), strict=True))

    def _swept(self) -> Swept:
        results = [self.tape.result(f"block-{index}") for index in range(len(self.names))]
        results += [self.tape.result("tail"), self.tape.result("front")]
        losses = {name: row for result in results for name, row in result["losses"].items()}
        return Swept([group for result in results for group in result["groups"]], losses)


class _FirstBlockReachedError(Exception):
    """Ends a forward at the first block."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@contextmanager
def _read_from_leaves(embeddings: Iterable[nn.Embedding]) -> Iterator[None]:
    """Within: what embeddings give takes a gradient, though no parameter does."""

    def ask(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach().requires_grad_()

    handles = [layer.register_forward_hook(ask) for layer in embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_finite(what: str, scores: Sequence[torch.Tensor]) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in scores):
        raise NonFiniteError(
            f"The scores of {what} hold NaN or Inf. Possible: a model in float32 or bfloat16, whose gradients do not "
            "overflow, and calibration data that it gives finite outputs for."
        )


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Within: parameters take no gradient, which would be as large as the model."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
