"""Quantizes a model one block at a time, for models whose blocks are not all in memory, or not all on the device.

    for each block:   bring its weights
                      algorithms; scales of the weights; static activations observed on the block's own inputs
                      hand the block over; take its weights away
                      its outputs are the inputs of the next block

The numbers are those of `quantize_model`: a block computes the same on the same inputs, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from quark.errors import CalibrationError, NotSupportedError
from quark.log import progress
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.block_sweep import blocks_path, is_inside, refuse_processes, sweep_block, with_hidden
from quark.torch.calibration.calibrate import calibrate_weights, finish_ranges, share_scales, waiting_activations
from quark.torch.calibration.distributed import part_of
from quark.torch.calibration.experts import sibling_groups
from quark.torch.config.config import QConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import layer_quantizers, observing, quantizers_off
from quark.torch.model.batches import evaluating
from quark.torch.model.blocks import Call, find_blocks, record_calls


class OnDevice:
    """Blocks of a model in memory that visit a device while they are worked on.

    Args:
        model: Where it is, it stays, but for the blocks that are kept.
        device: Where blocks run; default: the first GPU, else the CPU.
        resident: So many blocks, the first ones, stay on the device.
    """

    whole = True

    def __init__(self, model: nn.Module, device: torch.device | None = None, resident: int = 0) -> None:
        self.model, self.resident = model, resident
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.home = next((p.device for p in model.parameters()), torch.device("cpu"))

    def bring(self, name: str) -> None:
        """Move the block to the device."""
        self.model.get_submodule(name).to(self.device)

    def take(self, name: str) -> None:
        """Move it back, unless it stays."""
        if self.resident > 0:
            self.resident -= 1
        else:
            self.model.get_submodule(name).to(self.home)

    def around(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Everything is where the batches go."""
        return nullcontext()


@dataclass
class State:
    """Where a run stands.

    Attributes:
        done: Number of blocks that are finished.
        hidden: Inputs of the next block, one for each batch; None before the first, and where nothing has to run.
        float_hidden: The same in the float model, where an algorithm compares with it.
    """

    done: int = 0
    hidden: list[torch.Tensor] | None = None
    float_hidden: list[torch.Tensor] | None = None


class Weights(Protocol):
    """Where the weights of a block come from, and where they go."""

    device: torch.device
    whole: bool
    """Whether all weights are there all the time, so that an algorithm may see the whole model."""

    def bring(self, name: str) -> None:
        """Make the weights of a block usable, on `device`."""

    def take(self, name: str) -> None:
        """The block is finished."""

    def around(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Within: what is not in a block, and the first block, can run where the batches are."""


def quantize_blocks(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Iterable[Any] | None,
    config: QConfig,
    weights: Weights,
    finish: Callable[[str, State], None] = lambda block, state: None,
    state: State | None = None,
) -> None:
    """Quantize the layers in the blocks of a model; those outside are left to the caller.

    Args:
        model: Layers are replaced and not calibrated.
        layers: Full name -> quantized layer.
        algorithms: In the order in which they run.
        data: Calibration batches; None where nothing needs them.
        config: Of the model: which layers share scales.
        weights: Brings and takes the weights.
        finish: Called with each finished block while its weights are there, and with what going on needs.
        state: Where an earlier run stopped.

    Raises:
        CalibrationError: No data for what needs it.
        NotSupportedError: A static activation outside the blocks, or an algorithm that changes the whole model.
    """
    state = state or State()
    refuse_processes(algorithms)
    names = find_blocks(model, blocks_path(model, algorithms))
    refuse_attention(config)
    if not weights.whole:
        refuse_whole(algorithms)
    for algorithm in algorithms:
        algorithm.prepare(model, names, layers)
    stages = [algorithm for algorithm in algorithms if algorithm.reads_inputs]
    waiting = waiting_activations(layers)
    _refuse_outside(waiting, names)
    calls: dict[str, list[Call]] = {}
    if stages or waiting:
        calls = _record(model, layers, names, data, weights, [*map(_name_of, stages), *waiting])
    for index, name in enumerate(progress(names, "blocks", total=len(names))):
        own = [_on(call, weights.device) for call in calls.pop(name, [])]
        if index < state.done:
            continue
        inside = {layer: module for layer, module in layers.items() if is_inside(layer, name)}
        weights.bring(name)
        try:
            state = State(index + 1, *_quantize_block(model, name, inside, own, stages, config, state))
            finish(name, state)
        finally:
            weights.take(name)


def _quantize_block(
    model: nn.Module,
    name: str,
    inside: Mapping[str, QuantLayer],
    calls: list[Call],
    stages: Sequence[Algorithm],
    config: QConfig,
    state: State,
) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
    """Quantize one block; its outputs, and those of the float block."""
    module = model.get_submodule(name)
    own = with_hidden(calls, state.hidden)
    hidden: list[torch.Tensor] | None = None
    float_hidden: list[torch.Tensor] | None = None
    groups = sibling_groups(model, config.shared_scale_groups)
    with torch.no_grad(), evaluating(module):
        if stages:
            sync = config.sync_moe_expert_input_amax
            block = Block(name, module, own, with_hidden(calls, state.float_hidden or state.hidden), groups)
            with quantizers_off(inside.values()):
                hidden, float_hidden = sweep_block(block, inside, stages, any(s.needs_float for s in stages), sync)
        calibrate_weights(inside)
        share_scales(inside, groups)
        waiting = waiting_activations(inside)
        if calls and (waiting or not stages):
            with observing(layer_quantizers(inside.values()), waiting):
                outputs = [call.run(module) for call in own]
            finish_ranges(waiting, config)
            hidden = hidden or outputs
    return hidden, float_hidden


def _record(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    names: list[str],
    data: Iterable[Any] | None,
    weights: Weights,
    needing: list[str],
) -> dict[str, list[Call]]:
    if data is None:
        raise CalibrationError(
            f"{', '.join(needing[:2])}{', ...' if needing[2:] else ''}: needs calibration data. Possible: pass a "
            "dataloader, or choose a dynamic or weight-only scheme."
        )
    with weights.around(names), quantizers_off(layers.values()):
        return record_calls(model, names, part_of(data))


def refuse_attention(config: QConfig) -> None:
    """Raise NotSupportedError for scales that belong to the attention of all blocks."""
    for name in ("kv_cache_quant_config", "softmax_quant_spec"):
        if getattr(config, name):
            raise NotSupportedError(f"{name} is not possible block by block. Possible: quantize_model, standard flow.")


def refuse_whole(algorithms: Sequence[Algorithm]) -> None:
    """Raise NotSupportedError for an algorithm that needs the whole model at once."""
    for algorithm in algorithms:
        if algorithm.needs_whole:
            raise NotSupportedError(
                f"{_name_of(algorithm)} changes the whole model before the first block, which block by block "
                "is never in memory. Possible: quantize_model on the model in memory."
            )


def _name_of(algorithm: Algorithm) -> str:
    return type(algorithm.config).__name__


def _refuse_outside(waiting: Iterable[str], names: Sequence[str]) -> None:
    outside = [tensor for tensor in waiting if not any(is_inside(tensor, name) for name in names)]
    if outside:
        raise NotSupportedError(
            f"{outside[0]} has a static scale and lies outside the blocks, which run alone. Possible: exclude that "
            "layer, or quantize_model on the model in memory."
        )


def _on(call: Call, device: torch.device) -> Call:
    """The call with its tensors on a device."""
    return Call(_moved(call.args, device), _moved(dict(call.kwargs), device), call.key)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if type(value) in (tuple, list) else value
