"""Quantizes a model one block at a time, for models whose blocks are not all in memory, or not all on the device.

    for each block:   bring its weights
                      algorithms; scales of the weights; static activations observed on the block's own inputs
                      hand the block over; take its weights away
                      its outputs are the inputs of the next block

Weights and scales are those of `quantize_model`: a block computes the same on the same inputs, wherever they come from.
There, a forward of the whole model behind the algorithms shows the ranges that they leave: of outputs, and inside
attention. Here each block is run once more for them, on the outputs of that very forward: the `observed` ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.errors import CalibrationError, NotSupportedError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.block_loop import (
    Hidden,
    LoopState,
    is_inside,
    layers_inside,
    loop_over_blocks,
    record_inputs,
)
from quark.torch.algorithms.block_sweep import SweepAfterBlocks, blocks_path, prepare_algorithms, sweep_block
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.calibration.calibrate import (
    calibrate_weights,
    expert_tokens,
    finish_ranges,
    share_scales,
    waiting_activations,
    waiting_ranges,
)
from quark.torch.calibration.expert_tokens import ExpertCalibration
from quark.torch.config.config import QConfig
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import layer_quantizers, observing, quantizers_off
from quark.torch.model.batches import evaluating
from quark.torch.model.blocks import Call, find_blocks
from quark.torch.model.blocks.recording import with_first


class OnDevice(BlockWeights):
    """Blocks of a model in memory that visit a device while they are worked on.

    Args:
        model: Where it is, it stays, but for the blocks that are kept.
        device: Where blocks run; default: the first GPU, else the CPU.
        resident: So many blocks, the first ones, stay on the device.
    """

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


def quantize_blocks(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Iterable[Any] | None,
    config: QConfig,
    weights: BlockWeights,
    finish: Callable[[str, LoopState], None] | None = None,
    state: LoopState | None = None,
    work: Path | None = None,
    names: list[str] | None = None,
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
        work: Folder for what algorithms learn before the first block; None: in memory.
        names: Of the blocks, as `blocks_without_weights` finds them; None: the weights are there to find them.

    Raises:
        CalibrationError: No data for what needs it.
        NotSupportedError: A static activation outside the blocks, or an algorithm that changes the whole model.
    """
    if not weights.whole:
        refuse_whole(algorithms)
    if names is None:
        data, names = _with_blocks(model, layers, algorithms, data)
    _refuse_outside(waiting_ranges(model, layers), names)
    if data is not None and any(algorithm.learns for algorithm in algorithms):
        data = list(data)  # they read it, too
    with quantizers_off(layers.values()):
        stages = prepare_algorithms(model, names, layers, algorithms, data, weights, work)
    waiting = waiting_ranges(model, layers)
    _say_outside(SweepAfterBlocks(model, layers, names, stages).candidates)
    groups = sibling_groups(model, config.shared_scale_groups)
    observed = _observed(names, observed_tensors(model, layers, stages))
    calls: dict[str, list[Call]] = {}
    if stages or waiting:
        if data is None:
            needing = [*map(_name_of, stages), *waiting]
            raise CalibrationError(
                f"{', '.join(needing[:2])}{', ...' if needing[2:] else ''}: needs calibration data. Possible: pass a "
                "dataloader, or choose a dynamic or weight-only scheme."
            )
        needs_float = any(stage.needs_float for stage in stages)
        calls, first = record_inputs(model, layers, names, data, weights, needs_float or bool(observed))
        state = state if state and state.done else _begin(first, needs_float)

    def quantize(block: Block) -> tuple[Hidden, ...]:
        with torch.no_grad(), evaluating(block.module):
            inside = layers_inside(layers, block.name)
            for algorithm in algorithms if not weights.whole else ():
                algorithm.on_weights(inside)
            return _quantize_block(block, inside, stages, config, block.name in observed, experts)

    experts = ExpertCalibration(config.sync_moe_expert_input_amax, config.calibrate_all_experts)
    loop_over_blocks(model, names, calls, quantize, weights, groups, finish, state)
    experts.say()
    for stage in stages:
        stage.say()


def _with_blocks(
    model: nn.Module, layers: Mapping[str, QuantLayer], algorithms: Sequence[Algorithm], data: Iterable[Any] | None
) -> tuple[Iterable[Any] | None, list[str]]:
    """The batches, and the blocks of a model in memory that the first one finds."""
    data, batch = (None, None) if data is None else with_first(data)
    with quantizers_off(layers.values()):
        return data, find_blocks(model, blocks_path(model, algorithms), batch, layers)


def blocks_without_weights(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Sequence[Any] | None,
    weights: BlockWeights,
) -> list[str]:
    """Names of the blocks of a model whose weights are brought a block at a time: those that are found in memory.

    Args:
        model: Its weights may be elsewhere.
        layers: Full name -> quantized layer.
        algorithms: That run; some name the list of blocks.
        data: Calibration batches; None: the largest list is taken.
        weights: Brings them.
    """
    path = blocks_path(model, algorithms)
    with quantizers_off(layers.values()):
        return find_blocks(model, path, data[0] if data else None, layers, weights.around)


def _say_outside(outside: Collection[str]) -> None:
    if outside:
        logger.info("Rounded to nearest, as they lie outside the blocks, which run alone: %s.", ", ".join(outside))


def _begin(recorded: LoopState, needs_float: bool) -> LoopState:
    """The state before the first block: ranges are observed behind embeddings in float, whoever else needs these."""
    return LoopState(0, None, recorded.float_hidden if needs_float else None, recorded.float_hidden)


def observed_tensors(
    model: nn.Module, layers: Mapping[str, QuantLayer], algorithms: Sequence[Algorithm]
) -> frozenset[str]:
    """Names of the tensors whose ranges are observed behind the algorithms: all that wait for one, but for the inputs
    of layers where algorithms read them, and observe them, too.
    """
    read = any(algorithm.reads_inputs for algorithm in algorithms)
    return frozenset(waiting_ranges(model, layers)) - frozenset(waiting_activations(layers, ("input",)) if read else ())


def _observed(names: Sequence[str], tensors: Collection[str]) -> frozenset[str]:
    """The blocks that are run to observe the ranges of tensors: all up to the last one that holds such a tensor."""
    holding = [any(is_inside(tensor, name) for tensor in tensors) for name in names]
    return frozenset(name for index, name in enumerate(names) if any(holding[index:]))


def _quantize_block(
    block: Block,
    layers: Mapping[str, QuantLayer],
    stages: Sequence[Algorithm],
    config: QConfig,
    observes: bool,
    experts: ExpertCalibration,
) -> tuple[Hidden, Hidden, Hidden]:
    """Quantize the layers of one block; its outputs, those of the float block, and those that ranges are observed on.

    Args:
        block: Its weights are there.
        layers: Those of the block.
        stages: The algorithms that read inputs of layers.
        config: Of the model.
        observes: Whether a range in this block or in one behind it waits for data.
        experts: How those of mixtures are calibrated.
    """
    hidden: Hidden = None
    float_hidden: Hidden = None
    observed: Hidden = None
    if stages:
        with quantizers_off(layers.values()):
            hidden, float_hidden = sweep_block(block, layers, stages, experts)
    calibrate_weights(layers)
    share_scales(layers, block.shared_scale_groups)
    if observes:
        waiting = waiting_ranges(block.module, layers, block.name)
        with observing(layer_quantizers(layers.values()), waiting), expert_tokens(block.module, config):
            observed = block.run(block.observed_calls)
        finish_ranges(waiting, config)
    return hidden, float_hidden, observed


def refuse_whole(algorithms: Sequence[Algorithm]) -> None:
    """Raise NotSupportedError for an algorithm that needs the whole model at once."""
    for algorithm in algorithms:
        if algorithm.needs_whole:
            raise NotSupportedError(
                f"{_name_of(algorithm)} needs the whole model, which block by block is never in memory. Possible: "
                "quantize_model on the model in memory."
            )


def _name_of(algorithm: Algorithm) -> str:
    return type(algorithm.config).__name__


def _outside(tensors: Iterable[str], names: Sequence[str]) -> list[str]:
    """Tensors that lie in none of the blocks."""
    return [tensor for tensor in tensors if not any(is_inside(tensor, name) for name in names)]


def _refuse_outside(waiting: Iterable[str], names: Sequence[str]) -> None:
    outside = _outside(waiting, names)
    if outside:
        raise NotSupportedError(
            f"{outside[0]} has a static scale and lies outside the blocks, which run alone. Possible: exclude that "
            "layer, or quantize_model on the model in memory."
        )
