"""One block after the other, each on what the blocks before it return: the loop of all that works block by block.

    for each block:   bring its weights;   work on it;   hand it over;   take its weights away
                      its outputs are the inputs of the next block

Only one block's inputs are in memory. Where the weights of all blocks are, bringing and taking do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.base.progress import progress
from quark.core.checks import gathered
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.calibration.calibrate import scales_of_embeddings
from quark.torch.calibration.device_memory import naming_what_fills
from quark.torch.calibration.distributed import part_of
from quark.torch.calibration.work_device import Recorded, WorkDevice, bytes_of, settle
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.model.blocks import Call, record_calls
from quark.torch.model.blocks.streams import StreamCall

Hidden = list[torch.Tensor] | None
"""Outputs of a block, one for each batch; None where nothing has to run."""


@dataclass
class LoopState:
    """The state from which a run goes on after a finished block.

    Attributes:
        done: Number of blocks that are finished.
        hidden: Inputs of the next block, one for each batch; None before the first, and where nothing has to run.
        float_hidden: The same in the float model, where an algorithm compares with it.
        observed: The same in the model in which ranges are observed, where some are; see `Block.observed_calls`.
    """

    done: int = 0
    hidden: Hidden = None
    float_hidden: Hidden = None
    observed: Hidden = None


def record_inputs(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    names: list[str],
    data: Iterable[Any],
    weights: BlockWeights,
    needs_float: bool = False,
) -> tuple[dict[str, list[Call]], LoopState]:
    """The call of each block for each of this process's batches; see `record_calls`.

    Embeddings before the blocks are quantized already, so that algorithms make up for their errors too.

    Args:
        model: Holds the blocks.
        layers: Full name -> quantized layer.
        names: Of the blocks, in running order.
        data: Batches as `quantize_model` takes them.
        weights: Brings what is not in a block.
        needs_float: Whether an algorithm compares with the float model.

    Returns:
        The calls, and the state that the loop starts from.
    """
    embeddings = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.Embedding) and layer.spec.weight and is_outside(name, names)
    }
    state = LoopState()

    def recorded(data: Iterable[Any]) -> dict[str, list[Call]]:
        return record_calls(model, names, part_of(data), Recorded(weights.device))

    with weights.around(names), quantizers_off(layers.values()):
        if embeddings and needs_float:
            data = data if isinstance(data, Sequence) else list(data)
            state.float_hidden = [call.hidden for call in recorded(data)[names[0]]]
        with scales_of_embeddings(embeddings, weights.tables_in_file):
            return recorded(data), state


@contextmanager
def between_blocks(
    model: nn.Module, names: Sequence[str], calls: Mapping[str, list[Call]], weights: BlockWeights
) -> Iterator[None]:
    """Within: what is outside the blocks runs in float where the model runs for what a block reads (`StreamCall`)."""
    first = (each[0] for each in calls.values() if each)
    if weights.whole or not any(isinstance(call, StreamCall) and call.is_computed for call in first):
        yield
        return
    outside = [
        module for name, module in model.named_modules() if isinstance(module, QuantLayer) and is_outside(name, names)
    ]
    with weights.around(names), quantizers_off(outside):
        weights.take(names[0])  # it is brought when its turn comes
        yield


def loop_over_blocks(
    model: nn.Module,
    names: Sequence[str],
    calls: dict[str, list[Call]],
    work: Callable[[Block], tuple[Hidden, ...]],
    weights: BlockWeights,
    shared_scale_groups: Sequence[Sequence[str]] = (),
    finish: Callable[[str, LoopState], None] | None = None,
    state: LoopState | None = None,
    loop: str = "blocks",
) -> None:
    """Work on each block.

    Args:
        model: Holds the blocks.
        names: Of the blocks, in running order.
        calls: From `record_inputs`, emptied on the way; none where nothing has to run.
        work: Gets a block; returns its outputs, those of the float block where an algorithm needs them, and those of
            the block in which ranges are observed where some are.
        weights: Brings and takes the weights.
        shared_scale_groups: Leaf names of layers with one second-level weight scale.
        finish: Called with each finished block while its weights are there, and with what going on needs.
        state: Where an earlier run stopped.
        loop: What it is called where it says how far it is.
    """
    state, groups = state or LoopState(), shared_scale_groups
    for name in names[: state.done]:
        calls.pop(name, None)
    place_of = partial(WorkDevice.of, size=bytes_of(next(iter(calls.values()), [])))  # of the next block
    size = partial(_weights_in, model)
    left = progress(names[state.done :], loop, len(names), name=_shown, done=state.done, size=size)
    with between_blocks(model, names, calls, weights):
        for index, name in enumerate(left, state.done):
            try:
                with naming_what_fills(name, weights.device):
                    weights.bring(name)
                    place = place_of(weights.where(model.get_submodule(name)))
                    own_calls = place.calls(calls.pop(name, []))
                    # Not bound to a name, so that its inputs are freed when its outputs are there.
                    with gathered():
                        state = LoopState(index + 1, *work(_block(model, name, own_calls, place, state, groups)))
                if place.on_host:
                    settle(place.device)
                if index + 1 == len(names):
                    state = LoopState(index + 1)  # nothing runs on what the last one returns, which may be no tensor
                if finish is not None:
                    finish(name, state)
            finally:
                weights.take(name)


def _weights_in(model: nn.Module, name: str) -> float:
    """How many weights a block has, in memory or not."""
    return float(sum(parameter.numel() for parameter in model.get_submodule(name).parameters()))


def _shown(name: str) -> str:
    return name or "the model"


def _block(
    model: nn.Module, name: str, calls: list[Call], place: WorkDevice, state: LoopState, groups: Sequence[Sequence[str]]
) -> Block:
    block = model.get_submodule(name)
    moved: dict[int, torch.Tensor] = {}  # what two series share stays shared

    def own(hidden: Hidden) -> list[Call]:
        if hidden is None:
            return list(calls)
        for x in hidden:
            if id(x) not in moved:
                moved[id(x)] = place.waiting(x) if calls else x
        return [call.with_hidden(moved[id(x)]) for call, x in zip(calls, hidden, strict=True)]

    float_hidden = state.float_hidden or state.hidden
    return Block(name, block, own(state.hidden), own(float_hidden), own(state.observed), groups, place)


def is_inside(name: str, block: str) -> bool:
    """Return True where a tensor or layer belongs to a block."""
    return not block or name.startswith(f"{block}.")


def is_outside(name: str, blocks: Iterable[str]) -> bool:
    """Return True where a tensor or layer belongs to none of the blocks."""
    return not any(is_inside(name, block) for block in blocks)


def layers_inside(layers: Mapping[str, QuantLayer], block: str) -> dict[str, QuantLayer]:
    """The layers of a block, by their full names."""
    return {name: layer for name, layer in layers.items() if is_inside(name, block)}
