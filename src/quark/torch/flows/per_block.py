"""Quantizes a model one block at a time, for models whose blocks are not all in memory, or not all on the device.

    for each block:   bring its weights
                      algorithms; scales of the weights; static activations observed on the block's own inputs
                      hand the block over; take its weights away
                      its outputs are the inputs of the next block

Weights and scales are those of `quantize_model`: a block computes the same on the same inputs, wherever they come from.
There, a forward of the whole model after the algorithms shows the ranges that they leave: of outputs, and inside
attention. Here each block is run once more for them, on the outputs of that very forward: the `observed` ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
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
    is_outside,
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
from quark.torch.flows.preflight import check_gpu
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
        data, batch = (None, None) if data is None else with_first(data)
        with quantizers_off(layers.values()):
            names = find_blocks(model, blocks_path(model, algorithms), batch, layers)
    _refuse_outside(waiting_ranges(model, layers), names)
    check_gpu(model, names, any(algorithm.reads_inputs for algorithm in algorithms), data, weights.device)
    if data is not None and any(algorithm.learns for algorithm in algorithms):
        data = list(data)  # they read it, too
    with quantizers_off(layers.values()):
        stages = prepare_algorithms(model, names, layers, algorithms, data, weights, work)
    waiting = waiting_ranges(model, layers)
    if outside := SweepAfterBlocks(model, layers, names, stages).candidates:
        logger.info("Rounded to nearest, as they lie outside the blocks, which run alone: %s.", ", ".join(outside))
    groups = sibling_groups(model, config.shared_scale_groups)
    observed = _observed(names, observed_tensors(model, layers, stages))
    calls: dict[str, list[Call]] = {}
    if stages or waiting:
        calls, first = _first_inputs(model, layers, names, data, weights, stages, waiting, bool(observed))
        state = state if state and state.done else first
    experts = ExpertCalibration(config.sync_moe_expert_input_amax, config.calibrate_all_experts)
    of_weights = [] if weights.whole else algorithms
    quantize = partial(_quantize_block, layers, of_weights, stages, config, observed, experts)
    loop_over_blocks(model, names, calls, quantize, weights, groups, finish, state)
    experts.say()
    for stage in stages:
        stage.say()


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


def observed_tensors(
    model: nn.Module, layers: Mapping[str, QuantLayer], algorithms: Sequence[Algorithm]
) -> frozenset[str]:
    """Names of the tensors whose ranges are observed after the algorithms: all that wait for one, but for the inputs
    of layers where algorithms read them, and observe them, too.
    """
    read = any(algorithm.reads_inputs for algorithm in algorithms)
    return frozenset(waiting_ranges(model, layers)) - frozenset(waiting_activations(layers, ("input",)) if read else ())


def _observed(names: Sequence[str], tensors: Collection[str]) -> frozenset[str]:
    """The blocks that are run to observe the ranges of tensors: all up to the last one that holds such a tensor."""
    holding = [any(is_inside(tensor, name) for tensor in tensors) for name in names]
    return frozenset(name for index, name in enumerate(names) if any(holding[index:]))


def _first_inputs(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    names: list[str],
    data: Iterable[Any] | None,
    weights: BlockWeights,
    stages: Sequence[Algorithm],
    waiting: Collection[str],
    observes: bool,
) -> tuple[dict[str, list[Call]], LoopState]:
    """The calls of the blocks, and the state before the first one. Raises CalibrationError without data."""
    if data is None:
        needing = [*map(_name_of, stages), *waiting]
        raise CalibrationError(
            f"{', '.join(needing[:2])}{', ...' if needing[2:] else ''}: needs calibration data. Possible: pass a "
            "dataloader, or choose a dynamic or weight-only scheme."
        )
    needs_float = any(stage.needs_float for stage in stages)
    calls, recorded = record_inputs(model, layers, names, data, weights, needs_float or observes)
    # Ranges are observed after embeddings in float, whoever else needs these.
    return calls, LoopState(0, None, recorded.float_hidden if needs_float else None, recorded.float_hidden)


@torch.no_grad()
def _quantize_block(
    layers: Mapping[str, QuantLayer],
    of_weights: Sequence[Algorithm],
    stages: Sequence[Algorithm],
    config: QConfig,
    observed: Collection[str],
    experts: ExpertCalibration,
    block: Block,
) -> tuple[Hidden, Hidden, Hidden]:
    """Quantize the layers of one block; its outputs, those of the float block, and those that ranges are observed on.

    Args:
        layers: Those of the model.
        of_weights: The algorithms that change weights before any input is read.
        stages: The algorithms that read inputs of layers.
        config: Of the model.
        observed: Blocks that are run to observe ranges: of them, or of later ones.
        experts: How those of mixtures are calibrated.
        block: Its weights are there.
    """
    hidden: Hidden = None
    float_hidden: Hidden = None
    seen: Hidden = None
    inside = layers_inside(layers, block.name)
    with evaluating(block.module):
        for algorithm in of_weights:
            algorithm.on_weights(inside)
        if stages:
            with quantizers_off(inside.values()):
                hidden, float_hidden = sweep_block(block, inside, stages, experts)
        calibrate_weights(inside)
        share_scales(inside, block.shared_scale_groups)
        if block.name in observed:
            waiting = waiting_ranges(block.module, inside, block.name)
            with observing(layer_quantizers(inside.values()), waiting), expert_tokens(block.module, config):
                seen = block.run(block.observed_calls)
            finish_ranges(waiting, config)
    return hidden, float_hidden, seen


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


def _refuse_outside(waiting: Iterable[str], names: Sequence[str]) -> None:
    outside = [tensor for tensor in waiting if is_outside(tensor, names)]
    if outside:
        raise NotSupportedError(
            f"{outside[0]} has a static scale and lies outside the blocks, which run alone. Possible: exclude that "
            "layer, or quantize_model on the model in memory."
        )
