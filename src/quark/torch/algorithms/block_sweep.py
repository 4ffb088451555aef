"""The sweep: accuracy algorithms, block by block, each block's inputs being what the blocks before it really give.

    for each block:   for each algorithm in the order given:   one forward in lockstep, which halts where layers read
                                                               what makes its output worse is undone: `keep_better`
                      static scales of the activations are observed in the last forward
                      its outputs are the inputs of the next block

Algorithms that change the float model without changing its function (smoothing,
rotation) and those that solve weights (GPTQ, ...) follow the same form.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.base.steps import step
from quark.core.checks import naming
from quark.errors import CalibrationError, ConfigError, NotSupportedError, QuarkError, StructureError, one_line
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.block_loop import Hidden, is_outside, layers_inside, loop_over_blocks, record_inputs
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.input_group import no_tokens
from quark.torch.algorithms.keep_better import BlockErrorCheck, prepare_where_better, validation_batches
from quark.torch.algorithms.layer_inputs import input_groups, lockstep
from quark.torch.calibration.calibrate import waiting_activations
from quark.torch.calibration.distributed import broadcast_from_first, merge_observers, part_of, rank, world
from quark.torch.calibration.expert_tokens import ExpertCalibration
from quark.torch.calibration.experts import expert_of, finish_expert_ranges
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.model.batches import evaluating
from quark.torch.model.blocks import find_blocks
from quark.torch.model.blocks.after_blocks import CallAfterBlocks, around_hidden, layers_after_blocks, without_blocks
from quark.torch.model.blocks.recording import with_first
from quark.torch.model.blocks.streams import StreamCall

FOLDED_ON = 8
"""Batches, at most, of which a smoothing before a rotation takes its statistics: it runs the whole model for them."""
LEARNED = "learned-{index}-{rank}"
"""Folder of what an algorithm learns in a process."""


@step("Advanced Algorithms")
def sweep(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Iterable[Any] | None,
    shared_scale_groups: Sequence[Sequence[str]] = (),
    experts: ExpertCalibration | None = None,
    weights: BlockWeights | None = None,
) -> None:
    """Run the algorithms on a model whose layers are replaced and not yet calibrated.

    Args:
        model: Changed in place.
        layers: Full name -> quantized layer.
        algorithms: In the order in which they run.
        data: Calibration batches; may be None if no algorithm needs activations.
        shared_scale_groups: Leaf names of layers with one second-level weight scale.
        experts: How those of mixtures are calibrated.
        weights: Brings and takes the weights of blocks; None: all are where they run.

    Raises:
        ConfigError: No data for an algorithm that needs it.
        StructureError, CalibrationError, NonFiniteError: See there; each names the block or layer.
    """
    weights, experts = weights or BlockWeights(), experts or ExpertCalibration()
    if data is not None and any(algorithm.learns or algorithm.measured_whole for algorithm in algorithms):
        data = list(data)  # read more than once
    algorithms = _after_folding(model, layers, algorithms, data, shared_scale_groups, experts, weights)
    data, batch = (None, None) if data is None else with_first(data)
    with quantizers_off(layers.values()):
        names = find_blocks(model, blocks_path(model, algorithms), batch, layers)
        stages = prepare_algorithms(model, names, layers, algorithms, data, weights)
    if not stages:
        return
    if data is None:
        raise ConfigError(
            f"{', '.join(type(a).__name__ for a in stages)} needs calibration data: pass a dataloader to "
            "quantize_model."
        )

    after_blocks = SweepAfterBlocks(model, layers, names, stages)
    data = list(data) if after_blocks.candidates else data

    def work(block: Block) -> tuple[Hidden, Hidden]:
        with _saying_what_changed(block.name):
            outputs = sweep_block(block, layers, stages, experts)
        after_blocks.see(block, *outputs)
        return outputs

    with quantizers_off(layers.values()), evaluating(model), torch.no_grad():
        needs_float = any(stage.needs_float for stage in stages)
        calls, state = record_inputs(model, layers, names, data, weights, needs_float)
        loop_over_blocks(model, names, calls, work, weights, shared_scale_groups, state=state)
        after_blocks.sweep(data, experts, weights)
    experts.say()
    for stage in stages:
        stage.say()


def _after_folding(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Iterable[Any] | None,
    *of_sweep: Any,
) -> Sequence[Algorithm]:
    """Fold the scales of what stands before a change of the whole model: a rotation, which mixes channels.

    Args:
        model, layers, data: As `sweep` has them; data that are read more than once.
        algorithms: In the order given.
        of_sweep: The other arguments of `sweep`.

    Returns:
        The algorithms that are left.
    """
    whole = max((index for index, algorithm in enumerate(algorithms) if algorithm.measured_whole), default=0)
    before = [each for each in algorithms[:whole] if each.folds_scales]
    if not before or data is None:
        return algorithms
    sweep(model, layers, before, list(islice(data, FOLDED_ON)), *of_sweep)
    return [each for each in algorithms if each not in before]


class SweepAfterBlocks:
    """The sweep over what runs after the blocks, by the algorithms that solve layers there too.

    Attributes:
        candidates: The quantized linear layers outside of the blocks; none where no algorithm would solve them.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, QuantLayer], names: Sequence[str], stages: Sequence[Algorithm]
    ) -> None:
        self.model, self.names = model, names
        self.stages = [stage for stage in stages if stage.solves_after_blocks]
        outside = {n: layer for n, layer in layers.items() if is_outside(n, names)}
        linear = {n: layer for n, layer in outside.items() if isinstance(layer, nn.Linear) and layer.spec.weight}
        self.candidates = linear if self.stages else {}

    def see(self, block: Block, hidden: Hidden, float_hidden: Hidden) -> None:
        """Note what a block gives, if it is the last one and layers are solved after it."""
        if block.name != self.names[-1] or not self.candidates:
            return
        # One for all batches, unless their shapes say what is beside a hidden state.
        first = around_hidden(block.calls[0], block.module)
        self.around = [call.around if isinstance(call, StreamCall) else first for call in block.calls]
        self.hidden, self.float_hidden, self.place = hidden or [], float_hidden or hidden or [], block.place

    def sweep(self, data: Iterable[Any], experts: ExpertCalibration, weights: BlockWeights) -> None:
        """Run the algorithms on the layers after the blocks. Where a model does not run without them, a line says so.

        Args:
            data: The batches of all processes.
            experts: How those of mixtures are calibrated.
            weights: Brings and takes the weights of the layers.
        """
        if self.candidates:
            with _saying_what_changed(""), weights.holding(self.candidates):
                self._sweep(list(part_of(data)), experts)

    def _sweep(self, batches: Sequence[Any], experts: ExpertCalibration) -> None:
        without = without_blocks(self.model, self.names)
        try:
            found = layers_after_blocks(without, self._calls(self.hidden, batches)[0])
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            logger.info("Layers after the blocks are rounded to nearest: the model alone fails (%s).", one_line(error))
            return
        layers = {name: self.candidates[name] for name in found if name in self.candidates}
        if layers:
            calls, float_calls = (self._calls(hidden, batches) for hidden in (self.hidden, self.float_hidden))
            block = Block("", without, calls, float_calls, place=self.place)
            sweep_block(block, layers, self.stages, experts)

    def _calls(self, hidden: Sequence[torch.Tensor], batches: Sequence[Any]) -> list[Any]:
        device = self.place.device if self.place.on_host else None
        all_of = zip(hidden, batches, self.around, strict=True)
        return [CallAfterBlocks((x,), {}, None, batch, around, device=device) for x, batch, around in all_of]


def prepare_algorithms(
    model: nn.Module,
    names: Sequence[str],
    layers: Mapping[str, QuantLayer],
    algorithms: Sequence[Algorithm],
    data: Iterable[Any] | None = None,
    weights: BlockWeights | None = None,
    work: Path | None = None,
) -> list[Algorithm]:
    """Prepare the algorithms; those that read inputs of layers in the blocks.

    Args:
        model: Holds the layers.
        names: Of its blocks.
        layers: Full name -> quantized layer.
        algorithms: In the order in which they run.
        data: Calibration batches, from which some learn before the first block.
        weights: Brings and takes the weights of blocks; None: all are in memory.
        work: Folder for what they learn, where a killed run finds it; None: in memory.
    """
    _refuse_processes(algorithms)
    for index, algorithm in enumerate(algorithms):
        _refuse_no_layer(algorithm, names, layers)
        if not _prepared(algorithm, model, names, layers, data):
            continue
        if weights is None or weights.whole:
            algorithm.on_weights(layers)
        if algorithm.learns:
            if data is None:
                raise ConfigError(f"{type(algorithm.config).__name__} needs calibration data to learn from.")
            own = None if work is None else work / LEARNED.format(index=index, rank=rank())
            batches = data if isinstance(data, Sequence) else list(data)
            algorithm.learn(model, layers, batches, weights or BlockWeights(), own)
    return [algorithm for algorithm in algorithms if algorithm.reads_inputs]


def _prepared(
    algorithm: Algorithm,
    model: nn.Module,
    names: Sequence[str],
    layers: Mapping[str, QuantLayer],
    data: Iterable[Any] | None,
) -> bool:
    """Prepare an algorithm; return False where that makes the model no better, or is not possible and may be left."""
    try:
        if algorithm.keeps_better and algorithm.measured_whole and data is not None:
            return prepare_where_better(algorithm, model, names, layers, data)
        algorithm.prepare(model, names, layers)
    except (StructureError, NotSupportedError, ConfigError) as error:
        if not getattr(algorithm.config, "where_possible", False):
            raise
        algorithm.left_out = True
        logger.info("Without %s, which this model does not allow: %s", algorithm.name, one_line(error))
        return False
    return True


@contextmanager
def _saying_what_changed(block: str) -> Iterator[None]:
    """Add to an error that the weights before this block are not what they were: no second copy of them is kept."""
    try:
        yield
    except QuarkError as error:
        where = f"up to the block {block!r}" if block else "of the model"
        raise type(error)(f"{error} Weights {where} may have changed: load the model again.") from error


def sweep_block(
    block: Block,
    layers: Mapping[str, QuantLayer],
    stages: Sequence[Algorithm],
    experts: ExpertCalibration,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the algorithms on one block; its outputs and, if an algorithm needs them, those of the float block."""
    _find_groups(block, layers, stages, experts)
    hidden: list[torch.Tensor] = []
    float_hidden: list[torch.Tensor] = []
    original: nn.Module | None = None
    read, measured = _read_and_measured(block, stages)
    check = BlockErrorCheck(measured, layers_inside(layers, block.name), read)
    for index, stage in enumerate(stages):
        if stage.needs_float and original is None:
            # After the transforms, which change what the layers read but not what the block computes.
            original = copy.deepcopy(block.module)
        last = index == len(stages) - 1
        start, before = time.perf_counter(), check.keep() if stage.keeps_better else None
        _refuse_repeated(block, stage)
        watch = _observing_inputs(block, layers, experts) if last else nullcontext()
        float_once = not any(later.needs_float for later in stages[index + 1 :])
        some = read if stage.reads_some else None
        hidden, beside = _run(block, stage, original if stage.needs_float else None, watch, float_once, some)
        float_hidden = beside or float_hidden
        if not check.keeps(stage, before, start) and last:
            # What was observed, and what the next block reads, came from weights that are gone.
            rounding = check.rounded_weights() if stage.rounds else nullcontext()
            with rounding, _observing_inputs(block, layers, experts), block.reading_extra(block.module):
                hidden = block.run(block.calls)
    experts.left += len(block.left)
    return hidden, float_hidden


def _find_groups(
    block: Block, layers: Mapping[str, QuantLayer], stages: Sequence[Algorithm], experts: ExpertCalibration
) -> None:
    """Set the groups of the block, the tokens of others that its experts read, and which of them are left."""
    block.all_experts = experts.all_experts
    if any(stage.by_inputs for stage in stages) or waiting_activations(layers_inside(layers, block.name), ("input",)):
        block.extra_tokens = experts.extra_tokens(block.module, block.calls, any(stage.needs_float for stage in stages))
    with block.reading_extra(block.module):
        block.groups, left = _quantized_groups(block, layers)
    block.left = {name for name in (expert_of(block.full(leaf)) for leaf in left) if name}


def _read_and_measured(block: Block, stages: Sequence[Algorithm]) -> tuple[Block | None, Block]:
    """The block with the batches that algorithms read which are validated apart, and with those that measure them; None
    and all of them where there is no such algorithm, or no batch can be spared.
    """
    apart = any(stage.reads_some for stage in stages)
    numbers = validation_batches(len(block.calls)) if apart else None
    if numbers is None:
        return None, block
    return block.of([n for n in range(len(block.calls)) if n not in numbers]), block.of(numbers)


def _repeated(block: Block) -> set[str]:
    """The layers of a block that run several times, on other tensors each time; relative names."""
    runs = Counter(leaf for group in block.groups for leaf in group)
    return {leaf for leaf, count in runs.items() if count > 1}


def _refuse_repeated(block: Block, stage: Algorithm) -> None:
    """Raise StructureError where a layer runs several times in a block and is solved by what it reads: the second
    time, that comes of layers which are not solved yet.
    """
    repeated = _repeated(block)
    if repeated and stage.by_inputs:
        raise StructureError(
            f"{', '.join(sorted(map(block.full, repeated)))}: these layers run more than once in a block, so "
            f"{stage.name} cannot solve the block in one sweep. Possible: AutoRound, which learns whole blocks, or "
            "leaving these layers out (exclude)."
        )


def _run(
    block: Block,
    stage: Algorithm,
    original: nn.Module | None,
    watch: AbstractContextManager[None],
    float_once: bool,
    read: Block | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One algorithm on one block; `watch` is around the forwards, not around what the algorithm runs before.

    Args:
        block: With all batches, whose outputs are wanted.
        stage: The algorithm.
        original: The float block, where the algorithm compares with it.
        watch: What is around the forwards.
        float_once: Whether the float block runs for the last time.
        read: The same block with the batches that the algorithm reads; None: all.
    """
    shown = read or block
    stage.enter(shown)
    once = block.groups  # a batch halts at each layer once
    if not stage.by_inputs:
        repeated = _repeated(block)
        once = [group for group in block.groups if repeated.isdisjoint(group)]
    with watch:
        hidden, float_hidden = lockstep(
            block.name,
            block.module,
            shown.calls,
            once,
            lambda group: stage.on_inputs(group, shown),
            original,
            shown.float_calls if original is not None else (),
            (lambda groups: stage.on_expert_inputs(groups, shown)) if stage.batches_experts else None,
            float_once,
            block.place,
            block.reading_extra,
            block.all_experts,
            shown.batches,
        )
        if read:
            outputs = dict(zip(read.batches, hidden, strict=True))
            others = [number for number in block.batches if number not in outputs]
            with block.reading_extra(block.module):
                outputs |= zip(others, block.run([block.calls[number] for number in others]), strict=True)
            hidden = [outputs[number] for number in block.batches]
    stage.leave(shown)
    broadcast_from_first(block.module)
    return hidden, float_hidden


@contextmanager
def _observing_inputs(block: Block, layers: Mapping[str, QuantLayer], experts: ExpertCalibration) -> Iterator[None]:
    """Within: the block's static input quantizers collect what their layers really get; then their scales are fixed.

    A layer's input is final when it is read: what follows changes weights before it at most in ways that keep it.
    """
    waiting = waiting_activations(layers_inside(layers, block.name), ("input",))
    for quantizer in waiting.values():
        quantizer.start_observing()
    yield
    merge_observers(waiting)
    experts.ranges |= finish_expert_ranges(waiting, experts.shared_ranges)
    for name, quantizer in waiting.items():
        with naming(name):
            quantizer.finish_observing()


def _with_quantized_weights(block: Block, layers: Mapping[str, QuantLayer]) -> list[str]:
    """The linear layers of a block whose weights are quantized."""
    linear = [leaf for leaf, module in block.module.named_modules() if isinstance(module, nn.Linear)]
    return [leaf for leaf in linear if block.full(leaf) in layers and layers[block.full(leaf)].spec.weight]


def _quantized_groups(block: Block, layers: Mapping[str, QuantLayer]) -> tuple[list[tuple[str, ...]], set[str]]:
    """Groups of linear layers with quantized weights that read one tensor, in running order; layers that none reaches.

    Those are layers of experts, which are called only with tokens. Raises CalibrationError where it is another layer.
    """
    linear = _with_quantized_weights(block, layers)
    found: list[list[tuple[str, ...]]] = []
    for call in block.calls:  # whole: a layer that takes a long sequence in parts runs once on a short one
        found.append(input_groups(block.module, linear, call))
        if len({leaf for group in found[-1] for leaf in group}) == len(linear):
            return found[-1], set()
    idle = set(linear) - {leaf for groups in found for group in groups for leaf in group}
    names = [block.full(leaf) for leaf in linear if leaf in idle]
    # Processes that see different layers would wait for each other.
    strange = names if world() > 1 else [name for name in names if expert_of(name) is None]
    if strange:
        raise CalibrationError(f"{no_tokens(', '.join(strange))} One batch at least must reach all layers of a block.")
    return _in_one_order(found, linear), idle


def _in_one_order(found: Sequence[Sequence[tuple[str, ...]]], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of all batches in an order that fits each; where several do, as layers are named.

    Raises StructureError where none fits.
    """
    places = {leaf: index for index, leaf in enumerate(names)}
    order: TopologicalSorter[tuple[str, ...]] = TopologicalSorter()
    for groups in found:
        for group in groups:
            order.add(group)
        for first, second in pairwise(groups):
            order.add(second, first)
    try:
        order.prepare()
    except CycleError as cycle:
        raise StructureError(
            f"{', '.join(cycle.args[1][0])}: these layers do not run in the same order for all batches."
        ) from cycle
    sorted_groups: list[tuple[str, ...]] = []
    ready: list[tuple[int, tuple[str, ...]]] = []
    while order.is_active():
        for group in order.get_ready():
            heappush(ready, (places[group[0]], group))
        _, group = heappop(ready)
        sorted_groups.append(group)
        order.done(group)
    return sorted_groups


def _refuse_processes(algorithms: Sequence[Algorithm]) -> None:
    """Raise NotSupportedError for an algorithm that would learn from a part of the data only."""
    for algorithm in algorithms:
        if world() > 1 and not algorithm.sums:
            raise NotSupportedError(
                f"{type(algorithm).__name__} needs all calibration data in one process, of which there are {world()}. "
                "Possible: one process, or an algorithm that reads second moments (GPTQ, AWQ, SmoothQuant, ...)."
            )


def _refuse_no_layer(algorithm: Algorithm, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
    """Raise ConfigError for an algorithm that would find none of the layers that it is to work on."""
    wanted = getattr(algorithm.config, "inside_layer_modules", None) or []
    inside = {name.removeprefix(f"{block}."): None for block in blocks for name in layers_inside(layers, block)}
    if wanted and inside and not any(name in inside for name in wanted):
        raise ConfigError(
            f"{type(algorithm.config).__name__}.inside_layer_modules names no quantized layer of the blocks: "
            f"{', '.join(wanted[:6])}. Possible: {', '.join([*inside][:12])}."
        )


def blocks_path(model: nn.Module, algorithms: Sequence[Algorithm]) -> str | None:
    """Where the algorithms say that the blocks are; None: they are found."""
    paths = {algorithm.blocks_path(model) for algorithm in algorithms} - {None}
    if len(paths) > 1:
        raise ConfigError(f"The algorithms name different model_decoder_layers: {', '.join(sorted(map(str, paths)))}.")
    return paths.pop() if paths else None
