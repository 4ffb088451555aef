"""The time and memory of a job, from a model without weights: estimates, and errors before the first block.

    least = weights there at once + H and its factor of the widest layer + inputs of one block for all samples
    about = least + what work takes beside: the block twice more, some rows that are solved, experts that are at once

Weights: all of them, or block by block the largest block. A job for which less than `least` is free would end in the
middle, and is refused. What is said is the whole of the process: `about`, and what it has already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark.base.log import logger
from quark.base.memory_and_disk import available_memory, check_disk, check_memory, free_disk, memory_in_use
from quark.base.progress import write_event
from quark.core.array import DEVICE_CHUNK
from quark.torch.calibration.device_memory import HELPS, check_device, free_on
from quark.torch.calibration.experts import at_once
from quark.torch.calibration.work_device import ON_DEVICE
from quark.torch.model.batches import hidden_width, tokens_in
from quark.torch.model.blocks import find_blocks
from quark.torch.model.passes import UnfusedExperts

if TYPE_CHECKING:
    from quark.torch.algorithms.base import Algorithm

TEMPORARIES, CANDIDATES = 9, 3
"""Arrays of the rows that are solved at once, and chunks of candidates for scales, that are alive together. Counted on
the pretended GPU."""


@dataclass(frozen=True)
class OnGpu:
    """Bytes that GPTQ of a model has on a GPU at once, where blocks visit it or are streamed.

    Attributes:
        block: Weights of the largest block.
        solver: The Hessian of its widest layer and the factor, in float32.
        work: What looks for scales, or solves some rows: the larger of both.
        batches: Batches that wait for their turn, at most.
    """

    block: int
    solver: int
    work: int
    batches: int

    @property
    def together(self) -> int:
        """All of it."""
        return self.block + self.solver + self.work + self.batches


def on_gpu(model: nn.Module, tokens: int, names: Sequence[str] | None = None) -> OnGpu:
    """Return the bytes that GPTQ has on a GPU at once: `block + 8 n^2 + max(3 chunks, 36 max(elements, rows n)) +
    waiting batches`.

    Args:
        model: With or without weights.
        tokens: Of all calibration data.
        names: Of the blocks; None: those of one list.
    """
    names = find_blocks(model) if names is None else names
    block = max((model.get_submodule(name) for name in names), key=_bytes)
    wide = max((m.in_features for m in block.modules() if isinstance(m, nn.Linear)), default=0)
    item = next(p.element_size() for p in block.parameters())
    from quark.torch.algorithms.rounding.gptq import ELEMENTS, LEAST_ROWS  # where it runs

    rows = TEMPORARIES * 4 * max(ELEMENTS, LEAST_ROWS * wide)
    # What a block reads and gives, and what its widest layer reads.
    between = item * tokens * (2 * hidden_width(model) + wide)
    return OnGpu(_bytes(block), 8 * wide**2, max(CANDIDATES * DEVICE_CHUNK, rows), min(ON_DEVICE, between))


def check_gpu(
    model: nn.Module, names: Sequence[str], solving: bool, data: Iterable[Any] | None, device: torch.device | None
) -> None:
    """Raise TooLittleMemoryError where the largest block, and the matrices of its solver, do not fit onto a GPU.

    Args:
        model: With or without weights.
        names: Of its blocks, which visit the device one at a time.
        solving: Whether an algorithm reads the inputs of layers.
        data: Calibration batches.
        device: Where blocks run; None, or a CPU: nothing is to be looked at.
    """
    if device is None or device.type != "cuda":
        return
    made = on_gpu(model, tokens_in(data) if isinstance(data, Sequence) else 0, names)
    least = made.block + (made.solver if solving else 0)
    there = {name: _bytes(model.get_submodule(name)) for name in names}
    largest = max(there, key=there.__getitem__)
    check_device(
        device, least, f"The block {largest or 'that is the model'}{' with its solver' if solving else ''}", HELPS
    )
    if solving:
        logger.info("On %s about %s.", device, _beside(made.together, free_on(device)))


@dataclass(frozen=True)
class Estimate:
    """An estimate of a job.

    Attributes:
        blocks: How many there are.
        weights: Bytes of the weights that are in memory at once.
        solver: Bytes of the matrices of the widest layer; 0 without a solver.
        inputs: Bytes of the inputs of one block for all samples; 0 where nothing runs, or their size is unknown.
        output: Bytes of the quantized tensors.
        scores: Bytes of what an algorithm learns of all blocks; in memory, or on disk beside the output.
        whole: Whether all weights, and what is learned, are in memory.
        work: Bytes that come and go meanwhile.
        unit: What is counted by `blocks`.
    """

    blocks: int
    weights: int
    solver: int
    inputs: int
    output: int
    scores: int = 0
    whole: bool = True
    work: int = 0
    unit: str = "blocks"

    @property
    def about(self) -> int:
        """Bytes of memory that it comes to."""
        return self.memory + self.work

    @property
    def memory(self) -> int:
        """Bytes of memory at least."""
        return self.weights + self.solver + self.inputs + (self.scores if self.whole else 0)

    @property
    def disk(self) -> int:
        """Bytes of disk."""
        return self.output + (0 if self.whole else self.scores)


def estimate(
    model: nn.Module,
    output: int,
    algorithms: Sequence[Algorithm],
    data: Sequence[Any] | None,
    *,
    whole: bool,
    observes: bool = False,
    names: Sequence[str] | None = None,
) -> Estimate:
    """Estimate a job.

    Args:
        model: With or without weights.
        output: Bytes of the quantized tensors.
        algorithms: That run.
        data: Calibration batches.
        whole: Whether all weights are in memory; else a block at a time.
        observes: Whether ranges are observed block by block, beside or without algorithms.
        names: Of the blocks; None: those of one list.
    """
    names = find_blocks(model) if names is None else names
    blocks = [_bytes(model.get_submodule(name)) for name in names]
    solving = [algorithm for algorithm in algorithms if algorithm.reads_inputs]
    widest = max((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    series = bool(solving) + observes  # what observing runs on is kept beside what algorithms do
    inputs = series * tokens_in(data) * hidden_width(model) * 4 if series and data else 0
    solver = 2 * 4 * widest**2 if solving else 0
    scores = sum(algorithm.learned_bytes(model, names, data or ()) for algorithm in algorithms)
    largest = max(blocks)
    # Beside the block: its weights to nearest, with which an algorithm is compared, and what it was before.
    work = 2 * largest + _work(model) if solving else 0
    weights = _bytes(model) if whole else largest
    return Estimate(len(names), weights, solver, inputs, output, scores, whole, work)


def _work(model: nn.Module) -> int:
    """Bytes of what solves some rows of the widest layer, or of the experts that are solved at once."""
    from quark.torch.algorithms.rounding.gptq import ELEMENTS, LEAST_ROWS  # where it runs

    experts = {id(expert) for each in model.modules() if isinstance(each, UnfusedExperts) for expert in each.children()}
    work = 0
    for module in model.modules():
        by_width: dict[int, list[nn.Linear]] = {}
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                by_width.setdefault(layer.in_features, []).append(layer)
        for wide, layers in by_width.items():
            together = at_once(layers) if id(module) in experts else 1
            solver = 8 * wide**2 * (together - 1)  # one is counted already
            work = max(work, solver + TEMPORARIES * 4 * max(ELEMENTS, LEAST_ROWS * wide * together))
    return work


def preflight(
    made: Estimate, output: Path, data: Sequence[Any] | None, possible: str, *, written: bool = False
) -> None:
    """Say what a job will take, before it begins.

    Args:
        made: The estimate.
        output: Where the result goes.
        data: Calibration batches.
        possible: What to do where memory is too small.
        written: Whether the files are there at their full size, and the disk was large enough.

    Raises:
        OutputError: The disk is too small.
        TooLittleMemoryError: The memory is.
    """
    if not written:
        check_disk(output, made.disk)
    check_memory(made.memory, "This job", possible)
    disk, memory, used = free_disk(output), available_memory(), memory_in_use()
    free = None if memory is None else used + memory
    logger.info(
        "About to quantize %d %s. Estimates: memory about %s, %s of it in use, output %s%s.",
        made.blocks, made.unit, _beside(used + made.about, free), _beside(used, None),
        _beside(made.disk, disk),
        f"; {len(data)} samples, {tokens_in(data)} tokens" if data and tokens_in(data) else "",
    )  # fmt: skip
    write_event(
        "preflight", blocks=made.blocks, memory_bytes=made.memory, memory_about=made.about, memory_used=used,
        memory_free=memory, output_bytes=made.output, disk_free=disk, samples=len(data) if data else 0,
        tokens=tokens_in(data),
    )  # fmt: skip


def _beside(needed: int, free: int | None) -> str:
    there = "" if free is None else f" of {free / 1e9:.1f} GB free"
    return f"{needed / 1e9:.2f} GB{there}" if needed >= 1e8 else f"{needed / 1e6:.1f} MB{there}"


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
