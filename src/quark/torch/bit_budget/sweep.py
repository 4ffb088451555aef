"""The losses of layers under candidates, from the moments that both `ScorePasses` collect on their way back.

After them, where a type is chosen for embeddings: these, from the scores of the first block's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.core.spec import LayerSpec
from quark.errors import CalibrationError, NotSupportedError, QuarkError, StructureError, one_line
from quark.torch.algorithms.block_loop import is_inside
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.algorithms.score_passes import TAIL, ScorePasses, without_gradients
from quark.torch.bit_budget.moments import BatchedSums, Moments, collecting
from quark.torch.bit_budget.sensitivity import groups_in_block
from quark.torch.calibration.distributed import from_first, part_of, shared_work, world
from quark.torch.formats.fused_groups import architectures, mixtures_of
from quark.torch.model.batches import calibration_step, evaluating, input_device, to_device
from quark.torch.model.blocks import WHOLE, BlockOutput, Call, find_blocks, passing_through
from quark.torch.model.blocks.streams import StreamCall, listed_blocks, record_streams, stream_blocks

Losses = dict[str, list[float | None]]
"""Full name of a layer -> divergence in nats for each position, under each candidate; None: it does not fit."""


@dataclass(frozen=True)
class Swept:
    """The results of both passes.

    Attributes:
        groups: Full names of the layers that need one scheme.
        losses: Of each layer.
    """

    groups: list[list[str]]
    losses: Losses


class Sweep(ScorePasses):
    """Both passes over one model.

    Args:
        model: Float model whose weights `weights` brings; its parameters need no gradient.
        layers: Full name of each linear layer -> its spec under each candidate; the token embeddings may be among
            them.
        data: Batches as `quantize_model` takes them.
        weights: Brings and takes the weights of blocks.
        store: Where a killed run goes on.
        programs: Servers; what one of them makes one layer of has one scheme.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Sequence[LayerSpec | None]],
        data: Sequence[Any],
        weights: BlockWeights,
        store: PassStore,
        programs: Sequence[str],
    ) -> None:
        super().__init__(model, _blocks(model, layers, data, weights), data, weights, store)
        self.programs, self.architectures = programs, architectures(model)
        self.layers = layers
        self._moments: dict[str, Moments] = {}
        if self.names == [WHOLE]:
            raise NotSupportedError(
                f"{type(model).__name__} has no list of blocks that could be measured one at a time. Possible: "
                "name a scheme, and others for some layers (layer_config)."
            )

    def run(self) -> Swept:
        """Run both passes, or what a killed run left of them.

        Raises:
            CalibrationError: No data, or a layer that no batch reaches; names it.
            NonFiniteError: Scores hold NaN or Inf; names the block.
            NotSupportedError: The model gives no logits.
        """
        self.go_back("sensitivity")
        if self.store.result("front") is None:
            with evaluating(self.model), without_gradients(self.model):
                self._front()
        results = [self.store.result(f"block-{index}") for index in range(len(self.names))]
        results += [self.store.result(TAIL), self.store.result("front")]
        losses = {name: row for result in results for name, row in result["losses"].items()}
        return Swept([group for result in results for group in result["groups"]], losses)

    @contextmanager
    def watching(self, block: str | None) -> Iterator[Callable[[], None]]:
        """Within: moments of the layers there are collected."""
        if block is not None:
            names = [name for name in self.layers if is_inside(name, block)]
        else:  # the linear layers after the blocks
            inside = {name for name in self.layers for block in self.names if is_inside(name, block)}
            names = [name for name in self.layers if name not in inside and name not in self._embeddings()]
        specs = {spec.input for name in names for spec in self.layers[name] if spec is not None and spec.input}
        layers = {name: cast(nn.Linear, self.model.get_submodule(name)) for name in names}
        with collecting(layers, sorted(specs, key=str)) as self._moments, _all_batches(self._moments, self.data) as add:
            yield add

    def result(self, block: str | None, call: Call | None, positions: int) -> dict[str, Any]:
        """The losses of its layers, and which of them need one scheme."""
        # The last of blocks of several streams gives all of them, and the model reads one: queries of others are idle.
        losses = self._losses(self._moments, positions, isinstance(call, StreamCall))
        if block is None or call is None:
            return {"losses": losses, "groups": [[name] for name in losses]}
        module = self.model.get_submodule(block)
        with torch.no_grad():
            groups = from_first(groups_in_block(block, module, list(losses), call, self.architectures, self.programs))
        return {"losses": losses, "groups": groups}

    def _embeddings(self) -> dict[str, nn.Embedding]:
        modules = {name: self.model.get_submodule(name) for name in self.layers}
        return {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}

    def _front(self) -> None:
        """Collect the moments of the embeddings: from them to the first block the model runs again."""
        embeddings, losses = self._embeddings(), Losses()
        if embeddings:
            scores = self.store.read(self.scores_of(0))
            with self.weights.around(self.names), torch.enable_grad(), _read_from_leaves(embeddings.values()):
                device = input_device(self.model)
                with collecting(embeddings, []) as moments, _all_batches(moments, self.data) as add:
                    for batch, score in zip(part_of(self.data), scores, strict=True):
                        hidden = self._first_hidden(batch, device)
                        hidden.backward(to_device(score, hidden.device))  # type: ignore[no-untyped-call]
                        add()
                losses = self._losses(moments, self.store.result(TAIL)["positions"])
        self.store.keep_result("front", {"losses": losses, "groups": [[name] for name in embeddings]})

    def _first_hidden(self, batch: Any, device: torch.device) -> torch.Tensor:
        """Return the hidden state that the first block gets of a batch."""

        def end(name: str, call: Call) -> None:
            raise _FirstBlockReachedError(call.hidden)

        with passing_through(self.model, self.names, end, BlockOutput()):
            try:
                calibration_step(self.model, batch, device, 0)
            except _FirstBlockReachedError as reached:
                return reached.hidden
        raise StructureError(f"The block {self.names[0]!r} is not reached. Possible: --exclude the embeddings.")

    def _losses(
        self, moments: Mapping[str, Moments], positions: int, streams: bool = False
    ) -> dict[str, list[float | None]]:
        experts = {layer for group in mixtures_of(self.layers).values() for layer in group}
        for name, own in moments.items():
            # An expert that no token reaches loses nothing here; its mixture is chosen by those that are reached.
            if name not in experts and (own.count == 0 or not bool(own.scores.any())):
                if own.count and streams:
                    logger.info("%s: nothing reads what it gives; it gets the smallest candidate.", name)
                    continue
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


def _blocks(model: nn.Module, layers: Iterable[str], data: Sequence[Any], weights: BlockWeights) -> list[str]:
    """Names of the blocks: those of one list, or of all that a batch runs through where the layers lie in several."""
    names, listed = find_blocks(model), listed_blocks(model)
    beyond = [name for name in listed if name not in names]
    if not beyond or not any(is_inside(layer, block) for layer in layers for block in beyond):
        return names
    try:
        with weights.around(listed), without_gradients(model):
            found = stream_blocks(model, data[0])
            record_streams(model, found, data[:1], lambda call, _: call)
    except StructureError as error:
        logger.info("Blocks of one list are measured: %s", one_line(error))
        return names
    return names if {*found} <= {*names} else found


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


@contextmanager
def _all_batches(moments: Mapping[str, Moments], data: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Within: call what it gives after each batch; afterwards, moments are sums over those of all processes."""
    batches, own = BatchedSums(moments), 0

    def add() -> None:
        nonlocal own
        own += 1
        batches.add()

    yield add
    for _ in range(own, -(-len(data) // world())):
        batches.add()
    batches.finish()
